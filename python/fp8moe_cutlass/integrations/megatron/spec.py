"""FP8 experts, or the whole layer, into a Megatron spec."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, TypeVar

from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from fp8moe_cutlass.integrations.megatron.experts import Experts
from fp8moe_cutlass.integrations.megatron.layer import MoELayer, TokenExperts
from fp8moe_cutlass.recipe import Fp8Recipe

S = TypeVar("S")


def swap(
    spec: S,
    *,
    layer: bool = False,
    recipe: Fp8Recipe | None = Fp8Recipe(),  # noqa: B008 (frozen)
    preactivation: str | None = None,
    transposed_weights: str | None = None,
) -> S:
    """`spec` with every MoE layer in it computing its experts in FP8; the one given stays as it is.

    spec: a ModuleSpec or the submodules of a transformer layer, a block, a multi-token prediction
    block or a hybrid stack. layer: the whole MoE layer is this library's, so that tokens travel in
    FP8; else its experts alone, on Megatron's own dispatcher. The options are those of `Experts`.
    ValueError if there is no MoE layer, or spec is a model.
    """
    options = {
        "recipe": recipe,
        "preactivation": preactivation,
        "transposed_weights": transposed_weights,
    }
    found: list[Any] = []

    def walk(node: Any) -> Any:
        if isinstance(node, ModuleSpec) and _is_moe_layer(node.module):
            node = partial(node.module, submodules=node.submodules, **node.params)
        if isinstance(node, partial) and _is_moe_layer(node.func):
            found.append(node)
            return _swapped(node, layer, options)
        if type(node) in (list, tuple):
            return type(node)(walk(one) for one in node)
        if isinstance(node, dict):
            return {key: walk(one) for key, one in node.items()}
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            fields = [f.name for f in dataclasses.fields(node) if f.init]
            return dataclasses.replace(node, **{f: walk(getattr(node, f)) for f in fields})
        return node

    if isinstance(spec, nn.Module):
        raise ValueError(
            "[megatron.swap] spec must be what the model is built of; got a model, "
            f"{type(spec).__name__}: swap the spec, and build the model of the result"
        )
    made: S = walk(spec)
    if not found:
        raise ValueError(
            "[megatron.swap] spec must have a MoE layer, as Megatron's functions make it with "
            f"num_experts; got {type(spec).__name__} without one"
        )
    return made


def _is_moe_layer(made: Any) -> bool:
    return isinstance(made, type) and issubclass(made, moe_layer.MoELayer)


def _swapped(node: Any, layer: bool, options: dict[str, Any]) -> Any:
    """partial(MoELayer, submodules=...) with experts of ours."""
    if layer and node.func not in (moe_layer.MoELayer, MoELayer):
        raise NotImplementedError(
            f"[megatron.swap] layer=True replaces Megatron's MoELayer; got {node.func.__name__}"
        )
    experts = partial(TokenExperts if layer else Experts, **options)
    submodules = dataclasses.replace(node.keywords["submodules"], experts=experts)
    own = moe_layer.MoELayer if node.func is MoELayer else node.func
    kind = MoELayer if layer else own
    return partial(kind, *node.args, **{**node.keywords, "submodules": submodules})
