"""Fp8Tensor: FP8 codes with the scales of their tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fp8moe_cutlass import _C
from fp8moe_cutlass.arrays import FLOATS, contiguous, dtype_name, zeros
from fp8moe_cutlass.typing import Array, DType

TILE = 128
LAYOUTS = ("row", "gemm", "block")


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
    """The format of data: its dtype's, or the one given for uint8 codes."""
    if fp8_dtype is not None and (
        not isinstance(fp8_dtype, str) or fp8_dtype not in ("e4m3", "e5m2")
    ):
        raise ValueError(f"[Fp8Tensor] fp8_dtype must be 'e4m3' or 'e5m2'; got {fp8_dtype!r}")
    name = str(getattr(data, "dtype", None)).removeprefix("torch.")
    own = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}.get(name)
    format = own or (fp8_dtype if name == "uint8" else None)
    if format is None:
        raise ValueError(
            "[Fp8Tensor] data must be float8_e4m3fn or float8_e5m2, or uint8 with "
            f"fp8_dtype given; got {name}"
        )
    if fp8_dtype not in (format, None):
        raise ValueError(f"[Fp8Tensor] fp8_dtype must be that of data, {name}; got {fp8_dtype}")
    return format


def _check_scales(data: Array, scale_inv: Array, layout: str) -> None:
    """ValueError unless scale_inv can hold data's scales in `layout`."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(
            f"[Fp8Tensor] scale_layout must be 'row', 'gemm' or 'block'; got {layout!r}"
        )
    shape = data.shape
    if len(shape) != 2 and not (layout == "block" and len(shape) == 3):
        allowed = "[M, K] or [E, M, K]" if layout == "block" else "[M, K]"
        raise ValueError(
            f"[Fp8Tensor] data must be {allowed} in {layout} layout; got {list(shape)}"
        )
    dtype = getattr(scale_inv, "dtype", None)
    if str(dtype).removeprefix("torch.") != "float32":
        raise ValueError(f"[Fp8Tensor] scale_inv must be float32; got {dtype}")
    if getattr(scale_inv, "is_nested", False):
        raise ValueError("[Fp8Tensor] scale_inv must be a dense array; got a nested tensor")
    want = scale_shape(shape, layout)
    if tuple(scale_inv.shape) != want:
        raise ValueError(
            f"[Fp8Tensor] scale_inv must be {list(want)} in {layout} layout of data "
            f"{list(shape)}; got {list(scale_inv.shape)}"
        )
    here, there = getattr(data, "device", None), getattr(scale_inv, "device", None)
    if here != there and str(here) == str(there):
        raise ValueError(
            "[Fp8Tensor] scale_inv must be of data's framework, as its "
            f"{type(data).__name__}; got {type(scale_inv).__name__}"
        )
    if here != there:
        raise ValueError(f"[Fp8Tensor] scale_inv must be on data's device {here}; got {there}")


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
    ValueError if the scales do not fit. Once fp8moe_cutlass.ops is imported, it is a pytree of
    torch's, and torch.load takes it.
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
        *,
        check: bool = True,
    ) -> None:
        """check=False: the caller knows that the scales and fp8_dtype, if given, fit the data."""
        if check or fp8_dtype is None:
            fp8_dtype = _format_of(data, fp8_dtype)
        if check:
            _check_scales(data, scale_inv, scale_layout)
        # A step makes 17 of these, and a frozen dataclass's own __init__ takes twice as long.
        own = self.__dict__
        own["data"], own["scale_inv"] = data, scale_inv
        own["scale_layout"], own["pow2"], own["fp8_dtype"] = scale_layout, pow2, fp8_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the data."""
        return tuple(self.data.shape)

    @property
    def device(self) -> Any:
        """The framework's device object; "cpu" for arrays that have none."""
        return getattr(self.data, "device", "cpu")

    def float(self) -> Array:
        """The values in float32."""
        return self.dequantize("float32")

    def __getitem__(self, at: slice | int) -> Fp8Tensor:
        """Rows [a:b] in row layout, or of 128x128 tiles from a multiple of 128 on; experts [a:b] or
        expert [e] of a weight [E, M, K]. Views."""
        by_expert = len(self.shape) == 3
        if isinstance(at, int) and by_expert:
            return replace(self, data=self.data[at], scale_inv=self.scale_inv[at])
        if not isinstance(at, slice) or at.step not in (None, 1):
            raise ValueError(f"[Fp8Tensor] rows must be taken as [a:b]; got {at!r}")
        if self.scale_layout == "gemm":
            raise ValueError(
                "[Fp8Tensor] rows must be taken in row layout: to_layout('row')[a:b]; got 'gemm'"
            )
        tiles = at
        if self.scale_layout == "block" and not by_expert:
            first, last, _ = at.indices(self.shape[0])
            if first % TILE:
                raise ValueError(f"[Fp8Tensor] rows must begin at a multiple of 128; got {first}")
            tiles = slice(first // TILE, cdiv(max(first, last), TILE))
        return replace(self, data=self.data[at], scale_inv=self.scale_inv[tiles])

    def dequantize(self, dtype: DType = "bfloat16") -> Array:
        """The values, rounded once to `dtype`: ops.dequantize, also of rows that lie apart."""
        name = dtype_name("dequantize", "dtype", dtype, *FLOATS)
        data, scale_inv = contiguous(self.data), contiguous(self.scale_inv)
        values: Array = _C.dequantize(replace(self, data=data, scale_inv=scale_inv), name)
        return values

    def to_layout(self, layout: str) -> Fp8Tensor:
        """The same tensor with its 1x128 scales in layout "row" or "gemm"; data is shared."""
        if not isinstance(layout, str):
            raise ValueError(f"[to_layout] layout must be 'row' or 'gemm'; got {layout!r}")
        if layout == self.scale_layout:
            return self
        if {layout, self.scale_layout} != {"row", "gemm"}:
            raise ValueError(
                "[to_layout] only 'row' and 'gemm' hold the same scales; "
                f"got {self.scale_layout!r} to {layout!r}"
            )
        m = self.shape[0]
        if layout == "row":
            scale = contiguous(self.scale_inv[:, :m].T)
        else:
            scale = zeros("to_layout", self.scale_inv, scale_shape(self.shape, "gemm"))
            scale[:, :m] = self.scale_inv.T
        return replace(self, scale_inv=scale, scale_layout=layout)

    def to(self, *args: Any, **kwargs: Any) -> Fp8Tensor:
        """Moved to another device (torch; the arguments of Tensor.to, but no dtype)."""
        data, scale_inv = (t.to(*args, **kwargs) for t in (self.data, self.scale_inv))
        if (data.dtype, scale_inv.dtype) != (self.data.dtype, self.scale_inv.dtype):
            raise ValueError(
                f"[Fp8Tensor.to] only moves between devices; got dtype {data.dtype}; "
                "use dequantize for values"
            )
        return replace(self, data=data, scale_inv=scale_inv)

    def cpu(self) -> Fp8Tensor:
        """Moved to the CPU (torch)."""
        return self.to("cpu")

    def clone(self) -> Fp8Tensor:
        """A copy (torch)."""
        return replace(self, data=self.data.clone(), scale_inv=self.scale_inv.clone())

    def __repr__(self) -> str:
        kind = "pow2" if self.pow2 else "float32"
        return (
            f"Fp8Tensor(shape={self.shape}, {self.fp8_dtype}, scale_layout={self.scale_layout!r}, "
            f"{kind} scales{self._scale_range()}, device={self.device})"
        )

    def _scale_range(self) -> str:
        """ " from LEAST to MOST", which waits for the device; "" where there are no values."""
        scales = (
            self.scale_inv[:, : self.shape[0]] if self.scale_layout == "gemm" else self.scale_inv
        )
        try:
            least, most = float(scales.min()), float(scales.max())
        except (RuntimeError, ValueError):  # meta, traced, captured or empty
            return ""
        return f" from {least:.4g} to {most:.4g}"
