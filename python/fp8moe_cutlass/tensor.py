"""Fp8Tensor: FP8 codes with the scales of their tiles."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fp8moe_cutlass.typing import Array, DType

TILE = 128
_TILES = {"row": (1, TILE), "gemm": (1, TILE), "block": (TILE, TILE)}
_FORMATS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


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


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Fp8Tensor:
    """value = decode(data) * scale_inv of its tile.

    data: [M, K] or [E, M, K], float8_e4m3fn or float8_e5m2, or uint8 codes with `fp8_dtype` given
    ("e4m3" or "e5m2"; frameworks without FP8 dtypes). scale_inv: float32.
    block: the tile, (1, 128) or (128, 128). scale_layout: where its scale is (docs/layouts.md):
      "row"   [M, cdiv(K, 128)]        tiles 1x128
      "gemm"  [cdiv(K, 128), pad4(M)]  tiles 1x128, what the GEMMs read
      "block" [(E,) cdiv(M, 128), cdiv(K, 128)]  tiles 128x128
    pow2: every scale is a power of two. interleave: rows of gate and up alternate in groups of this
    many (quantize_weight); 0 for plain order.
    """

    data: Array
    scale_inv: Array
    block: tuple[int, int] = (1, TILE)
    scale_layout: str = "row"
    pow2: bool = True
    interleave: int = 0
    fp8_dtype: str | None = None
    _kept = None  # by _C (src/bindings/eager.cpp): data, scale_inv and scale_layout

    def __init__(
        self,
        data: Array,
        scale_inv: Array,
        block: tuple[int, int] = (1, TILE),
        scale_layout: str = "row",
        pow2: bool = True,
        interleave: int = 0,
        fp8_dtype: str | None = None,
    ) -> None:
        tile = _TILES.get(scale_layout)
        if tile is None:
            raise ValueError(
                f"[Fp8Tensor] scale_layout must be 'row', 'gemm' or 'block'; got {scale_layout!r}"
            )
        if block != tile:
            raise ValueError(
                f"[Fp8Tensor] block must be {tile} with scale_layout {scale_layout!r}; got {block}"
            )
        if fp8_dtype not in ("e4m3", "e5m2", None):
            raise ValueError(f"[Fp8Tensor] fp8_dtype must be 'e4m3' or 'e5m2'; got {fp8_dtype!r}")
        name = str(data.dtype).removeprefix("torch.")
        own_format = _FORMATS.get(name, fp8_dtype)
        if own_format is None:
            raise ValueError(
                "[Fp8Tensor] data must be float8_e4m3fn or float8_e5m2, or uint8 with "
                f"fp8_dtype given; got {name}"
            )
        if fp8_dtype not in (own_format, None):
            raise ValueError(f"[Fp8Tensor] fp8_dtype must be that of data, {name}; got {fp8_dtype}")
        # A step makes 17 of these, and a frozen dataclass's own __init__ takes twice as long.
        own = self.__dict__
        own["data"], own["scale_inv"] = data, scale_inv
        own["block"], own["scale_layout"], own["pow2"] = block, scale_layout, pow2
        own["interleave"], own["fp8_dtype"] = interleave, own_format

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
        from fp8moe_cutlass.ops import _library

        m = self.shape[0]
        if layout == "row":
            scale = _library.contiguous(self.scale_inv[:, :m].T)
        else:
            shape = scale_shape(self.shape, "gemm")
            scale = _library.empty("to_layout", self.scale_inv, shape)
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
        return cls(**{**state, "block": tuple(state["block"])})

    def _with(self, **changes: Any) -> Fp8Tensor:
        return Fp8Tensor(**{**self.state(), **changes})

    def __repr__(self) -> str:
        parts = [f"shape={self.shape}", f"{self.fp8_dtype}", f"block={self.block}"]
        parts += [f"scale_layout={self.scale_layout!r}", "pow2" if self.pow2 else "fp32 scales"]
        if self.interleave:
            parts.append(f"interleave={self.interleave}")
        return f"Fp8Tensor({', '.join([*parts, f'device={self.device}'])})"
