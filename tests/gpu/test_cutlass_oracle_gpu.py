"""The grouped GEMMs against CUTLASS's collective-builder kernel, which shares no line with them.

Build it with `cmake --preset oracle && cmake --build --preset oracle`, or name the library in
FP8MOE_CUTLASS_ORACLE. Both sum every K-block in the same tensor core and promote it to float32, so
they differ by rounding alone: far less than either may differ from float64.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from test_grouped_gemm_gpu import COUNTED, on_gpu, plan_of, poisoned
from torch import Tensor

from fp8moe_cutlass import Fp8Tensor, ops
from test_grouped_gemm import KINDS, segments
from tolerance import UNIT, gemm_truth, scales

LIBRARY = Path(
    os.environ.get(
        "FP8MOE_CUTLASS_ORACLE",
        Path(__file__).parents[2] / "build/oracle/tests/cutlass_oracle/libfp8moe_cutlass_oracle.so",
    )
)
pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason=f"{LIBRARY} is not built")
KINDS_OF_VALUES = pytest.mark.parametrize("kind", ["noise", "range", "largest"])


class Group(ctypes.Structure):
    """`Group` of oracle.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "scale_a", "b", "scale_b", "d")),
        *((name, ctypes.c_int64) for name in ("stride_a", "stride_b")),
        *((name, ctypes.c_int32) for name in ("m", "n", "k")),
    ]


Side = tuple[Tensor, Tensor]  # codes [rows, K], and scales [rows, cdiv(K, 128)] in float64
Oracle = Callable[[list[tuple[Side, Side]]], list[Tensor]]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """Products [M, N] f32 of pairs of sides; every one must have rows and K."""
    function = ctypes.CDLL(str(LIBRARY)).fp8moe_cutlass_oracle
    function.restype = ctypes.c_char_p

    def run(pairs: list[tuple[Side, Side]]) -> list[Tensor]:
        products, groups, alive = [], [], []
        for (a, a_scale), (b, b_scale) in pairs:
            d = poisoned(a.shape[0], b.shape[0], dtype=torch.float32)
            row_scales = [s.float().contiguous() for s in (a_scale, b_scale)]
            pointers = [t.data_ptr() for t in (a, row_scales[0], b, row_scales[1], d)]
            assert a.stride(1) == b.stride(1) == 1
            sizes = (a.shape[0], b.shape[0], a.shape[1])
            groups.append(Group(*pointers, a.stride(0), b.stride(0), *sizes))
            products.append(d)
            alive.append(row_scales)
        torch.cuda.synchronize()
        error = function((Group * len(groups))(*groups), len(groups))
        assert error is None, error.decode()
        return products

    return run


def agree(ours: Tensor, theirs: Tensor, left: Side, right: Side) -> None:
    """Within one unit of tolerance.py, of which each may be several from float64."""
    truth = gemm_truth(left[0].double(), left[1], right[0].double(), right[1])
    over = (ours - theirs).abs().double() - UNIT * truth.peak
    assert ours.isfinite().all()
    assert float(over.max()) <= 0.0


def spans(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Experts that have something, and where."""
    for e, (start, stop) in enumerate(pairwise(offsets.tolist())):
        if stop > start:
            yield e, slice(start, stop)


@COUNTED
@KINDS_OF_VALUES
def test_fprop(oracle: Oracle, kind: str, counts: list[int]) -> None:
    n, k = 400, 656
    plan = plan_of(counts, spare=37)
    a = on_gpu(KINDS[kind](plan.rows, k, layout="gemm"))
    w = on_gpu(KINDS[kind](len(counts), n, k, layout="block"))
    d = ops.grouped_gemm(a, w, plan, out_dtype="float32")
    a_scale, w_scale = scales(a), scales(w)[:, :n]
    experts = list(spans(plan.row_offsets))
    pairs = [((a.data[at], a_scale[at]), (w.data[e], w_scale[e])) for e, at in experts]
    if not pairs:
        pytest.skip("no expert has a row")
    for (_, at), (left, right), product in zip(experts, pairs, oracle(pairs), strict=True):
        agree(d[at], product, left, right)


@COUNTED
@KINDS_OF_VALUES
@pytest.mark.parametrize("layout", ["block", "gemm"])
def test_wgrad(oracle: Oracle, layout: str, kind: str, counts: list[int]) -> None:
    plan = plan_of(counts)
    dy, x = (
        segments(on_gpu(KINDS[kind](c, plan.columns, layout=layout)), plan) for c in (272, 400)
    )
    dw = ops.grouped_gemm_wgrad(dy, x, plan)

    def side(t: Fp8Tensor, at: slice) -> Side:
        block = slice(at.start // 128, at.stop // 128)
        return t.data[:, at], scales(t)[: t.shape[0], block]

    experts = list(spans(plan.col_offsets))
    pairs = [(side(dy, at), side(x, at)) for _, at in experts]
    if not pairs:
        pytest.skip("no expert has a token")
    for (e, _), (left, right), product in zip(experts, pairs, oracle(pairs), strict=True):
        agree(dw[e], product, left, right)
