"""The tensors of named tuples, for save_for_backward and for torch's operators."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree, those of FP8 tensors and plans among them."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
