"""Fp8Tensor: FP8 codes with the scales of their tiles."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fp8moe_cutlass.typing import Array, DType

TILE = 128
_FORMATS: dict[Any, str] = {}  # of the frameworks' FP8 dtypes, as they are met
_LAYOUTS = ("row", "gemm", "block")


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return (a + b - 1) // b


def pad4(a: int) -> int:
    """a rounded up to a multiple of 4."""
    return (a + 3) // 4 * 4


def scale_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Shape of `scale_inv` for data of `shape`: [M, K], or [E, M, K] in block layout."""
    if layout == "block":
        *outer, m, k = shape
        return (*outer, cdiv(m, TILE), cdiv(k, TILE))
    m, k = shape
    return (m, cdiv(k, TILE)) if layout == "row" else (cdiv(k, TILE), pad4(m))


def _format_of(data: Array, fp8_dtype: str | None) -> str:
    """The format of data: its dtype's, which is then known, or the one given for uint8 codes."""
    if fp8_dtype not in ("e4m3", "e5m2", None):
        raise ValueError(f"[Fp8Tensor] fp8_dtype must be 'e4m3' or 'e5m2'; got {fp8_dtype!r}")
    name = str(data.dtype).removeprefix("torch.")
    own = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}.get(name)
    if own is not None:
        _FORMATS[data.dtype] = own
    format = own or fp8_dtype
    if format is None:
        raise ValueError(
            "[Fp8Tensor] data must be float8_e4m3fn or float8_e5m2, or uint8 with "
            f"fp8_dtype given; got {name}"
        )
    if fp8_dtype not in (format, None):
        raise ValueError(f"[Fp8Tensor] fp8_dtype must be that of data, {name}; got {fp8_dtype}")
    return format


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Fp8Tensor:
    """value = decode(data) * scale_inv of its tile.

    data: [M, K] or [E, M, K], float8_e4m3fn or float8_e5m2, or uint8 codes with `fp8_dtype` given
    ("e4m3" or "e5m2"; frameworks without FP8 dtypes). scale_inv: float32.
    scale_layout: the tiles, and where their scales are (docs/reference/layouts.md):
      "row"   [M, cdiv(K, 128)]        tiles 1x128
      "gemm"  [cdiv(K, 128), pad4(M)]  tiles 1x128, what the GEMMs read
      "block" [(E,) cdiv(M, 128), cdiv(K, 128)]  tiles 128x128
    pow2: every scale is a power of two.
    """

    data: Array
    scale_inv: Array
    scale_layout: str = "row"
    pow2: bool = True
    fp8_dtype: str | None = None

    def __init__(
        self,
        data: Array,
        scale_inv: Array,
        scale_layout: str = "row",
        pow2: bool = True,
        fp8_dtype: str | None = None,
    ) -> None:
        own_format = _FORMATS.get(data.dtype)
        if own_format is None or fp8_dtype not in (own_format, None):
            own_format = _format_of(data, fp8_dtype)
        if scale_layout not in _LAYOUTS:
            raise ValueError(
                f"[Fp8Tensor] scale_layout must be 'row', 'gemm' or 'block'; got {scale_layout!r}"
            )
        # A step makes 17 of these, and a frozen dataclass's own __init__ takes twice as long.
        own = self.__dict__
        own["data"], own["scale_inv"] = data, scale_inv
        own["scale_layout"], own["pow2"], own["fp8_dtype"] = scale_layout, pow2, own_format

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the data."""
        return tuple(self.data.shape)

    @property
    def device(self) -> Any:
        """The framework's device object; "cpu" for arrays that have none."""
        return getattr(self.data, "device", "cpu")

    def dequantize(self, dtype: DType = "bfloat16") -> Array:
        """The values, rounded once to `dtype`: ops.dequantize."""
        from fp8moe_cutlass import ops

        return ops.dequantize(self, dtype=dtype)

    def to_layout(self, layout: str) -> Fp8Tensor:
        """The same tensor with its 1x128 scales in layout "row" or "gemm"; data is shared."""
        if layout == self.scale_layout:
            return self
        if {layout, self.scale_layout} != {"row", "gemm"}:
            raise ValueError(
                "[to_layout] only 'row' and 'gemm' hold the same scales; "
                f"got {self.scale_layout!r} to {layout!r}"
            )
        if len(self.shape) != 2:
            raise ValueError(f"[to_layout] data must be [M, K]; got {list(self.shape)}")
        from fp8moe_cutlass.ops import _outputs

        m = self.shape[0]
        if layout == "row":
            scale = _outputs.contiguous(self.scale_inv[:, :m].T)
        else:
            shape = scale_shape(self.shape, "gemm")
            scale = _outputs.empty("to_layout", self.scale_inv, shape)
            scale[:, m:] = 0
            scale[:, :m] = self.scale_inv.T
        return self._with(scale_inv=scale, scale_layout=layout)

    def to(self, *args: Any, **kwargs: Any) -> Fp8Tensor:
        """Moved to another device (torch; the arguments of Tensor.to, but no dtype)."""
        data, scale_inv = (t.to(*args, **kwargs) for t in (self.data, self.scale_inv))
        if (data.dtype, scale_inv.dtype) != (self.data.dtype, self.scale_inv.dtype):
            raise ValueError(
                f"[Fp8Tensor.to] only moves between devices; got dtype {data.dtype}; "
                "use dequantize for values"
            )
        return self._with(data=data, scale_inv=scale_inv)

    def cpu(self) -> Fp8Tensor:
        """Moved to the CPU (torch)."""
        return self.to("cpu")

    def state(self) -> dict[str, Any]:
        """The fields as a dict of arrays and plain values, fit for torch.save."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Fp8Tensor:
        """The inverse of `state`."""
        return cls(**state)

    def _with(self, **changes: Any) -> Fp8Tensor:
        return Fp8Tensor(**{**self.state(), **changes})

    def __repr__(self) -> str:
        scales = "pow2" if self.pow2 else "fp32 scales"
        return (
            f"Fp8Tensor(shape={self.shape}, {self.fp8_dtype}, scale_layout={self.scale_layout!r}, "
            f"{scales}, device={self.device})"
        )
