"""A projection of Megatron's experts: a parameter per expert, over one tensor for the kernels.

Names are TEGroupedMLP's, linear_fc1.weight{i}, by which bridges to other checkpoints and rollout
engines walk a model. Megatron fills its gradient buffers from the last parameter to the first: the
parameters are registered from the last expert to the first, so that experts ascend in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8moe_cutlass.autograd.weight_grad import Destination, placeholder
from fp8moe_cutlass.slow_path import slow_path

_REMEDY = "call integrations.megatron.keep_together() before the model is wrapped"


class ExpertLinear(nn.Module):
    """weight0 [N, K] to weight{E-1}. Called, it gives [E, N, K], whose gradients are theirs.

    shape: (E, N, K). attributes: Megatron's, of each parameter, which a conversion may lose.
    bias: also bias0 [N] to bias{E-1}, whose gradients come in the backward.
    """

    tensor_model_parallel = True  # Megatron-Bridge asks a module for this and partition_dim

    def __init__(
        self, shape: Any, dtype: torch.dtype, attributes: dict[str, Any], bias: bool = False
    ) -> None:
        super().__init__()
        experts, *matrix = shape
        self.partition_dim = attributes["partition_dim"]
        self._attributes = {**attributes, "expert_stack": object()}
        self._later: Any = None
        self._count = experts
        for name, of in (("weight", matrix), ("bias", matrix[:1]))[: 1 + bias]:
            for e in reversed(range(experts)):
                made = nn.Parameter(torch.empty(of, dtype=dtype, device="meta"))
                self.register_parameter(f"{name}{e}", made)
        self._stack()

    @property
    def weights(self) -> list[Any]:
        """The weights, from the first expert to the last."""
        return [*reversed(self._parameters.values())][-self._count :]

    @property
    def biases(self) -> list[Any]:
        """The biases likewise; none without."""
        return [*reversed(self._parameters.values())][: -self._count]

    def whole(self) -> Tensor:
        """[E, N, K] without a gradient; a copy, with a SlowPathWarning, where Megatron has put
        something between the parameters."""
        return self._whole(self.weights)

    def _whole(self, weights: list[Any]) -> Tensor:
        found = _one_tensor(weights[0], weights[-1], len(weights))
        if found is None:
            if not weights[0].is_meta:
                slow_path(
                    "experts apart",
                    "[Experts] experts whose weights do not lie behind one another are copied for "
                    f"each forward; {_REMEDY}",
                )
            found = torch.stack([w.detach() for w in weights])
        return found

    def forward(self, later: bool = False) -> Tensor:
        """[E, N, K]. later: a leaf, whose gradients come outside of a backward; `hand_out` gives
        them to the parameters. Called as a module for the hooks that wait for gathered weights."""
        weights = self.weights
        whole = self._whole(weights)
        trained = sum(w.requires_grad for w in weights)
        if not trained:
            self._later = None
            return whole
        if trained < len(weights) and (later or any(hasattr(w, "main_grad") for w in weights)):
            raise NotImplementedError(
                "[Experts] with main_grad or delayed weight gradients all experts of a projection "
                f"are trained or none; got {trained} of {len(weights)}"
            )
        if later:
            if self._later is None or self._later.data_ptr() != whole.data_ptr():
                self._later = whole.requires_grad_()
            _give_main_grad(self._later, weights, None)
            return self._later  # type: ignore[no-any-return]
        if not torch.is_grad_enabled():
            return whole
        scratch: list[Tensor] = []
        made: Any = _Stacked.apply(whole, scratch, *weights)  # type: ignore[no-untyped-call]
        _give_main_grad(made, weights, scratch)
        return made  # type: ignore[no-any-return]

    def hand_out(self) -> None:
        """Gives the gradient of the leaf of `later` to the parameters."""
        leaf, weights = self._later, self.weights
        if getattr(leaf, "main_grad", None) is not None:
            _added(weights)
        elif leaf is not None and leaf.grad is not None:
            for w, grad in zip(weights, leaf.grad.unbind(0), strict=True):
                w.grad = grad if w.grad is None else w.grad.add_(grad)
            leaf.grad = None

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._stack()
        return made

    def __setstate__(self, state: Any) -> None:  # of a copy
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._later = None
        self._stack()

    @torch.no_grad()
    def _stack(self) -> None:
        """Gives parameters Megatron's attributes, and one memory, which a conversion ends."""
        weights, own = self.weights, self._attributes
        of_bias = {k: v for k, v in own.items() if k != "expert_stack"}
        of_bias |= {"partition_dim": 0, "skip_backward_post_hook": False}
        for parameters, attributes in ((weights, own), (self.biases, of_bias)):
            for p in parameters:
                for name, value in attributes.items():
                    if not hasattr(p, name):
                        setattr(p, name, value)
        if weights[0].is_meta or _one_tensor(weights[0], weights[-1], len(weights)) is not None:
            return
        for w, part in zip(weights, torch.stack([w.detach() for w in weights]), strict=True):
            w.data = part


def _one_tensor(first: Any, last: Any, count: int) -> Tensor | None:
    """`count` parts [N, K] as [count, N, K] over their memory, or None. They never overlap and lie
    in order: the first and the last say where all others are."""
    size = first.numel()
    apart = last.storage_offset() - first.storage_offset() != (count - 1) * size
    if apart or first.is_meta or not first.is_contiguous():
        return None
    if first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return None
    shape, strides = (count, *first.shape), (size, *first.stride())
    found: Tensor = first.detach().as_strided(shape, strides, first.storage_offset())
    return found


def _give_main_grad(made: Any, weights: list[Any], scratch: list[Tensor] | None) -> None:
    """Gives `made` the main_grads of the weights, if they have some. Where they lie apart it gets a
    tensor of its own, which `scratch` gets, too."""
    first = getattr(weights[0], "main_grad", None)
    if first is None:
        return
    made.main_grad = _one_tensor(first, weights[-1].main_grad, len(weights))
    if made.main_grad is not None:
        return
    if scratch is None:
        raise RuntimeError(
            "[Experts] main_grads of delayed weight gradients must lie behind one another; "
            f"{_REMEDY}"
        )
    slow_path(
        "main_grads apart",
        "[Experts] main_grads that do not lie behind one another are added to in a second pass;"
        f" {_REMEDY}",
    )
    made.main_grad = torch.zeros(made.shape, dtype=first.dtype, device=made.device)
    scratch.append(made.main_grad)


def _added(weights: list[Any]) -> None:
    """Megatron's flag, where it asks for one: main_grads have the gradients. Its hooks also want
    each parameter to have a .grad, which nobody reads: one tensor is that of all."""
    first = weights[0]
    if not hasattr(first, "grad_added_to_main_grad"):
        return
    unread = placeholder(Destination(first, first.dtype, first.shape))
    for w in weights:
        w.grad_added_to_main_grad = True
        if w.grad is None:
            w.grad = unread


class _Stacked(torch.autograd.Function):
    """The weights as one tensor. With main_grad, that has the gradient already, or `scratch` has
    it, and autograd has none."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, scratch: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.scratch, ctx.weights = scratch, weights
        ctx.set_materialize_grads(False)
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        weights: Any = ctx.weights
        if grad is not None:
            return None, None, *grad.unbind(0)
        for part in ctx.scratch:
            for w, mine in zip(weights, part, strict=True):
                w.main_grad.add_(mine)
        ctx.scratch.clear()
        _added(weights)
        return (None,) * (2 + len(weights))
