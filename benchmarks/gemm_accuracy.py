"""How far the GEMMs are from float64: ours and others', on the same operands, in one unit.

c is what a result lost beyond the rounding of its dtype, in units of 2^-13 of the largest value
that the accumulator held (docs/reference/numerics.md). Operands are random and adversarial.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from common import OnResult, Record, environment, main, parser
from fp8moe_cutlass import Fp8Tensor, ops
from fp8moe_cutlass.tensor import scale_shape
from fp8moe_cutlass.tools.verify import reference
from fp8moe_cutlass.tools.verify.compare import array, gemm_error, quantized
from gemm_baselines import PEERS
from gemm_cases import Case, Operands
from timing import Limits

FP8 = torch.float8_e4m3fn
ROUNDING = {"bfloat16": 2.0**-8, "float32": 2.0**-23}
Make = Callable[[tuple[int, ...], bool], Tensor]


def any_codes(shape: tuple[int, ...], left: bool) -> Tensor:
    """Every finite code as often as any other."""
    values = torch.arange(256, dtype=torch.uint8).view(FP8)
    finite = values[values.float().isfinite()]
    return finite.view(torch.uint8)[torch.randint(len(finite), shape)].view(FP8)


def normal_codes(shape: tuple[int, ...], left: bool) -> Tensor:
    """Normal values as quantization leaves them."""
    return (torch.randn(shape) * 100).clamp(-448, 448).to(FP8)


def one_large(shape: tuple[int, ...], left: bool) -> Tensor:
    """One largest code among smallest ones in every 127."""
    x = torch.full(shape, 2.0**-9)
    x[..., ::127] = 448.0
    return (x * (torch.randint(0, 2, shape) * 2 - 1)).to(FP8)


def cancelling(shape: tuple[int, ...], left: bool) -> Tensor:
    """Neighbours along K equal up to the sign of the left one: sums are near zero."""
    half = any_codes((*shape[:-1], shape[-1] // 2), left).float()
    signs = torch.tensor([1.0, -1.0]) if left else torch.ones(2)
    x = (half[..., None] * signs).flatten(-2)
    x[..., 3] = 2.0**-6
    return x.to(FP8)


def largest(shape: tuple[int, ...], left: bool) -> Tensor:
    """The largest code everywhere."""
    return torch.full(shape, 448.0).to(FP8)


OPERANDS: dict[str, Make] = {
    "normal": normal_codes,
    "any codes": any_codes,
    "one large among small": one_large,
    "cancelling": cancelling,
    "largest": largest,
}


def scaled(data: Tensor, layout: str, device: torch.device) -> Fp8Tensor:
    """With scales 2^-4 to 2^4, any mantissa."""
    scale = torch.exp2(torch.rand(scale_shape(tuple(data.shape), layout)) * 8 - 4)
    return Fp8Tensor(data.to(device), scale.to(device), layout)


def compare(name: str, make: Make, k: int, device: torch.device) -> Iterator[Record]:
    """Rows of one kind of operands: 128 rows of one expert by [128, K]."""
    m = n = 128
    a = scaled(make((m, k), True), "gemm", device)
    w = scaled(make((1, n, k), False), "block", device)
    plan = ops.plan_from_counts(torch.tensor([m], dtype=torch.int32, device=device), capacity=m)
    left = reference.dequantize(quantized(a))
    right = reference.dequantize(reference.Quantized(array(w.data)[0], array(w.scale_inv)[0]), 128)
    exact, unit = reference.gemm(left, right)

    def row(who: str, dtype: str, d: Tensor) -> Record:
        c = gemm_error(d.double().cpu().numpy(), exact, unit, ROUNDING[dtype])
        shape = {"M": m, "N": n, "K": k, "E": 1}
        return {"op": name, "shape": shape, "variant": dtype, "who": who, "c": c}

    for dtype in ROUNDING:
        yield row("ours", dtype, ops.grouped_gemm(a, w, plan, out_dtype=dtype))
        if device.type != "cuda":
            continue
        case = Case("fprop", "accuracy", m, n, k, 1, dtype=dtype)
        bf16 = (a.data.bfloat16(), w.data.bfloat16())
        for who in ("DeepGEMM", "torch._scaled_mm 1x128"):
            call = PEERS[who](Operands(case, plan, bf16[0], bf16[1], a, w))
            if call is None:
                continue
            try:
                yield row(who, dtype, torch.as_tensor(call()))
            except Exception as error:  # the library's own; the others still count
                yield {**row(who, dtype, a.data[:, :n]), "c": None, "failed": str(error)[:300]}


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    """c of ours and of the baselines that are here; quick: K = 384."""
    torch.manual_seed(0)
    results: list[Record] = []
    for k in (384,) if given.quick else (2048, 7168):
        for name, make in OPERANDS.items():
            for row in compare(name, make, k, device):
                results.append(row)
                on_result(row)
    return {"environment": environment(Limits(device)), "results": results}


if __name__ == "__main__":
    main(parser(__doc__), run)
