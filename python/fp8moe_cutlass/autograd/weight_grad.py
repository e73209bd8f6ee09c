"""Delivers a weight's gradient to .grad or main_grad, in the backward or at backward_dw()."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8moe_cutlass.autograd.streams import Written, order_with_backward, written
from fp8moe_cutlass.autograd.weights import is_turned
from fp8moe_cutlass.slow_path import slow_path


class Average(Protocol):
    """Turns a gradient, which has summed over the tokens of several ranks, into the average that
    data parallelism takes of the replicated weights' gradients (distributed/shards.py)."""

    @property
    def scale(self) -> float: ...

    @property
    def replicas(self) -> Any:
        """Not None where other ranks hold the same weights."""

    def sum_(self, grad: Tensor) -> None:
        """The sum of the replicas' gradients, in place. Collective."""


@dataclass(frozen=True)
class Destination:
    """The place where one forward's gradient of one weight goes.

    A weight with a `main_grad` (float32 or bfloat16, of the weight's shape, at any address) gets
    its gradient added there; else it is what .grad adds up, in the weight's grad_dtype.
    """

    weight: Any  # torch.nn.Parameter with Megatron's attributes, or any tensor
    dtype: torch.dtype  # of the gradient
    shape: torch.Size  # of the gradient
    average: Average | None = None
    returned: bool = False  # by autograd.grad, which was asked for it: main_grad has no part in it
    turned: bool = False  # the weight lies as [E, K, N], and so should the gradient

    def deliver(self, wgrad: Any, workspace: Tensor | None = None) -> Tensor | None:
        """Run `wgrad`; the gradient, or None: main_grad has it, as Megatron's flag then says."""
        main_grad = self.main_grad
        average = self.average
        if average is not None and average.scale != 1.0:
            wgrad = wgrad.scaled(average.scale)
        if main_grad is None:
            exact = "bfloat16" if self.dtype == torch.bfloat16 else "float32"
            grad: Tensor = wgrad.run(None, False, exact, workspace, turned=self.turned)
            if average is not None and average.replicas is not None:
                average.sum_(grad.mT if is_turned(grad) else grad)
            return grad if grad.dtype == self.dtype else grad.to(self.dtype)
        into = main_grad
        if main_grad.data_ptr() % 16:
            into = main_grad.clone()
            slow_path(
                "misaligned main_grad",
                "[main_grad] begins at no multiple of 16 bytes: each gradient is added to a copy, "
                "which is copied back; align each parameter's part of a flat gradient buffer",
            )
        if average is not None and average.replicas is not None:
            grad = wgrad.run(None, False, "float32", workspace)
            average.sum_(grad)
            into.add_(grad)
        else:
            wgrad.run(into, True, "float32", workspace)
        if into is not main_grad:
            main_grad.copy_(into)
        if hasattr(self.weight, "grad_added_to_main_grad"):
            self.weight.grad_added_to_main_grad = True
        return None

    @property
    def main_grad(self) -> Tensor | None:
        main_grad: Tensor | None = getattr(self.weight, "main_grad", None)
        if main_grad is None or self.returned:
            return None
        if main_grad.shape != self.shape or not main_grad.is_contiguous():
            raise ValueError(
                f"[main_grad] must be contiguous, of the weight's shape {tuple(self.shape)};"
                f" got {tuple(main_grad.shape)}, strides {main_grad.stride()}"
            )
        if main_grad.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"[main_grad] must be float32 or bfloat16; got {main_grad.dtype}")
        return main_grad


class Made(NamedTuple):
    """A gradient that is there, as Destination.deliver runs those that are not."""

    grad: Tensor

    def scaled(self, by: float) -> Made:
        return Made(self.grad * by)

    def run(self, out: Tensor | None, *_: Any, **__: Any) -> Tensor:
        """It, added to `out`."""
        return self.grad if out is None else out.add_(self.grad)


@dataclass(frozen=True)
class Pending:
    """A weight gradient whose backward has run but whose GEMM has not."""

    to: Destination
    wgrad: Any  # fp8_wgrad.Wgrad or bf16.Wgrad
    operands: Written | None

    def run(self) -> None:
        """Into main_grad or .grad, on the current stream, which need not be the backward's: with a
        workspace of its own. All memory is allocated before main_grad is added to: a run that
        raises for lack of it has done nothing, and may run again."""
        if self.operands is not None:
            self.operands.wait(self.wgrad)
        weight, to = self.to.weight, self.to
        megatron = to.main_grad is not None and hasattr(weight, "grad_added_to_main_grad")
        unread = placeholder(to) if megatron and weight.grad is None else None
        grad = to.deliver(self.wgrad)
        if grad is not None:
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
        elif unread is not None:
            weight.grad = unread


@dataclass(frozen=True)
class WeightGrads:
    """The places where one forward's gradients of both weights, and of biases, go."""

    gate_up: Destination
    down: Destination
    pending: list[Pending] | None  # not None: those of the weights wait here
    up: torch.dtype | None = None  # of its gradient; not None: gate_up is the gate alone
    biases: Sequence[Destination | None] = ()  # None: nobody wants it

    def returning(self, gate_up: bool, down: bool, biases: Sequence[Any]) -> WeightGrads:
        """The same, but for those gradients that autograd.grad returns. biases: whether each is
        wanted, and whether so."""
        return replace(
            self,
            gate_up=replace(self.gate_up, returned=gate_up),
            down=replace(self.down, returned=down),
            biases=[
                replace(to, returned=asked) if wanted and to is not None else None
                for to, (wanted, asked) in zip(self.biases, biases, strict=True)
            ],
        )

    def accept(
        self, gate_up: Any, down: Any, workspace: Tensor | None, biases: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Run or defer both wgrads; what the backward returns for gate_up, down and up, and for the
        two biases, whose gradients these are.

        As Megatron expects, a weight that has the attribute `grad_added_to_main_grad` gets it set
        and returns a placeholder, so that hooks on the gradient run; else .grad stays None.
        """
        returned: list[Tensor | None] = [None, None, None, None, None]
        in_place = False
        if self.up is not None and gate_up is not None:
            exact = "bfloat16" if self.gate_up.dtype == torch.bfloat16 else "float32"
            gate, up = gate_up.halves(exact, workspace)
            returned[0], returned[2] = gate.to(self.gate_up.dtype), up.to(self.up)
            gate_up = None
        wgrads: list[Any] = [(0, self.gate_up, gate_up), (1, self.down, down)]
        if self.biases:
            made = [None if grad is None else Made(grad) for grad in biases]
            wgrads += zip((3, 4), self.biases, made, strict=True)
        for n, to, wgrad in wgrads:
            if wgrad is None or to is None:
                continue
            if self.pending is not None and not to.returned and n < 2:
                operands = written(to.weight.device)
                self.pending.append(Pending(to, wgrad, operands))
                continue
            returned[n] = grad = to.deliver(wgrad, workspace)
            if grad is None:
                in_place = True
                if hasattr(to.weight, "grad_added_to_main_grad"):
                    returned[n] = placeholder(to)
        if in_place:
            order_with_backward(self.gate_up.weight.device)
        return returned


def averaged(grads: list[Tensor | None], average: Average | None) -> list[Tensor | None]:
    """Gradients that have summed over the tokens of several ranks, as their averages; in place."""
    for grad in grads:
        if average is not None and grad is not None:
            grad.mul_(average.scale)
            if average.replicas is not None:
                average.sum_(grad)
    return grads


def weight_grads(
    weights: Sequence[Any],
    held: Sequence[Tensor],
    pending: list[Pending] | None = None,
    average: Average | None = None,
    up: torch.dtype | None = None,
) -> WeightGrads:
    """The places where the gradients of a forward over gate_up, down and biases, if there are any,
    go. held: what of them this rank holds. up: the dtype of a third gradient, where gate_up is the
    gate alone."""
    to = []
    for weight, own in zip(weights, held, strict=True):
        named = getattr(weight, "grad_dtype", None) if weight.is_leaf else None
        dtype, turned = named or weight.dtype, not own.is_contiguous() and is_turned(own)
        to.append(Destination(weight, dtype, own.shape, average, turned=turned))
    return WeightGrads(to[0], to[1], pending, up, to[2:])


_placeholders: dict[Any, Tensor] = {}


def placeholder(to: Destination) -> Tensor:
    """A gradient nobody reads (zeros if weight.zero_out_wgrad), one memory per shape. Detached:
    autograd takes that as it is, and copies a tensor that others refer to."""
    key = (to.shape, to.dtype, to.weight.device)
    if key not in _placeholders:
        _placeholders[key] = torch.zeros(to.shape, dtype=to.dtype, device=to.weight.device)
    zeros = _placeholders[key]
    return (zeros.zero_() if getattr(to.weight, "zero_out_wgrad", False) else zeros).detach()
