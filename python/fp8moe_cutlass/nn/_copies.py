"""The FP8 copies of a module's weights: when they are made, and of what."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd import Fp8Weights
from fp8moe_cutlass.autograd.experts import dense
from fp8moe_cutlass.nn._sharded import is_sharded, versioned, whole
from fp8moe_cutlass.nn._staleness import Kept, capturing, fingerprint, watch
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.tensor import Fp8Tensor, scale_shape


class Fp8Copies(nn.Module):
    """A module whose gate_up_proj [E, 2I, H] and down_proj [E, H, I] have FP8 copies, in buffers
    outside state_dict."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    recipe: Fp8Recipe | None  # None: there are no copies
    transposed_weights: str  # "kept" or "remade"
    _shards: dict[str, Tensor] = {}  # noqa: RUF012 (replaced, never written): under fully_shard
    _source: Kept | None  # of which parameters the copies are
    _quantized: bool  # whether the copies hold anything
    # Since the last step of the weights' optimizer: whether a compiled or captured forward has read
    # the copies, and whether they have been written.
    _read = _written = False

    @torch.no_grad()
    def quantize_weights(self) -> None:
        """Quantize the parameters into the FP8 copies, in place. Once per optimizer step."""
        if self.recipe is None:
            return
        copies = self.fp8_weights()
        how: Any = {name: getattr(self.recipe, name) for name in ("scale", "eps")}
        for parameter, rows, transpose in (
            (self.gate_up_proj, copies.gate_up, copies.gate_up_t),
            (self.down_proj, copies.down, copies.down_t),
        ):
            weight = dense(whole(parameter.detach()))
            if isinstance(transpose, Fp8Tensor):
                ops.quantize_weight(weight, **how, out=(rows, transpose))
            else:
                ops.quantize_weight(weight, **how, only="rows", out=rows)
        self._quantized = self._written = True
        if not torch.compiler.is_compiling():
            watch(self)
            # Under capture nothing has run yet: a replay will write the copies.
            weights = self.gate_up_proj, self.down_proj
            self._source = None if capturing(weights[0]) else Kept(self._fingerprint(*weights))

    def fp8_weights(self) -> Fp8Weights:
        """The FP8 copies as the last `quantize_weights` left them; the layer has an FP8 recipe."""
        assert self.recipe is not None
        buffers = self._buffers  # every forward is here; a look-up by attribute takes a microsecond
        how: Any = ("block", self.recipe.scale == "pow2", "e4m3")

        def held(name: str) -> Fp8Tensor:
            return Fp8Tensor(buffers[f"{name}_fp8"], buffers[f"{name}_scale_inv"], *how)

        kept = self.transposed_weights == "kept"
        return Fp8Weights(
            held("gate_up"),
            held("gate_up_t") if kept else self.gate_up_proj.detach().mT,
            held("down"),
            held("down_t") if kept else self.down_proj.detach().mT,
        )

    def _refresh(self, is_first_microbatch: bool | None) -> None:
        parameters = (self.gate_up_proj, self.down_proj)
        traced = torch.compiler.is_compiling() or capturing(parameters[0])
        if traced and not is_first_microbatch:
            if not self._quantized:
                raise RuntimeError(
                    "[MoEExperts] call quantize_weights() before a compiled or captured forward: "
                    "a changed parameter is not noticed there; got weights never quantized"
                )
            self._read = True
            return
        stale = is_first_microbatch is None and self._source != self._fingerprint(*parameters)
        if is_first_microbatch or self._source is None or stale:
            self.quantize_weights()

    def _fingerprint(self, *parameters: Tensor) -> tuple[Any, ...]:
        if self._shards:
            parameters = tuple(t for shard in self._shards.values() for t in versioned(shard))
        return fingerprint(*parameters)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if what `optimizer` has just used was the gradient of weights before its last step:
        a compiled forward notices no change."""
        if not self._read:
            return
        mine = (self.gate_up_proj, self.down_proj, *self._shards.values())
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in theirs and p.requires_grad for p in mine):
            return
        if not self._written:
            warnings.warn(
                "[MoEExperts] a compiled or captured forward read FP8 weights quantized before the "
                "optimizer's last step: call quantize_weights() after every step",
                stacklevel=2,
            )
        self._read = self._written = False

    @torch.inference_mode(False)  # copies made in inference mode could not be saved for a backward
    def _allocate_copies(self) -> None:
        """(Re)make the FP8 copies beside the parameters; they hold nothing yet."""
        self._source, self._quantized = None, False
        if self.recipe is None:
            return
        e, n, k = self.gate_up_proj.shape
        h, i = self.down_proj.shape[1:]
        shapes = {
            **{"gate_up": (e, n, k), "gate_up_t": (e, k, n)},
            **{"down": (e, h, i), "down_t": (e, i, h)},
        }
        device = self.gate_up_proj.device
        for name in self._copies():
            shape = shapes[name]
            data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
            scale_inv = torch.empty(scale_shape(shape, "block"), dtype=torch.float32, device=device)
            self.register_buffer(f"{name}_fp8", data, persistent=False)
            self.register_buffer(f"{name}_scale_inv", scale_inv, persistent=False)

    def _copies(self) -> tuple[str, ...]:
        kept = ("gate_up", "gate_up_t", "down", "down_t")
        return kept if self.transposed_weights == "kept" else kept[::2]

    def _copy_names(self) -> list[str]:
        return [f"{name}_{part}" for name in self._copies() for part in ("fp8", "scale_inv")]

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP puts shards and gathered weights here in turn; it gathers into other memory every
        # time and counts no version, so a change shows in the shards alone.
        if is_sharded(value):
            self._shards = {**self._shards, name: value}
        super().__setattr__(name, value)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._source = None  # as in _apply
        device = self.gate_up_proj.device
        super()._load_from_state_dict(*args)
        if self.gate_up_proj.device != device:  # assign=True, such as onto the meta device
            self._allocate_copies()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp8Copies:
        # .to(dtype), .cuda(), to_empty(): the copies follow the parameters' device, never a dtype.
        if self.recipe is not None:
            for name in self._copy_names():
                setattr(self, name, None)
        self._source = None  # torch may swap tensors, which it refuses while they are referred to
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:  # a move that fails leaves a layer that runs where it was
            self._shards = {
                name: p for name, p in self.named_parameters(recurse=False) if is_sharded(p)
            }
            self._allocate_copies()
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes its own FP8 weights: pickle cannot carry them.
        buffers = {k: v for k, v in self._buffers.items() if k not in self._copy_names()}
        return {**self.__dict__, "_buffers": buffers, "_source": None, "_shards": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._allocate_copies()
