"""Rows between ranks: their plan, packed rows in FP8, and unpacked ones; words."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fp8moe_cutlass import _C
from fp8moe_cutlass.arrays import dtype_name
from fp8moe_cutlass.ops._outputs import TORCH_DTYPES
from fp8moe_cutlass.ops._words import FORMATS, count, flag, parts, require_out_plan
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor, cdiv
from fp8moe_cutlass.typing import Array, DType, ScaleKind


class Dispatch(NamedTuple):
    """The plan of tokens to ranks, and how many go where."""

    plan: RoutingPlan  # a slot per rank
    counts: Array  # [ranks, 2] int32: rows with a token, and entries of topk_idx on them


class Unpacked(NamedTuple):
    """The parts of packed rows; without slots (a gradient) x alone."""

    x: Fp8Tensor  # [R, hidden], row layout, a view
    topk_idx: Array | None  # [R, slots] int32
    probs: Array | None  # [R, slots] float32


def dispatch_plan(
    topk_idx: Array,
    num_experts: int,
    ranks: int,
    *,
    segment: int = 0,
    spare: int = 0,
    dropped: Array | None = None,
    out: tuple[RoutingPlan, Array] | None = None,
    workspace: Array | None = None,
) -> Dispatch:
    """The plan of topk_idx [T, S] (int32 or int64; -1: none) over ranks of num_experts / ranks.

    Slot r of the plan is rank r (slots == experts == ranks): a token has one row for a rank however
    many of its experts live there; row_of [T, ranks], -1 where none does. Rows are rank-major, in
    token order. segment 0: rank after rank, T min(S, ranks) rows at most. segment > 0: rank r owns
    rows [r n, (r+1) n), n = segment + spare; tokens past the first `segment` are dropped and
    counted in plan.status, and rows after its tokens are padding (-1). Ids outside
    [-1, num_experts): ValueError on the CPU; dropped and counted on CUDA. dropped [3] int64 counts
    up by the first words of plan.status. workspace: scratch in uint8, as for `route`.
    """
    given = {"num_experts": num_experts, "ranks": ranks, "segment": segment, "spare": spare}
    for name, value in given.items():
        if type(value) is not int:
            count("dispatch_plan", name, value)
    if ranks < 1 or num_experts % ranks != 0:
        raise ValueError(
            "[dispatch_plan] num_experts must be a multiple of ranks; "
            f"got {num_experts} and {ranks}"
        )
    plan: Any = (-1, ranks, ranks, 1, (segment + spare) * ranks if segment else -1)
    counts: Any = True
    if out is not None:
        given_plan, counts = parts("dispatch_plan", out, "plan", "counts")
        plan = require_out_plan("dispatch_plan", given_plan, plan)
    made = _C.dispatch_plan(topk_idx, num_experts, segment, plan, counts, dropped, workspace)
    return Dispatch(*made[:2])


def packed_row_bytes(hidden: int, slots: int) -> int:
    """Bytes of a row: codes, float32 scales, int32 ids, float32 probs, up to a multiple of 16.

    slots 0: a gradient, codes and scales alone. docs/reference/layouts.md has the picture.
    """
    if type(hidden) is not int or type(slots) is not int:
        count("packed_row_bytes", "hidden", hidden)
        count("packed_row_bytes", "slots", slots)
    return cdiv(hidden + 4 * cdiv(hidden, 128) + 8 * slots, 16) * 16


def quantize_pack(
    x: Array,
    plan: RoutingPlan,
    topk_idx: Array | None = None,
    probs: Array | None = None,
    *,
    num_experts: int | None = None,
    fp8_dtype: DType = "e4m3",
    scale: ScaleKind = "pow2",
    eps: float = 1e-10,
    peers: Array | None = None,
    first: Array | None = None,
    out: Array | None = None,
) -> Array:
    """packed[row_of[t, r]] = Q(x[t]) by 1x128 tiles, and which experts of rank r it goes to.

    x [T, H] (float32, float16 or bfloat16; H a multiple of 16) is read and quantized once; plan is
    dispatch_plan's. topk_idx [T, S] (int32 or int64) and probs [T, S] float32, both or neither
    (a gradient): a row carries, for each slot, the expert counted from the first of its rank and
    the prob; -1 and 0 where the expert lives elsewhere. num_experts: of all ranks, with topk_idx.
    Rows of a segment without a token have ids -1 and are unspecified else.
    Returns uint8 [plan.rows, packed_row_bytes(H, S)]; `ops.unpack` reads it.

    peers [ranks] int64: addresses, as `share_words` describes. The rows of rank r are stored from
    peers[r] on instead, the first n of them. out [n, bytes] is what this rank's points at.
    first [ranks] int32, on the host, at most 64 ranks: this rank's rows begin first[r] rows behind
    peers[r], and end at row n.
    """
    if topk_idx is not None and num_experts is None:
        raise ValueError("[quantize_pack] topk_idx needs num_experts; got None")
    if not isinstance(fp8_dtype, str) or fp8_dtype not in FORMATS:
        fp8_dtype = dtype_name("quantize_pack", "fp8_dtype", fp8_dtype, *FORMATS)
    packed: Array = _C.quantize_pack(
        *(x, topk_idx, probs, 0 if num_experts is None else num_experts, plan, peers, first),
        *(True if out is None else out, fp8_dtype, scale, eps),
    )
    return packed


def unpack(
    packed: Array,
    hidden: int,
    slots: int,
    *,
    fp8_dtype: DType = "e4m3",
    pow2: bool = True,
    out: tuple[Array, Array] | None = None,
) -> Unpacked:
    """The parts of packed, uint8 [R, packed_row_bytes(hidden, slots)], as quantize_pack wrote them.

    x is a view: its codes and scales stay where they arrived, rows packed_row_bytes apart, as
    permute_pad, permute_transpose_fp8 and count_codes read them (others refuse it). fp8_dtype and
    pow2 are what quantize_pack was given; packed rows do not carry them.
    """
    if type(pow2) is not bool:
        flag("unpack", "pow2", pow2)
    if not isinstance(fp8_dtype, str) or fp8_dtype not in FORMATS:
        fp8_dtype = dtype_name("unpack", "fp8_dtype", fp8_dtype, *FORMATS)
    asked = (True, True) if out is None else parts("unpack", out, "topk_idx", "probs")
    made = _C.unpack(packed, hidden, slots, *asked)
    x = packed_fp8(packed, hidden, fp8_dtype, pow2)
    return Unpacked(x, *made) if slots else Unpacked(x, None, None)


def packed_fp8(packed: Array, hidden: int, fp8_dtype: str, pow2: bool) -> Fp8Tensor:
    """The codes and scales of packed rows, a view."""
    end = hidden + 4 * cdiv(hidden, 128)
    codes, scales = packed[:, :hidden], packed[:, hidden:end]
    if isinstance(packed, np.ndarray):
        scales = scales.view(np.float32)
    else:
        codes, scales = codes.view(TORCH_DTYPES[fp8_dtype]), scales.view(TORCH_DTYPES["float32"])
    return Fp8Tensor(codes, scales, "row", pow2, fp8_dtype, check=False)


def share_words(
    words: Array,
    peers: Array,
    mailbox: Array,
    calls: Array,
    ended: Array,
    late: Array,
    *,
    rank: int,
    timeout_ms: int,
    more: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Tell the ranks of one host words [k] int32 and, behind them, more [m, l] int32, n in
    all, and wait for theirs; [ranks, n] int32.

    The ranks can address each other's memory. What a rank has written to its peers' memory before,
    on the same stream, is there when this returns its words. Collective: every rank calls it, in
    the same order on one stream.

    peers [ranks] int64: the address of each rank's mailbox, as this rank's device has it; addresses
    are trusted. mailbox, this rank's: int32 [2, ranks, stride], zero at first, stride > n.
    calls [1] int32, zero at first: how often the ranks have met here. ended [1] int32, zero at
    first: whether one was late; several mailboxes may have one.
    late [ranks] int32, which may lie in pinned memory, as out may: counts the calls that ended
    without a rank, timeout_ms after they began. Its words are then 0, and every call from then on
    ends at once, with zeros.
    """
    wanted = True if out is None else out
    told: Array = _C.share_words(
        words, more, peers, mailbox, calls, ended, late, rank, timeout_ms, wanted
    )
    return told


def copy_rows(out: Array, places: Array, *, beside: int = 0) -> Array:
    """out [R, C] (float32, float16, bfloat16, int32 or uint8) = rows from elsewhere; returns out.

    places [n, 3] int64, on the host: the address of a place's first row, as the device of out has
    it, its number of rows, and the row of out where they go. The numbers add up to R; addresses are
    trusted. On CUDA the driver copies the places one by one: from another GPU by a copy engine,
    which takes no SMs. beside: a cudaStream_t on which it copies, behind what the current stream
    has until then; 0: on the current stream.
    """
    copied: Array = _C.copy_rows(out, places, beside)
    return copied
