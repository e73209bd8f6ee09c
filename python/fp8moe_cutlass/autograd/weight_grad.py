"""Where a weight's gradient goes: .grad, or main_grad in place; now, or at backward_dw()."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# (out, accumulate, dtype) -> dW [E, N, K]. With `out` the gradient is written (accumulate: added)
# there; else a new tensor is returned, of `dtype` ("float32" or "bfloat16"; bf16.py's is bfloat16).
Wgrad = Callable[[Tensor | None, bool, str], Tensor]


@dataclass(frozen=True)
class Gradients:
    """Gradients of one backward; what was not asked for is None. Wgrads are still to be run."""

    dx: Tensor | None  # [T, H] bf16
    dprobs: Tensor | None  # [T, S] f32
    gate_up: Wgrad | None
    down: Wgrad | None


@dataclass
class WgradQueue:
    """Weight gradients whose backward has run but whose GEMM has not (MoEExperts.backward_dw)."""

    pending: list[tuple[WeightGrad, Wgrad]] = field(default_factory=list)

    def run(self) -> None:
        """Compute every pending gradient, oldest first, into main_grad or .grad. One that raises
        is still pending, with those behind it."""
        while self.pending:
            target, wgrad = self.pending[0]
            weight, grad = target.weight, target.compute(wgrad)
            if target.main_grad is None:
                weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
            del self.pending[0], wgrad  # and what it has saved


@dataclass
class WeightGrad:
    """The destination of one weight's gradient.

    A weight with a `main_grad` (float32 or bfloat16, of the weight's shape) gets its gradient added
    there, or written when `first_microbatch` is True. As Megatron expects, a weight that has the
    attribute `grad_added_to_main_grad` gets it set and returns a placeholder of the weight's dtype
    (zeros if `zero_out_wgrad`), so that hooks on the gradient run; otherwise .grad stays None.
    """

    weight: Any  # torch.nn.Parameter with Megatron's attributes
    first_microbatch: bool | None = None
    queue: WgradQueue | None = None

    @property
    def main_grad(self) -> Tensor | None:
        main_grad: Tensor | None = getattr(self.weight, "main_grad", None)
        if main_grad is None:
            return None
        if main_grad.shape != self.weight.shape or not main_grad.is_contiguous():
            raise ValueError(
                f"[main_grad] must be contiguous, of the weight's shape {tuple(self.weight.shape)};"
                f" got {tuple(main_grad.shape)}, strides {main_grad.stride()}"
            )
        if main_grad.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"[main_grad] must be float32 or bfloat16; got {main_grad.dtype}")
        return main_grad

    def accept(self, wgrad: Wgrad) -> Tensor | None:
        """Run or defer `wgrad`; what the backward returns for the weight."""
        if self.queue is None:
            return self.compute(wgrad)
        self.queue.pending.append((self, wgrad))
        return None

    def compute(self, wgrad: Wgrad) -> Tensor | None:
        main_grad = self.main_grad
        if main_grad is None:
            dtype = self.weight.dtype
            exact = "bfloat16" if dtype == torch.bfloat16 else "float32"
            return cast(wgrad(None, False, exact), dtype)
        wgrad(main_grad, self.first_microbatch is not True, "float32")
        if not hasattr(self.weight, "grad_added_to_main_grad"):
            return None
        self.weight.grad_added_to_main_grad = True
        zero = getattr(self.weight, "zero_out_wgrad", False)
        return (torch.zeros_like if zero else torch.empty_like)(self.weight)


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t.to(dtype), which takes torch two microseconds to return t itself."""
    return t if t.dtype == dtype else t.to(dtype)
