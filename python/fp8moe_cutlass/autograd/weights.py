"""FP8 weights as values: quantized from any two tensors, passed to a forward by who holds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd.arguments import check_weights
from fp8moe_cutlass.autograd.streams import Written, written
from fp8moe_cutlass.ops._words import flag, refuse
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.tensor import Fp8Tensor


@dataclass(frozen=True, eq=False)
class Fp8Weights:
    """Both projections in 128x128 blocks: as fprop reads them, and transposed, as dgrad does.

    A value: it knows nothing of the tensors it was made from. Where a transpose is None, each
    backward makes it from the codes. On a GPU an eager forward on another stream waits until the
    codes are written; a compiled one does not: call `wait()` on its stream before. A pytree.
    """

    gate_up: Fp8Tensor  # [E, 2I, H]
    down: Fp8Tensor  # [E, H, I]
    gate_up_t: Fp8Tensor | None = None  # [E, H, 2I]
    down_t: Fp8Tensor | None = None  # [E, I, H]
    written: Written | None = None

    def wait(self) -> None:
        """The current stream waits until the codes are written."""
        if self.written is not None:
            self.written.wait(self.parts)

    @torch.no_grad()
    def update_(self, layer: Any) -> None:
        """Quantize the parameters of `layer`, a MoEExperts, into these codes, in place: for a CUDA
        graph, which reads fixed addresses. A backward that has yet to read the old codes raises
        torch's "modified by an inplace operation"."""
        if not hasattr(layer, "local_weights"):
            refuse("Fp8Weights", "layer", "a MoEExperts", layer)
        gate_up, down = layer.local_weights()
        self.check(gate_up, down, layer.recipe)
        if is_codes(gate_up):
            raise ValueError(
                "[Fp8Weights] layer must hold parameters to quantize; got one of from_fp8, whose "
                "parameters are FP8 codes: make layer.quantize_weights() anew"
            )
        for w, q, q_t in ((gate_up, self.gate_up, self.gate_up_t), (down, self.down, self.down_t)):
            both = q_t is not None
            quantize_weight(w, layer.recipe, transposed=both, out=(q, q_t) if both else q)
        if self.written is not None:
            self.written.record()

    def check(self, gate_up: Tensor, down: Tensor, recipe: Fp8Recipe | None) -> None:
        """ValueError unless these codes can stand for the two tensors under `recipe`."""
        if recipe is None:
            raise ValueError("[Fp8Weights] the layer must have an FP8 recipe; got recipe=None")
        for name, w, q in (("gate_up", gate_up, self.gate_up), ("down", down, self.down)):
            asked = (tuple(w.shape), w.device, "e4m3")
            got = (q.shape, q.device, q.fp8_dtype)
            if asked != got:
                raise ValueError(
                    f"[Fp8Weights] {name} must have (shape, device, format) {asked}; got {got}"
                )

    @property
    def parts(self) -> tuple[Fp8Tensor | None, ...]:
        """The four FP8 tensors."""
        return self.gate_up, self.down, self.gate_up_t, self.down_t

    def __reduce__(self) -> Any:  # an event is of this process alone
        self.wait()
        return _now_written, self.parts


def quantize_weights(
    gate_up: Tensor,
    down: Tensor,
    recipe: Fp8Recipe = Fp8Recipe(),  # noqa: B008 (frozen)
    *,
    transposed: bool = True,
) -> Fp8Weights:
    """The FP8 weights of any gate_up [E, 2I, H] and down [E, H, I]; without a gradient.

    transposed: as dgrad reads them, too, in the same pass. False writes half.
    """
    check_weights("quantize_weights", gate_up, down)
    if not isinstance(recipe, Fp8Recipe):
        refuse("quantize_weights", "recipe", "an Fp8Recipe", recipe)
    flag("quantize_weights", "transposed", transposed)
    gate_up_q, gate_up_t = quantize_weight(gate_up, recipe, transposed=transposed)
    down_q, down_t = quantize_weight(down, recipe, transposed=transposed)
    return _now_written(gate_up_q, down_q, gate_up_t, down_t)


def is_codes(w: Tensor) -> bool:
    """Whether w holds FP8 codes, beside whose parameter there are scales."""
    return w.dtype == torch.float8_e4m3fn


def is_turned(w: Tensor) -> bool:
    """Whether w [E, N, K] is w' [E, K, N] as it lies, seen as w'.mT: weights [E, in, out]."""
    return w.ndim == 3 and w.element_size() > 1 and not w.is_contiguous() and w.mT.is_contiguous()


def of_codes(
    gate_up: Tensor,
    gate_up_scale_inv: Tensor,
    down: Tensor,
    down_scale_inv: Tensor,
    *,
    transposed: bool,
) -> Fp8Weights:
    """FP8 weights over codes as they lie, gate_up [E, 2I, H] and down [E, H, I], with the scales of
    their 128x128 blocks in float32, or in e8m0 or bfloat16, which are converted. transposed: with
    what dgrad reads, a byte per parameter; else each backward makes it."""
    parts: list[Any] = [
        Fp8Tensor(w.detach(), s.detach().float(), "block", s.dtype == torch.float8_e8m0fnu)
        for w, s in ((gate_up, gate_up_scale_inv), (down, down_scale_inv))
    ]
    if not transposed:
        return Fp8Weights(*parts)
    return _now_written(*parts, *(ops.turn_weight(part) for part in parts))


def quantize_weight(
    w: Tensor,
    recipe: Fp8Recipe,
    *,
    transposed: bool | Literal["only"],
    out: Any = None,
    below: Tensor | None = None,
) -> tuple[Any, Any]:
    """w [E, N, K] as fprop reads it and as dgrad does, in one pass. transposed: False for the first
    alone, "only" for the second alone; None stands for the other. out, below: as of
    ops.quantize_weight."""
    how: Any = {"scale": recipe.scale, "eps": recipe.eps, "transposed": transposed}
    w = w.detach()
    if below is None and not w.is_contiguous() and is_turned(w):
        # Blocks of 128x128 turn onto themselves: each result is there in the other's place.
        how["transposed"] = {True: True, False: "only", "only": False}[transposed]
        to = out[::-1] if isinstance(out, tuple) else out
        made: Any = ops.quantize_weight(w.mT, out=to, **how)
        made = made[::-1] if transposed is True else made
    else:
        below = None if below is None else below.detach().contiguous()
        made = ops.quantize_weight(w.contiguous(), below=below, out=out, **how)
    if transposed is True:
        return made  # type: ignore[no-any-return]
    return (None, made) if transposed else (made, None)


def transpose(w: Fp8Tensor | Tensor, recipe: Fp8Recipe) -> Fp8Tensor:
    """w [E, N, K], codes or a parameter, as dgrad reads it: the same either way."""
    if isinstance(w, Fp8Tensor):
        return ops.turn_weight(w)
    made: Fp8Tensor = quantize_weight(w, recipe, transposed="only")[1]
    return made


def _now_written(*parts: Any) -> Fp8Weights:
    return replace(Fp8Weights(*parts), written=written(parts[0].device))


torch.serialization.add_safe_globals([_now_written])  # what torch.load takes


def _flatten(weights: Fp8Weights) -> tuple[list[Fp8Tensor], list[bool]]:
    """Lists the FP8 tensors, and which of the four there are."""
    weights.wait()  # so that _unflatten's event is one of all that was written
    there = [part is not None for part in weights.parts]
    return [part for part in weights.parts if part is not None], there


def _unflatten(parts: Iterable[Fp8Tensor], there: Iterable[bool]) -> Fp8Weights:
    left = iter(parts)
    return _now_written(*(next(left) if has else None for has in there))


pytree.register_pytree_node(
    Fp8Weights,
    _flatten,
    _unflatten,
    serialized_type_name="fp8moe_cutlass.Fp8Weights",
    flatten_with_keys_fn=lambda weights: (
        [(pytree.SequenceKey(n), part) for n, part in enumerate(_flatten(weights)[0])],
        _flatten(weights)[1],
    ),
)
