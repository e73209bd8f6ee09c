"""Every flat op with small valid arguments: what the binding and torch.library tests call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from fp8moe_cutlass import _C, Activation, Fp8Tensor, RoutingPlan, ops

TOKENS, SLOTS, EXPERTS, WIDTH = 48, 2, 3, 256


@dataclass
class Problem:
    """Operands that fit together: T = 48, S = 2, E = 3, H = 2I = 256, capacity exactly met."""

    x: torch.Tensor  # [T, H] bf16
    topk_idx: torch.Tensor  # [T, S] i64
    probs: torch.Tensor  # [T, S] f32
    plan: RoutingPlan
    rows: torch.Tensor  # [R, H] bf16
    row_probs: torch.Tensor  # [R] f32
    x8: Fp8Tensor  # [T, H] row
    rows8: Fp8Tensor  # [R, H] gemm
    columns8: Fp8Tensor  # [H, Kcap] block
    w: torch.Tensor  # [E, H, H] f32
    w8: Fp8Tensor
    w8_t: Fp8Tensor
    factor: torch.Tensor  # [E, H, 16] bf16
    u: torch.Tensor  # [R, 16] bf16
    a2: Fp8Tensor  # [R, 48] gemm
    w2: Fp8Tensor  # [E, H, 48] block
    dispatch: RoutingPlan  # of topk_idx to 3 ranks of 2 experts
    packed: torch.Tensor  # [dispatch.rows, row bytes] u8
    mailbox: torch.Tensor  # [2, 1, 8] i32, of one rank


@cache
def problem() -> Problem:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(TOKENS, WIDTH, generator=generator).bfloat16()
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    topk_idx = scores.topk(SLOTS).indices
    probs = torch.rand(TOKENS, SLOTS, generator=generator)
    sizes = (TOKENS, SLOTS, EXPERTS, 1, TOKENS * SLOTS)
    words = RoutingPlan(None, *sizes).buffer_size
    buffer = torch.zeros(words, dtype=torch.int32)  # padding words are unspecified: zero here
    plan = ops.route(EXPERTS, topk_idx=topk_idx, out=RoutingPlan(buffer, *sizes))
    rows, row_probs = ops.permute_pad(x, plan, probs)
    x8 = ops.quantize(x)
    w = torch.randn(EXPERTS, WIDTH, WIDTH, generator=generator)
    assert row_probs is not None
    rows8 = ops.permute_pad(x8, plan)[0]
    factor = w[..., :16].bfloat16().contiguous()
    u, a2 = ops.lora_project(rows8, factor, plan, rank_first=False)
    dispatch, _ = ops.dispatch_plan(topk_idx, 2 * EXPERTS, EXPERTS)
    packed = torch.zeros(dispatch.rows, ops.packed_row_bytes(WIDTH, SLOTS), dtype=torch.uint8)
    ops.quantize_pack(x, dispatch, topk_idx, probs, num_experts=2 * EXPERTS, out=packed)
    return Problem(
        x,
        topk_idx,
        probs,
        plan,
        rows,
        row_probs,
        x8,
        rows8,
        ops.permute_transpose_fp8(x8, plan),
        w,
        *ops.quantize_weight(w),
        factor,
        u,
        a2,
        ops.quantize_lora(factor),
        dispatch,
        packed,
        torch.zeros(2, 1, 8, dtype=torch.int32),
    )


def flat_calls() -> dict[str, dict[str, Any]]:
    """Arguments by name, in schema order, of every flat op; the outputs hold zeros."""
    p = problem()
    e4m3 = torch.float8_e4m3fn
    plan = {"plan": p.plan.buffer, **dict(zip(_SIZES, p.plan.sizes, strict=True))}
    dispatch = {"plan": p.dispatch.buffer, **dict(zip(_SIZES, p.dispatch.sizes, strict=True))}
    rows, width, kcap = p.plan.rows, WIDTH, p.plan.columns
    rule = {"scale": "pow2", "eps": 1e-10}

    def fp8(name: str, t: Fp8Tensor) -> dict[str, Any]:
        return {name: t.data, f"{name}_scale": t.scale_inv, f"{name}_layout": t.scale_layout}

    def new(name: str, *shape: int, layout: str) -> dict[str, Any]:
        scale = {
            "row": (shape[0], -(-shape[-1] // 128)),
            "gemm": (-(-shape[-1] // 128), shape[0]),
            "block": (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)),
        }[layout]
        t = {name: torch.zeros(shape).to(e4m3), f"{name}_scale": torch.zeros(scale)}
        return {**t, f"{name}_layout": layout}

    logits = p.x[:, :EXPERTS].float()
    routed = ops.router_topk(logits, SLOTS)
    of_weights = {
        "softmax_after_topk": False,
        "normalize": True,
        "epsilon": 1e-20,
        "routed_scaling_factor": 2.5,
    }

    buffer = torch.zeros_like(p.plan.buffer)
    counts = {"tokens": rows, "slots": 1, "experts": EXPERTS, "align": 1, "capacity": rows}
    of_map = counts | {"experts": 1}
    counts_buffer = RoutingPlan(None, *counts.values()).buffer_size
    return {
        "quantize": {"x": p.x, **new("q", TOKENS, width, layout="row"), **rule},
        "quantize_weight": {
            "w": p.w,
            "below": None,
            **new("q", EXPERTS, width, width, layout="block"),
            **new("q_t", EXPERTS, width, width, layout="block"),
            **rule,
        },
        "turn_weight": {
            **fp8("q", p.w8),
            **new("q_t", EXPERTS, width, width, layout="block"),
        },
        "dequantize": {**fp8("q", p.x8), "x": torch.zeros(TOKENS, width)},
        "route": {
            "topk_idx": p.topk_idx,
            "routing_map": None,
            **plan,
            "plan": buffer,
            "workspace": None,
        },
        "plan_from_counts": {
            "tokens_per_expert": p.plan.tokens_per_expert.clone(),
            "plan": torch.zeros(counts_buffer, dtype=torch.int32),
            **counts,
        },
        "plan_from_row_id_map": {
            "row_id_map": torch.arange(rows, dtype=torch.int32),
            "pad_offsets": None,
            "plan": torch.zeros(RoutingPlan(None, *of_map.values()).buffer_size, dtype=torch.int32),
            **of_map,
        },
        "router_topk": {
            "logits": logits,
            "selection_bias": torch.tensor([0.5, -0.5, 0.25]),
            "padding": None,
            "given_idx": None,
            **{"top_k": SLOTS, "sequences": 1},
            **{name: torch.zeros_like(t) for name, t in routed._asdict().items()},
            **{"score": 0, "select_by_logits": False},
            **{"num_groups": 3, "topk_groups": 2, "best_per_group": 1, "closed_value": -math.inf},
            **of_weights,
        },
        "router_topk_backward": {
            "dweights": p.probs,
            "dscores": logits.cos(),
            "scores": routed.scores,
            "topk_idx": routed.topk_idx,
            "topk_weights": routed.topk_weights,
            "dlogits": torch.zeros_like(logits),
            "score": 0,
            **of_weights,
        },
        "permute_pad": {
            **fp8("x", p.x8),
            **plan,
            "probs": p.probs,
            **new("y", rows, width, layout="gemm"),
            "row_probs": torch.zeros(rows),
            "zero_unweighted": False,
        },
        "permute_pad_backward": {
            "dy": p.rows,
            **plan,
            "row_dprobs": p.row_probs,
            "dx": torch.zeros_like(p.x),
            "dprobs": torch.zeros_like(p.probs),
        },
        "unpermute_unpad": {
            "y": p.rows,
            **plan,
            "probs": p.probs,
            **{"peers": None, "first": None},
            "out": torch.zeros_like(p.x),
        },
        "unpermute_unpad_backward": {
            "dout": p.x,
            **plan,
            "y": p.rows,
            "probs": p.probs,
            "dy": torch.zeros_like(p.rows),
            "dprobs": torch.zeros_like(p.probs),
        },
        "dispatch_plan": {
            "topk_idx": p.topk_idx,
            "num_experts": 2 * EXPERTS,
            "segment": 0,
            **dispatch,
            "plan": torch.zeros_like(p.dispatch.buffer),
            "counts": torch.zeros(EXPERTS, 2, dtype=torch.int32),
            "dropped": torch.zeros(3, dtype=torch.int64),
            "workspace": None,
        },
        "quantize_pack": {
            "x": p.x,
            "topk_idx": p.topk_idx,
            "probs": p.probs,
            "num_experts": 2 * EXPERTS,
            **dispatch,
            "peers": None,
            "first": None,
            "packed": torch.zeros_like(p.packed),
            "fp8_dtype": "e4m3",
            **rule,
        },
        "unpack": {
            "packed": p.packed,
            "hidden": width,
            "slots": SLOTS,
            "topk_idx": torch.zeros(p.dispatch.rows, SLOTS, dtype=torch.int32),
            "probs": torch.zeros(p.dispatch.rows, SLOTS),
        },
        "share_words": {
            "words": torch.arange(1, dtype=torch.int32),
            "more": torch.arange(4, dtype=torch.int32).view(2, 2),
            "peers": torch.tensor([p.mailbox.data_ptr()]),
            "mailbox": p.mailbox,
            "calls": torch.zeros(1, dtype=torch.int32),
            "ended": torch.zeros(1, dtype=torch.int32),
            "late": torch.zeros(1, dtype=torch.int32),
            **{"rank": 0, "timeout_ms": 0},
            "told": torch.zeros(1, 5, dtype=torch.int32),
        },
        "copy_rows": {
            "out": torch.zeros_like(p.probs),
            "places": torch.tensor([[p.probs.data_ptr(), p.probs.shape[0], 0]]),
            "beside": 0,
        },
        "transpose_fp8": {
            **fp8("q", p.rows8),
            **plan,
            **new("columns", width, kcap, layout="block"),
            "requantize": False,
            **rule,
        },
        "permute_transpose_fp8": {
            **fp8("q", p.x8),
            **plan,
            **new("columns", width, kcap, layout="gemm"),
        },
        "count_codes": {
            **fp8("q", p.x8),
            **plan,
            **fp8("columns", p.columns8),
            "stride": 2,
            "counts": torch.zeros(21, dtype=torch.int64),
        },
        "act_quantize": {
            "z": p.rows,
            **plan,
            "probs": p.row_probs,
            "activation": Activation(),
            "rounding": 0,
            **new("h", rows, width // 2, layout="gemm"),
            **new("z_q", rows, width, layout="row"),
            **rule,
        },
        "act_quantize_backward": {
            "dh": p.rows[:, : width // 2].contiguous(),
            "z": p.rows,
            **plan,
            "probs": p.row_probs,
            "activation": Activation(),
            **new("dz", rows, width, layout="gemm"),
            "dprobs": torch.zeros(rows),
            **new("dz_columns", width, kcap, layout="block"),
            **new("h_columns", width // 2, kcap, layout="block"),
            **rule,
            "workspace": None,
        },
        "grouped_gemm": {
            **fp8("a", p.rows8),
            **fp8("w", p.w8),
            **plan,
            "d": torch.zeros(rows, width, dtype=torch.bfloat16),
            **fp8("a2", p.a2),
            **fp8("w2", p.w2),
        },
        "grouped_gemm_wgrad": {
            **fp8("dy_t", p.columns8),
            **fp8("x_t", p.columns8),
            **plan,
            "dw": torch.zeros(EXPERTS, width, width),
            "accumulate": False,
            "workspace": None,
        },
        "lora_project": {
            **fp8("rows", p.rows8),
            "factor": p.factor,
            **plan,
            "u": torch.zeros(rows, 16, dtype=torch.bfloat16),
            **new("u_q", rows, 48, layout="gemm"),
            "rank_first": False,
            "scaling": 2.0,
            **rule,
        },
        "lora_wgrad": {
            "u": p.u,
            **fp8("rows", p.rows8),
            **plan,
            "dfactor": torch.zeros(EXPERTS, width, 16, dtype=torch.bfloat16),
            "rank_first": False,
        },
        "quantize_lora": {
            "factor": p.factor,
            **new("w2", EXPERTS, width, 48, layout="block"),
            "rank_first": False,
            **rule,
        },
    }


_SIZES = ("tokens", "slots", "experts", "align", "capacity")
OPS = tuple(_C.operators())


def objects(name: str, flat: dict[str, Any]) -> list[Any]:
    """The same arguments as _C takes them: an Fp8Tensor and a plan as one object each."""
    flat, given = dict(flat), []
    for field, kind, _, _ in _C.operators()[name]:
        if kind == "rule":
            given += [flat["scale"], flat["eps"]]
        elif flat[field] is None:
            given.append(None)
        elif kind == "plan":
            given.append(RoutingPlan(flat[field], *(flat[size] for size in _SIZES)))
        elif kind == "fp8" and flat[f"{field}_scale"] is not None:
            # Not an Fp8Tensor, which refuses some of what _C has to refuse.
            parts = {"data": flat[field], "scale_inv": flat[f"{field}_scale"]}
            words = {"scale_layout": flat[f"{field}_layout"], "fp8_dtype": None}
            given.append(SimpleNamespace(**parts, **words))
        else:
            given.append(flat[field])
    return given


def outputs(name: str) -> list[str]:
    """The arguments an op writes, by their roles; a workspace is as it was."""
    found = []
    for field, kind, role, _ in _C.operators()[name]:
        if role in ("out", "optional_out", "status"):
            found += [field, f"{field}_scale"] if kind == "fp8" else [field]
    return [key for key in found if key in flat_calls()[name]]


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: equal bits, NaN or not."""
    return t.contiguous().view(torch.uint8) if t.numel() else t.to(torch.uint8)
