"""MoEExperts: the experts of a Mixture-of-Experts layer, in FP8 or in bfloat16."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd import (
    Fp8Weights,
    WeightGrad,
    WgradQueue,
    bf16_experts,
    fp8_experts,
    group,
)
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.tensor import Fp8Tensor, scale_shape

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_COPIES = ("gate_up", "gate_up_t", "down", "down_t")


class MoEExperts(nn.Module):
    """out[t] = sum over slots of weight * down_e (silu(gate_e x[t]) * up_e x[t]), e = topk_idx[t, s].

    Parameters: gate_up_proj [E, 2I, H] (gate first) and down_proj [E, H, I], of `dtype` (bfloat16,
    float32 or float16). H and I are multiples of 16 with an FP8 recipe, of 8 without.

    recipe: how to quantize (Fp8Recipe), or None for bfloat16 throughout, in plain torch.
    recompute: "expert" saves x alone and computes the pre-activation again in backward; "none"
      saves it too, as save_preactivation says: "bf16", or "fp8" (half the memory; the weight
      gradient of down_proj then sees the quantized pre-activation). Gradients with "expert" are
      bit-equal to those of "none" with "bf16".
    delay_wgrad: backward leaves the weight gradients to `backward_dw()`.

    The FP8 copies of the weights are buffers outside state_dict. In eager mode a forward notices a
    changed parameter (replaced, or written in place) and refreshes them; a write through `.data`
    is invisible, so call `quantize_weights()` after it, or pass is_first_microbatch=True, which
    always refreshes. Under torch.compile and CUDA graph capture nothing is noticed: call
    `quantize_weights()` after every optimizer step; a forward before the first call raises.

    A parameter with `main_grad` gets its gradient added there, or written with
    is_first_microbatch=True (autograd/weight_grad.py); else in .grad, in its dtype.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        recipe: Fp8Recipe | None = Fp8Recipe(),  # noqa: B008 (frozen)
        recompute: str = "none",
        save_preactivation: str = "bf16",
        delay_wgrad: bool = False,
        bias: bool = False,
        activation: str = "swiglu",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_options(recipe, recompute, save_preactivation, bias, activation, dtype)
        multiple = 8 if recipe is None else 16
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if size <= 0 or size % multiple:
                raise ValueError(
                    f"[MoEExperts] {name} must be a positive multiple of {multiple}; got {size}"
                )
        if num_experts < 1:
            raise ValueError(f"[MoEExperts] num_experts must be at least 1; got {num_experts}")
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.recipe = recipe
        self.recompute = recompute
        self.save_preactivation = save_preactivation
        self.delay_wgrad = delay_wgrad
        factory: Any = {"dtype": dtype, "device": device}
        e, h, i = num_experts, hidden_size, intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * i, h, **factory))
        self.down_proj = nn.Parameter(torch.empty(e, h, i, **factory))
        self._wgrads = WgradQueue()
        self._allocate_copies()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1/sqrt(fan in), as nn.Linear."""
        for weight in (self.gate_up_proj, self.down_proj):
            bound = 1.0 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        is_first_microbatch: bool | None = None,
    ) -> Tensor:
        """x [..., H] float, topk_idx [..., S] int32 or int64 (-1: no expert), topk_weights
        [..., S] float -> out [..., H] in x's dtype (under autocast: in the autocast dtype).

        is_first_microbatch: True writes main_grad instead of adding to it and refreshes the FP8
        weights; False leaves the weights as they are; None notices a change by itself.
        """
        self._check_inputs(x, topk_idx, topk_weights)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        shape = x.shape
        x = x.reshape(-1, self.hidden_size).contiguous()
        topk_idx = topk_idx.reshape(-1, topk_idx.shape[-1]).contiguous()
        probs = topk_weights.reshape(topk_idx.shape).float().contiguous()
        queue = self._wgrads if self.delay_wgrad else None
        gate_up = WeightGrad(self.gate_up_proj, is_first_microbatch, queue)
        down = WeightGrad(self.down_proj, is_first_microbatch, queue)
        keep = "none" if self.recompute == "expert" else self.save_preactivation
        if self.recipe is None:
            groups = group(topk_idx, self.num_experts)
            out = bf16_experts(x, probs, groups, gate_up=gate_up, down=down, keep=keep)
            return out.view(shape)
        self._refresh(is_first_microbatch)
        plan = ops.route(self.num_experts, topk_idx=topk_idx)
        out = fp8_experts(
            x, probs, plan, self._copies(), self.recipe, gate_up=gate_up, down=down, keep=keep
        )
        return out.view(shape)

    @torch.no_grad()
    def quantize_weights(self) -> None:
        """Quantize the parameters into the FP8 copies, in place. Once per optimizer step."""
        if self.recipe is None:
            return
        copies = self._copies()
        pairs = (
            (self.gate_up_proj, copies.gate_up, copies.gate_up_t),
            (self.down_proj, copies.down, copies.down_t),
        )
        for weight, rows, transpose in pairs:
            ops.quantize_weight(
                weight.detach(),
                fp8_dtype=self.recipe.fp8_dtype,
                scale=self.recipe.scale,
                eps=self.recipe.eps,
                out=(rows, transpose),
            )
        self._quantized = True
        if not torch.compiler.is_compiling():
            self._source = self._fingerprint()

    def backward_dw(self) -> None:
        """Run the weight gradients that `delay_wgrad` left behind, oldest first."""
        self._wgrads.run()

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, recipe={self.recipe}, "
            f"recompute={self.recompute!r}, save_preactivation={self.save_preactivation!r}"
        )

    def _refresh(self, is_first_microbatch: bool | None) -> None:
        if torch.compiler.is_compiling() or _capturing(self.gate_up_proj):
            if not self._quantized:
                raise RuntimeError(
                    "[MoEExperts] call quantize_weights() before a compiled or captured forward: "
                    "a changed parameter is not noticed there; got weights never quantized"
                )
        elif is_first_microbatch or self._source is None:
            self.quantize_weights()
        elif is_first_microbatch is None and self._source != self._fingerprint():
            self.quantize_weights()

    def _fingerprint(self) -> tuple[Any, ...]:
        """Equal for equal parameter objects, storage and in-place version."""
        return tuple(
            (weakref.ref(p), p.data_ptr(), None if p.is_inference() else p._version)
            for p in (self.gate_up_proj, self.down_proj)
        )

    def _allocate_copies(self) -> None:
        """(Re)make the FP8 copies beside the parameters; they hold nothing yet."""
        self._source: tuple[Any, ...] | None = None
        self._quantized = False
        if self.recipe is None:
            return
        e, n, k = self.gate_up_proj.shape
        h, i = self.down_proj.shape[1:]
        shapes = ((e, n, k), (e, k, n), (e, h, i), (e, i, h))
        device = self.gate_up_proj.device
        for name, shape in zip(_COPIES, shapes, strict=True):
            data = torch.empty(shape, dtype=_DTYPES[self.recipe.fp8_dtype], device=device)
            scale_inv = torch.empty(scale_shape(shape, "block"), device=device)
            self.register_buffer(f"{name}_fp8", data, persistent=False)
            self.register_buffer(f"{name}_scale_inv", scale_inv, persistent=False)

    def _copies(self) -> Fp8Weights:
        pow2 = self.recipe is not None and self.recipe.scale == "pow2"
        return Fp8Weights(
            *(
                Fp8Tensor(
                    getattr(self, f"{name}_fp8"),
                    getattr(self, f"{name}_scale_inv"),
                    block=(128, 128),
                    scale_layout="block",
                    pow2=pow2,
                )
                for name in _COPIES
            )
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoEExperts:
        # .to(dtype), .cuda(), to_empty(): the copies follow the parameters' device, never a dtype.
        if self.recipe is not None:
            for name in _COPIES:
                setattr(self, f"{name}_fp8", None)
                setattr(self, f"{name}_scale_inv", None)
        super()._apply(fn, recurse)
        self._allocate_copies()
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy has other parameters, and no gradients that wait.
        return {**self.__dict__, "_source": None, "_wgrads": WgradQueue()}

    def _check_inputs(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
        if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"[MoEExperts] x must be bfloat16, float16 or float32; got {x.dtype}")
        if x.ndim < 2 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"[MoEExperts] x must be [..., {self.hidden_size}]; got {tuple(x.shape)}"
            )
        if topk_idx.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"[MoEExperts] topk_idx must be int32 or int64; got {topk_idx.dtype}")
        if topk_idx.ndim != x.ndim or topk_idx.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"[MoEExperts] topk_idx must be [..., slots] with x's leading sizes "
                f"{tuple(x.shape[:-1])}; got {tuple(topk_idx.shape)}"
            )
        if topk_weights.shape != topk_idx.shape:
            raise ValueError(
                f"[MoEExperts] topk_weights must have topk_idx's shape {tuple(topk_idx.shape)}; "
                f"got {tuple(topk_weights.shape)}"
            )
        if not topk_weights.dtype.is_floating_point:
            raise ValueError(
                f"[MoEExperts] topk_weights must be floating point; got {topk_weights.dtype}"
            )
        for name, t in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if t.device != self.gate_up_proj.device:
                raise ValueError(
                    f"[MoEExperts] {name} must be on the parameters' device "
                    f"{self.gate_up_proj.device}; got {t.device}"
                )


def _check_options(
    recipe: Fp8Recipe | None,
    recompute: str,
    save_preactivation: str,
    bias: bool,
    activation: str,
    dtype: torch.dtype,
) -> None:
    if bias:
        raise NotImplementedError("[MoEExperts] expert biases are not supported; got bias=True")
    if activation != "swiglu":
        raise NotImplementedError(
            "[MoEExperts] activation must be 'swiglu', silu(gate) * up; the shifted, clamped one "
            f"of GPT-OSS is not supported; got {activation!r}"
        )
    if recompute not in ("none", "expert"):
        raise ValueError(f"[MoEExperts] recompute must be 'none' or 'expert'; got {recompute!r}")
    if save_preactivation not in ("bf16", "fp8"):
        raise ValueError(
            f"[MoEExperts] save_preactivation must be 'bf16' or 'fp8'; got {save_preactivation!r}"
        )
    if save_preactivation == "fp8" and recipe is None:
        raise ValueError("[MoEExperts] save_preactivation must be 'bf16' without a recipe")
    if save_preactivation == "fp8" and recompute == "expert":
        raise ValueError(
            "[MoEExperts] save_preactivation='fp8' saves what recompute='expert' computes again; "
            "choose one"
        )
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"[MoEExperts] dtype must be bfloat16, float16 or float32; got {dtype}")


def _capturing(t: Tensor) -> bool:
    return t.is_cuda and torch.cuda.is_current_stream_capturing()
