"""The contracts, an operator each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from fp8moe_cutlass import Fp8Tensor, ops
from fp8moe_cutlass.typing import Columns, ScaleKind, ScaleLayout

from . import reference as ref
from .compare import (
    Check,
    Inputs,
    Pairs,
    array,
    bit_equal,
    code_steps,
    column_pairs,
    expand,
    gemm_error,
    pairs_of,
    quantized,
    rounded,
    tile_rows,
    within,
)

# c of the GEMM bound in docs/reference/numerics.md: twice, and one and a half times, the largest
# that the tests met. The CPU sums in float32; a tensor core truncates products to 2^-13 of their
# block's largest.
MAX_C = {"cpu": 0.0086, "cuda": 21.75}


def check_quantize(given: Inputs) -> Iterator[Check]:
    x = given.hard(150, 272)
    cases: list[tuple[str, ScaleKind, ScaleLayout]] = [
        ("e4m3", "pow2", "row"),
        ("e5m2", "pow2", "gemm"),
        ("e4m3", "fp32", "row"),
        ("e5m2", "amax", "row"),
    ]
    for fp8, scale, layout in cases:
        q = ops.quantize(x, fp8_dtype=fp8, scale=scale, scale_layout=layout)
        wanted = ref.quantize(array(x), 1, fp8, scale, largest=ref.LARGEST["float32"])
        pairs = pairs_of(quantized(q), wanted)
        yield bit_equal("quantize", f"{fp8}, {scale} scales, {layout}, Inf and NaN", pairs)


def check_quantize_weight(given: Inputs) -> Iterator[Check]:
    w = given.normal(3, 512, 272)
    q, q_t = ops.quantize_weight(w)
    pairs = []
    for e in range(3):
        wanted = ref.quantize(array(w[e]), 128)
        pairs += [
            (array(q.data)[e], wanted.codes),
            (array(q.scale_inv)[e], wanted.scale),
            (array(q_t.data)[e], wanted.codes.T),
            (array(q_t.scale_inv)[e], wanted.scale.T),
        ]
    yield bit_equal("quantize_weight", "and its transpose", pairs)


def check_turn_weight(given: Inputs) -> Iterator[Check]:
    q = ops.quantize_weight(given.normal(3, 400, 272), transposed=False, scale="amax")
    q_t = ops.turn_weight(q)
    pairs = [(array(q_t.data), array(q.data).transpose(0, 2, 1))]
    pairs.append((array(q_t.scale_inv), array(q.scale_inv).transpose(0, 2, 1)))
    yield bit_equal("turn_weight", "float32 scales", pairs)


def check_dequantize(given: Inputs) -> Iterator[Check]:
    q = ops.quantize(given.normal(150, 272), scale_layout="gemm")
    mine = array(ops.dequantize(q, dtype="float32"))
    wanted = ref.dequantize(quantized(q)).astype(np.float32)
    yield bit_equal("dequantize", "gemm -> float32", [(mine, wanted)])


def check_route(given: Inputs) -> Iterator[Check]:
    for align in (1, 16, 128):
        plan, p = given.routing(300, 7, 3, align)
        pairs = [
            (array(plan.row_of), p.row_of),
            (array(plan.tokens_per_expert), p.counts),
            (array(plan.row_offsets), p.row_offsets),
            (array(plan.col_offsets), p.col_offsets),
        ]
        yield bit_equal("route", f"dropped slots, an empty expert, align={align}", pairs)


def check_router_topk(given: Inputs) -> Iterator[Check]:
    logits = rounded(given.rng.normal(size=(300, 40)).astype(np.float32))  # with ties
    dweights = given.probs(300, 6)
    here = torch.from_numpy(logits).to(given.device)
    r = ops.router_topk(here, 6, select_by="logits")
    idx, weights, gradient = ref.router_topk(logits, array(dweights))
    counts = np.bincount(idx.ravel(), minlength=40)
    pairs = [(array(r.topk_idx), idx), (array(r.tokens_per_expert), counts)]
    yield bit_equal("router_topk", "softmax, 6 of 40, ties", pairs)
    dlogits = ops.router_topk_backward(dweights, None, *r[:3])
    for op, mine, wanted in (
        ("router_topk", r.topk_weights, weights),
        ("router_topk_backward", dlogits, gradient),
    ):
        worst = float(np.abs(array(mine) - wanted).max())
        yield within(op, "softmax, normalized", "within 1e-6", worst, 1e-6)


def check_permute(given: Inputs) -> Iterator[Check]:
    plan, p = given.routing(203, 5, 3, 16)
    end, x, probs = int(p.row_offsets[-1]), given.normal(203, 272), given.probs(203, 3)
    y, permuted = ops.permute_pad(x, plan, probs=probs)
    wanted = np.zeros(end, np.float32)
    kept = p.row_of >= 0
    wanted[p.row_of[kept]] = array(probs)[kept]
    pairs = [(array(y)[:end], ref.permute(array(x), p)), (array(permuted)[:end], wanted)]
    yield bit_equal("permute_pad", "bf16 and probs, align=16", pairs)
    q = ops.quantize(x)
    moved = quantized(ops.permute_pad(q, plan)[0], end)
    still = quantized(q)
    wanted_moved = ref.Quantized(ref.permute(still.codes, p), ref.permute(still.scale, p))
    pairs = pairs_of(moved, wanted_moved)
    yield bit_equal("permute_pad", "FP8 and scales, align=16", pairs)
    dy, drow = given.normal(plan.rows, 272), given.probs(plan.rows)
    dx, dprobs = ops.permute_pad_backward(dy, plan, dprobs=drow)
    sums = rounded(ref.gather_sum(array(dy), p))
    wanted = np.where(kept, array(drow)[p.row_of], np.float32(0))
    pairs = [(array(dx), sums), (array(dprobs), wanted)]
    yield bit_equal("permute_pad_backward", "sums in slot order", pairs)


def check_unpermute(given: Inputs) -> Iterator[Check]:
    plan, p = given.routing(203, 5, 3, 16)
    end, y, probs = int(p.row_offsets[-1]), given.normal(plan.rows, 272), given.probs(203, 3)
    for weights in (None, probs):
        out = array(ops.unpermute_unpad(y, plan, probs=weights))
        wanted = ref.gather_sum(array(y), p, None if weights is None else array(weights))
        case = "sums in slot order" + ("" if weights is None else ", probs")
        yield bit_equal("unpermute_unpad", case, [(out, rounded(wanted))])
    dout = given.normal(203, 272)
    dy, dprobs = ops.unpermute_unpad_backward(dout, plan, y=y, probs=probs)
    rows, dots = np.zeros((end, 272), np.float32), np.zeros((203, 3), np.float32)
    for (t, s), row in np.ndenumerate(p.row_of):
        if row >= 0:
            rows[row] = array(probs)[t, s] * array(dout[t])
            dots[t, s] = ref.pinned_dot(array(y[row]), array(dout[t]))
    pairs = [(array(dy)[:end], rounded(rows)), (array(dprobs), dots)]
    yield bit_equal("unpermute_unpad_backward", "probs, dots in the pinned order", pairs)


def check_dispatch(given: Inputs) -> Iterator[Check]:
    ids, x, probs = given.ids(203, 8, 3), given.normal(203, 272), given.probs(203, 3)
    for segment in (0, 90):
        plan, counts = ops.dispatch_plan(ids, 8, 4, segment=segment)
        d = ref.dispatch(array(ids), 8, 4, segment)
        pairs: Pairs = [
            (array(plan.row_of), d.row_of),
            (array(counts), d.counts),
            (array(plan.status)[:1], np.full(1, d.overflow, np.int32)),
        ]
        case = "exact" if segment == 0 else f"segments of {segment}, {d.overflow} dropped"
        yield bit_equal("dispatch_plan", case, pairs)
        packed = ops.quantize_pack(x, plan, ids, probs, num_experts=8)
        got, *rest = ops.unpack(packed, 272, 3)
        rows = d.row_of[d.row_of >= 0]
        tokens = np.nonzero(d.row_of >= 0)[0]
        wanted = ref.quantize(array(x))
        codes, scale = array(got.data)[rows], array(got.scale_inv)[rows]
        pairs = [(codes, wanted.codes[tokens]), (scale, wanted.scale[tokens])]
        yield bit_equal("quantize_pack", f"{case}: codes and scales", pairs)
        local = ref.local_ids(array(ids), array(probs), d, 2)
        pairs = [(array(part)[rows], w) for part, w in zip(rest, local, strict=True)]
        yield bit_equal("unpack", f"{case}: ids and probs", pairs)


def check_transpose(given: Inputs) -> Iterator[Check]:
    cases: list[tuple[str, Columns]] = [("e4m3", "block"), ("e5m2", "block"), ("e4m3", "column")]
    for fp8, columns in cases:
        plan, p = given.routing(300, 4, 2, 16)
        q = ops.quantize(given.normal(300, 256, spread=6.0), fp8_dtype=fp8)
        rows = ops.permute_pad(q, plan)[0]
        moved = quantized(rows)
        wanted = [
            ref.transpose_fp8(
                ref.Quantized(moved.codes[p.tokens(e)], moved.scale[p.tokens(e)]),
                tile_rows(columns),
                fp8,
            )
            for e in range(4)
        ]
        case = f"{fp8}, {columns}, shifts past the format's range"
        pairs = column_pairs(ops.transpose_fp8(rows, plan, columns=columns), wanted, p)
        yield bit_equal("transpose_fp8", case, pairs)
        pairs = column_pairs(ops.permute_transpose_fp8(q, plan, columns=columns), wanted, p)
        yield bit_equal("permute_transpose_fp8", case, pairs)


def check_counts(given: Inputs) -> Iterator[Check]:
    plan, p = given.routing(300, 4, 2, 16)
    q = ops.quantize(given.normal(300, 256, spread=6.0))
    rows, wanted = ops.permute_pad(q, plan)[0], np.zeros(4, np.int64)
    before = (quantized(rows).codes & 127) != 0
    columns = ops.permute_transpose_fp8(q, plan)
    codes = (array(columns.data).view(np.uint8) & 127) != 0
    mine = [slice(int(p.row_offsets[e]), int(p.row_offsets[e] + p.counts[e])) for e in range(4)]
    after = np.concatenate(
        [codes[:, p.col_offsets[e] : p.col_offsets[e] + p.counts[e]].T for e in range(4)]
    )
    before = np.concatenate([before[m] for m in mine])
    live = ((quantized(q).codes & 127) != 0).reshape(300, 2, 128)
    wanted[0] = 128 * live.any(axis=2).sum()
    wanted[1:] = wanted[0] - live.sum(), before.sum(), (before & ~after).sum()
    counts = plan.row_of.new_zeros(21).long()
    ops.count_codes(q, plan, counts, columns=columns)
    yield bit_equal("count_codes", "codes lost by casts and shifts", [(array(counts)[:4], wanted)])


def check_activation(given: Inputs) -> Iterator[Check]:
    contract = "within 1 code, at most 1 scale in 10^3 at a boundary"
    z, dh, probs = given.normal(260, 512), given.normal(260, 256), given.probs(260)
    args = [array(t).astype(np.float64) for t in (dh, z, probs)]
    h = ops.act_quantize(z, probs=probs)
    assert isinstance(h, Fp8Tensor)
    exact_h = ref.swiglu(*args[1:]).astype(np.float32)
    wanted = ref.quantize(exact_h, largest=ref.LARGEST["float32"])
    steps, scales = code_steps(quantized(h), wanted)
    text = f"{steps} codes, {scales} of {wanted.scale.size} scales"
    passed = steps <= 1 and scales <= 1e-3 * wanted.scale.size
    yield Check("act_quantize", "probs", contract, text, passed)
    dz, *_, dprobs = ops.act_quantize_backward(dh, z, probs=probs)
    exact, exact_dprobs = ref.swiglu_backward(*args)
    wanted = ref.quantize(exact.astype(np.float32), largest=ref.LARGEST["float32"])
    steps, scales = code_steps(quantized(dz), wanted)
    text = f"{steps} codes, {scales} of {wanted.scale.size} scales"
    passed = steps <= 1 and scales <= 1e-3 * wanted.scale.size
    yield Check("act_quantize_backward", "dz", contract, text, passed)
    size = (np.abs(args[0]) * np.abs(ref.swiglu(args[1], np.ones(260)))).sum(axis=1)
    error = float((np.abs(array(dprobs) - exact_dprobs) / size).max())
    yield within("act_quantize_backward", "dprobs", "<= 2^-20 of the terms", error, 2.0**-20)


def check_gemm(given: Inputs) -> Iterator[Check]:
    limit = MAX_C[given.device.type]
    contract = f"c <= {limit:g} in the GEMM bound"
    plan, p = given.routing(300, 4, 2, 1)
    end = int(p.row_offsets[-1])
    x = ops.permute_pad(given.normal(300, 272), plan)[0]
    w = given.normal(4, 256, 272, spread=0.5)
    a, (wq, _) = ops.quantize(x, scale_layout="gemm"), ops.quantize_weight(w)
    left, d = ref.dequantize(quantized(a)), array(ops.grouped_gemm(a, wq, plan))
    worst = 0.0
    for e in range(4):
        rows = p.tokens(e)
        right = ref.dequantize(ref.Quantized(array(wq.data)[e], array(wq.scale_inv)[e]), 128)
        worst = max(worst, gemm_error(d[rows], *ref.gemm(left[rows], right), 2.0**-8))
    yield within("grouped_gemm", f"{end} ragged rows, K=272, bf16 out", contract, worst, limit)
    dy = ops.permute_pad(given.normal(300, 256), plan)[0]
    kinds: tuple[Columns, ...] = ("block", "column")
    for columns in kinds:
        dy_t, x_t = (ops.transpose_fp8(ops.quantize(t), plan, columns=columns) for t in (dy, x))
        dw = array(ops.grouped_gemm_wgrad(dy_t, x_t, plan))
        sides = [expand(t, tile_rows(columns)) for t in (dy_t, x_t)]
        worst = 0.0
        for e in range(4):
            at = np.s_[:, p.col_offsets[e] : p.col_offsets[e] + p.counts[e]]
            worst = max(worst, gemm_error(dw[e], *ref.gemm(sides[0][at], sides[1][at]), 2.0**-23))
        yield within(
            "grouped_gemm_wgrad", f"columns={columns}, float32 out", contract, worst, limit
        )


def check_low_rank(given: Inputs) -> Iterator[Check]:
    plan, p = given.routing(300, 4, 2, 1)
    end = int(p.row_offsets[-1])
    q = ops.quantize(ops.permute_pad(given.normal(300, 272), plan)[0], scale_layout="gemm")
    a, b = given.normal(4, 16, 272, spread=0.5), given.normal(4, 256, 16, spread=0.5)
    a, b = a.bfloat16(), b.bfloat16()
    rows = ref.dequantize(quantized(q))
    u, u_q = ops.lora_project(q, a, plan)
    da = array(ops.lora_wgrad(u, q, plan, out_dtype="float32"))
    low = array(u.float())[:end].astype(np.float64)
    high = array(a.float()).astype(np.float64)
    worst_u = worst_a = 0.0
    for e in range(4):
        at = p.tokens(e)
        exact, size = rows[at] @ high[e].T, np.abs(rows[at]) @ np.abs(high[e].T)
        error = np.abs(low[at] - exact) - 2.0**-8 * np.abs(exact)
        worst_u = max(worst_u, float((error / size).max(initial=0.0)))
        exact, size = low[at].T @ rows[at], np.abs(low[at].T) @ np.abs(rows[at])
        error = np.abs(da[e] - exact) / np.maximum(size, 1e-30)
        worst_a = max(worst_a, float(error.max()))
    text = "<= 2^-16 of the terms, and bfloat16's rounding"
    yield within("lora_project", f"{end} ragged rows, r 16", text, worst_u, 2.0**-16)
    parts = [ref.parts(array(u.float())[:end], False), ref.parts(array(b.float())[0], True)]
    w2 = ops.quantize_lora(b)
    pairs: Pairs = [(array(u_q.data)[:end], parts[0].codes)]
    pairs.append((array(u_q.scale_inv)[0, :end, None], parts[0].scale))
    yield bit_equal("lora_project", "high and low parts", pairs)
    yield within("lora_wgrad", "float32 out", "<= 2^-15 of the terms", worst_a, 2.0**-15)
    pairs = [(array(w2.data)[0], parts[1].codes), (array(w2.scale_inv)[0], parts[1].scale)]
    yield bit_equal("quantize_lora", "high and low parts", pairs)


CHECKS: list[Callable[[Inputs], Iterator[Check]]] = [
    check_quantize,
    check_quantize_weight,
    check_turn_weight,
    check_dequantize,
    check_route,
    check_router_topk,
    check_permute,
    check_unpermute,
    check_dispatch,
    check_transpose,
    check_counts,
    check_activation,
    check_gemm,
    check_low_rank,
]
