"""Received rows of the wire: views of codes and scales, ids and probs."""

from __future__ import annotations

from typing import NamedTuple

from fp8moe_cutlass.ops._call import operator
from fp8moe_cutlass.ops._outputs import codes_view, empty, split_columns, words_view
from fp8moe_cutlass.ops._words import count, dtype_name, flag, parts, shape_of
from fp8moe_cutlass.ops.quantize_pack import packed_row_bytes
from fp8moe_cutlass.tensor import Fp8Tensor, cdiv
from fp8moe_cutlass.typing import Array, DType

_op = operator("unpack")


class Unpacked(NamedTuple):
    """What unpack returns; without slots (a gradient) x alone."""

    x: Fp8Tensor  # [R, hidden], row layout, a view
    topk_idx: Array | None  # [R, slots] int32
    probs: Array | None  # [R, slots] float32


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
    pow2 are what quantize_pack was given; the wire does not carry them.
    """
    count("unpack", "hidden", hidden)
    count("unpack", "slots", slots)
    flag("unpack", "pow2", pow2)
    fresh = out is None
    format = dtype_name("unpack", "fp8_dtype", fp8_dtype, "e4m3", "e5m2")
    shape = tuple(shape_of("unpack", "packed", packed, 2))
    if shape[1] != packed_row_bytes(hidden, slots):
        raise ValueError(
            f"[unpack] packed must be [R, {packed_row_bytes(hidden, slots)}] for hidden {hidden} "
            f"and {slots} slots; got {list(shape)}"
        )
    codes, scales, _ = split_columns(packed, hidden, 4 * cdiv(hidden, 128))
    x = Fp8Tensor(codes_view(codes, format), words_view(scales), pow2=pow2, fp8_dtype=format)
    if slots == 0:
        return Unpacked(x, None, None)
    if out is None:
        rows = (shape[0], slots)
        out = empty("unpack", packed, rows, "int32"), empty("unpack", packed, rows, "float32")
    parts("unpack", out, "topk_idx", "probs")
    _op(packed, hidden, *out, fresh=fresh)
    return Unpacked(x, *out)
