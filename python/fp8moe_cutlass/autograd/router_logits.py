"""A float32 gate's logits by bfloat16 products: on the tensor core, not in float32 arithmetic.

A float32 is the sum of three bfloat16 of 8 bits each (hi, mid, lo), and a product of two bfloat16
is exact in float32. So a float32 matrix times a bfloat16 one is one GEMM of its parts side by side,
whose results are then added up, the smallest first.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass.autograd.arguments import check_tensor


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H] times weight [E, H] transposed -> [T, E] float32, also under autocast.

    On CUDA with x in bfloat16, T > 1, E > 1, no DTensors (else both are cast to float32, and torch
    does the rest):
    - logits and dweight: every bit of x, weight and dlogits counts; what rounds is the tensor
      core's sum in float32. dweight has weight's dtype.
    - dx: without the products below 2^-13 of |dlogits| |weight| (typically 2^-16 of the root of
      their squares' sum), far below the rounding to bfloat16 unless they cancel a hundredfold. As
      in any bfloat16 GEMM of torch's, allow_bf16_reduced_precision_reduction lets cuBLAS round
      parts of the sum to bfloat16 where it splits K.
    - x is saved for backward and no copy of it. No second derivative, no vmap.
    - What meets a value that is not finite is not finite, but may be NaN where float32 has an
      infinity. Bits of weight and dlogits below 2^-133 count as 0; magnitudes from 2^-110 on have
      none.
    """
    for name, t in (("x", x), ("weight", weight)):
        check_tensor("router_logits", name, t, distributed=True)
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            "[router_logits] x must be [T, H] and weight [E, H]; "
            f"got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    return run(x, weight)


def run(x: Tensor, weight: Tensor) -> Tensor:
    """`router_logits`, for a caller that has checked its arguments."""
    with torch.autocast(x.device.type, enabled=False):
        # A product of one row, column or term inductor decomposes, and then leaves out_dtype out.
        by_parts = x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 1 and len(weight) > 1
        if not by_parts or hasattr(x, "full_tensor"):  # a DTensor has no mm with out_dtype
            return F.linear(x.float(), weight.float())
        if weight.dtype != torch.bfloat16:
            weight = weight.float()
        logits: Tensor = _RouterLogits.apply(x, weight)  # type: ignore[no-untyped-call]
        return logits


class _RouterLogits(torch.autograd.Function):
    """x [T, H] bf16, weight [E, H] f32 or bf16 -> [T, E] f32."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        parts = _split(weight, 3)
        logits = _mm(x, torch.cat(parts[::-1]).t())
        if len(parts) == 1:  # not its only chunk: a view, which no caller may write to in place
            return logits
        return _sum(logits.chunk(len(parts), dim=1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> Any:
        given = (dlogits, *ctx.saved_tensors, *ctx.needs_input_grad)
        return _Gradients.apply(*given)  # type: ignore[no-untyped-call]


class _Gradients(torch.autograd.Function):
    """(dx, dweight). A Function so that every second derivative raises: once_differentiable looks
    at dlogits alone, and what passes x and weight would be 0; under torch.func, all of it."""

    @staticmethod
    def forward(
        dlogits: Tensor, x: Tensor, weight: Tensor, need_dx: bool, need_dweight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        e = len(weight)
        dx = dweight = None
        with torch.autocast(x.device.type, enabled=False):
            hi, mid, lo = _split(dlogits, 3)
            d = torch.cat([lo, mid, hi, hi], dim=1)
            if need_dx:  # mid * hi + hi * hi + hi * mid, in one GEMM
                parts = _split(weight, 2)
                w = torch.cat([parts[0], *parts])
                dx = torch.mm(d[:, e : e + len(w)], w)
            if need_dweight:
                dweight = _sum(_mm(d[:, : 3 * e].t(), x).chunk(3)).to(weight.dtype)
        return dx, dweight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("[router_logits] has no second derivative")


def _split(t: Tensor, count: int) -> tuple[Tensor, ...]:
    """The `count` largest of the three bfloat16 tensors that add up to t; a bfloat16 t itself.

    Each is the upper half of the words of what is left. Cut off, not rounded: so nothing overflows,
    what is left is exact, and inductor, which leaves out roundings it fuses, has none to leave out.
    """
    if t.dtype == torch.bfloat16:
        return (t,)
    # Flat: a view as bfloat16 needs stride 1 in the last dimension, which one of size 1 may lack.
    left = t.contiguous().view(-1)
    parts: list[Tensor] = []
    for _ in range(count):
        if parts:
            left = left - parts[-1]
        parts.append(left.view(torch.bfloat16)[1::2])
    return tuple(part.view(t.shape) for part in parts)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


def _sum(terms: tuple[Tensor, ...]) -> Tensor:
    """Adds the terms in this order in every run, eager or compiled."""
    return functools.reduce(torch.add, terms)
