"""TransformerEngine's Float8BlockwiseQTensor as an Fp8Tensor, and back; codes are shared."""

from __future__ import annotations

from typing import Any

import torch

from fp8moe_cutlass.tensor import TILE, Fp8Tensor, cdiv

_DTYPES = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


def as_fp8_tensor(tensor: Any, *, columnwise: bool = False) -> Fp8Tensor:
    """The codes and scales of a Float8BlockwiseQTensor [..., K], seen as [M, K].

    Of 1x128 blocks: "gemm" layout, or "row" where an older TransformerEngine holds compact scales.
    Of 128x128 blocks: "block" layout, whose scales are copied where TransformerEngine pads them.
    columnwise: the transpose [K, M], as TransformerEngine holds it beside.
    ValueError where the tensor does not hold what is asked for.
    """
    op = "as_fp8_tensor"
    kind = "columnwise" if columnwise else "rowwise"
    data = getattr(tensor, f"_{kind}_data", None)
    scale_inv = getattr(tensor, f"_{kind}_scale_inv", None)
    if data is None or scale_inv is None:
        raise ValueError(
            f"[{op}] tensor must be a Float8BlockwiseQTensor with {kind} data "
            f"(quantizer.set_usage); got {type(tensor).__name__} without"
        )
    compact = getattr(getattr(tensor, "_data_format", None), "name", "") == "COMPACT"
    if compact and columnwise:
        raise ValueError(f"[{op}] tensor must not be compact columnwise, which is not transposed")
    width = data.shape[0] if columnwise else data.shape[-1]
    codes = data.reshape(width, -1) if columnwise else data.reshape(-1, width)
    layout = "row" if compact else "gemm"
    if tensor._is_2D_scaled:
        layout = "block"
        scale_inv = scale_inv[:, : cdiv(codes.shape[1], TILE)].contiguous()
    dtype = _DTYPES[tensor._fp8_dtype.name]
    pow2 = bool(tensor._quantizer.force_pow_2_scales)
    return Fp8Tensor(codes.view(dtype), scale_inv, layout, pow2)


def as_blockwise_tensor(
    q: Fp8Tensor, columns: Fp8Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """TransformerEngine's Float8BlockwiseQTensor over q's codes, its nominal dtype `dtype`.

    q [M, K]: 1x128 scales (in "row" layout they are transposed) or 128x128 scales (padded).
    columns [K, M]: the transposed operand that wgrad reads, of the same kind of blocks: of
    transpose_fp8(columns="column") for 1x128 blocks. Needs TransformerEngine.
    """
    if len(q.shape) != 2:
        raise ValueError(f"[as_blockwise_tensor] q must be [M, K]; got {list(q.shape)}")
    from transformer_engine import pytorch as te

    name = next(n for n, d in _DTYPES.items() if d == q.data.dtype)
    held = {"rowwise": q, "columnwise": columns}
    parts: dict[str, Any] = {}
    for kind, part in held.items():
        of = None if part is None else _padded(part)
        parts[f"{kind}_data"] = None if of is None else of.data.view(torch.uint8)
        parts[f"{kind}_scale_inv"] = None if of is None else of.scale_inv
    blocks = 2 if q.scale_layout == "block" else 1
    quantizer = te.Float8BlockQuantizer(
        fp8_dtype=te.DType[name],
        rowwise=True,
        columnwise=columns is not None,
        force_pow_2_scales=q.pow2,
        block_scaling_dim=blocks,
    )
    return te.Float8BlockwiseQTensor(
        shape=q.shape,
        dtype=dtype,
        fp8_dtype=te.DType[name],
        quantizer=quantizer,
        is_2D_scaled=blocks == 2,
        **parts,
    )


def _padded(q: Fp8Tensor) -> Fp8Tensor:
    """Scales as TransformerEngine's GEMMs read them."""
    if q.scale_layout != "block":
        return q.to_layout("gemm")
    missing = -q.scale_inv.shape[1] % 4
    scale_inv = torch.nn.functional.pad(q.scale_inv, (0, missing))
    return Fp8Tensor(q.data, scale_inv, "block", q.pow2, q.fp8_dtype, check=False)
