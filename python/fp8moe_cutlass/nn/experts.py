"""MoEExperts: the experts of a Mixture-of-Experts layer, in FP8 or in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd import (
    Observer,
    WeightGrad,
    WgradQueue,
    bf16_experts,
    fp8_experts,
)
from fp8moe_cutlass.autograd import group as group_by_expert
from fp8moe_cutlass.distributed import (
    Bf16Block,
    Fp8Block,
    dispatched_experts,
    make_exchange,
)
from fp8moe_cutlass.nn._copies import Fp8Copies
from fp8moe_cutlass.nn._sharded import writable
from fp8moe_cutlass.nn._validate import check_inputs, check_options, check_sizes
from fp8moe_cutlass.recipe import Fp8Recipe


class MoEExperts(Fp8Copies):
    """out[t] = sum over slots s of weight[t, s] * down_e (silu(gate_e x[t]) * up_e x[t]), where
    e = topk_idx[t, s].

    Parameters: gate_up_proj [E, 2I, H] (gate first) and down_proj [E, H, I], of `dtype` (bfloat16,
    float32 or float16). H and I are multiples of 16 with an FP8 recipe, of 8 without.

    recipe: how to quantize (Fp8Recipe), or None for bfloat16 throughout, in plain torch.
    recompute: "expert" saves x alone and computes the pre-activation again in backward; "none"
      saves it too, as save_preactivation says: "bf16", or "fp8" (half the memory; the weight
      gradient of down_proj then sees the quantized pre-activation). Gradients with "expert" are
      bit-equal to those of "none" with "bf16".
    transposed_weights: "kept" holds the FP8 weights twice, as fprop reads them and as dgrad does;
      "remade" holds the first alone and makes the other from the parameters in every backward:
      one byte a parameter less, three moved for it each time; the same bits.
    delay_wgrad: backward leaves the weight gradients to `backward_dw()`. Hooks on the parameters,
      and so DistributedDataParallel's average, have run by then: average those gradients yourself.

    The FP8 copies of the weights are buffers outside state_dict. In eager mode a forward notices a
    changed parameter (replaced, written in place, or any optimizer's step) and refreshes them; a
    write through `.data` alone, or to a parameter made in inference mode, is invisible, so call
    `quantize_weights()` after it, or pass is_first_microbatch=True, which always refreshes. Under
    torch.compile and CUDA graph capture nothing is noticed: pass True there, or call
    `quantize_weights()` after every optimizer step; a forward before the first call raises. Under
    DistributedDataParallel pass broadcast_buffers=False, or it sends the copies around every step
    (over gloo it cannot: "Invalid scalar type"). Under fully_shard the copies are whole on every
    rank (docs/layer.md).

    A parameter with `main_grad` gets its gradient added there, or written with
    is_first_microbatch=True (autograd/weight_grad.py); else in .grad, in its dtype. The backward of
    that forward must run before the others', which it would overwrite: where the last microbatch
    goes back first, zero main_grad and pass True nowhere. True at most once between two backwards:
    a second forward with it rewrites the FP8 copies that the backward of the first is to read,
    which then raises (torch's "modified by an inplace operation").

    group: a torch.distributed process group whose ranks share the experts: rank r of W owns
      experts [r E / W, (r + 1) E / W) (`local_experts`), and the parameters, their gradients and
      the state_dict hold those alone, [E / W, ...]. Everything else is as on one rank: num_experts
      and the ids in topk_idx count the experts of all ranks, and a rank passes its own tokens, as
      many as it likes or none. Forward and backward are collective: every rank runs both.
      A weight's gradient sums over the tokens of all ranks, so a loss averaged over ranks wants
      it divided by W, which a data-parallel average does to the replicated weights.
    capacity: None (exact) drops nothing; the host waits for the device once a forward, to learn
      how many rows arrive. An int, the rows a rank may send to a rank, or (rows, assignments a
      rank may receive; W * rows * min(S, E / W) if not given): no host read, buffers of fixed
      size, capturable in a CUDA graph after one forward like it. What finds no place is dropped
      (its output and gradients are 0) and counted: `dropped`, `check()`.
    Ranks that disagree (sizes, slots, recipe, capacity, what requires grad) all raise, naming
    who passed what; with a capacity, in the first forward of its kind. docs/scale-out.md.
    """

    observer: Observer | None = None  # is shown what flows through training forwards and backwards

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        recipe: Fp8Recipe | None = Fp8Recipe(),  # noqa: B008 (frozen)
        recompute: str = "none",
        save_preactivation: str = "bf16",
        transposed_weights: str = "kept",
        delay_wgrad: bool = False,
        group: dist.ProcessGroup | None = None,
        capacity: int | tuple[int, int] | None = None,
        bias: bool = False,
        activation: str = "swiglu",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_experts, hidden_size, intermediate_size, 8 if recipe is None else 16)
        check_options(
            recipe, recompute, save_preactivation, transposed_weights, bias, activation, dtype
        )
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.recipe = recipe
        self.recompute = recompute
        self.save_preactivation = save_preactivation
        self.transposed_weights = transposed_weights
        self.delay_wgrad = delay_wgrad
        self._exchange = make_exchange(group, num_experts, capacity)
        factory: Any = {"dtype": dtype, "device": device}
        e, h, i = len(self.local_experts), hidden_size, intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * i, h, **factory))
        self.down_proj = nn.Parameter(torch.empty(e, h, i, **factory))
        self._wgrads = WgradQueue()
        self._allocate_copies()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform within 1/sqrt(fan in), as nn.Linear. With a group, ranks that start from the same
        random state draw the experts of all ranks and keep theirs: the layer of one process."""
        for weight in (self.gate_up_proj, self.down_proj):
            bound = 1.0 / math.sqrt(weight.shape[-1])
            with writable(weight) as mine:
                others = torch.empty_like(mine[0])
                for e in range(self.num_experts):
                    here = e in self.local_experts
                    expert = mine[e - self.local_experts.start] if here else others
                    nn.init.uniform_(expert, -bound, bound)

    @property
    def local_experts(self) -> range:
        """The experts whose weights this rank holds."""
        return range(self.num_experts) if self._exchange is None else self._exchange.local_experts

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group that shares the experts; None: there is none."""
        return None if self._exchange is None else self._exchange.group

    @property
    def dropped(self) -> Tensor | None:
        """[3] i64 on the device, or None before the first forward with a group: what this rank had
        no place for since then. Rows it did not send, ids out of range, assignments it did not
        take."""
        return None if self._exchange is None else self._exchange.dropped

    def check(self) -> None:
        """Waits for the device and raises ValueError if this rank has `dropped` anything."""
        if self._exchange is not None:
            self._exchange.check()

    def forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        beside: Callable[[], None] | None = None,
    ) -> Tensor:
        """x [..., H] float, topk_idx [..., S] int32 or int64 (-1: no expert), topk_weights
        [..., S] float -> out [..., H] in x's dtype (under autocast: in the autocast dtype).

        is_first_microbatch: True writes main_grad instead of adding to it and refreshes the FP8
        weights; False leaves the weights as they are; None notices a change by itself.
        beside: with a group, is called as soon as the tokens are on their way to their experts, to
        queue (on another stream) what does not depend on them; else before anything.
        """
        weights = (self.gate_up_proj, self.down_proj)  # once: a look-up takes a microsecond
        check_inputs(weights[0], x, topk_idx, topk_weights)
        if torch.compiler.is_compiling():
            self._check_compilable()
        if beside is not None and self._exchange is None:
            beside()
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        shape = x.shape
        x, topk_idx, probs = _rows(x), _rows(topk_idx), _rows(topk_weights).float()
        if self.delay_wgrad and self._shards:
            raise RuntimeError(
                "[MoEExperts] delay_wgrad must be False under fully_shard, which would not see "
                "the gradients of backward_dw(); got True"
            )
        if self.delay_wgrad and not all(w.is_leaf for w in weights):
            raise RuntimeError(
                "[MoEExperts] delay_wgrad must be False where weights are computed (parametrize, "
                "functional_call): backward_dw() has no way back to what they are made of; got True"
            )
        queue = self._wgrads if self.delay_wgrad else None
        gate_up, down = (WeightGrad(w, is_first_microbatch, queue) for w in weights)
        keep = "none" if self.recompute == "expert" else self.save_preactivation
        if self.recipe is not None:
            self._refresh(is_first_microbatch)
        to: Any = {"gate_up": gate_up, "down": down}
        if self._exchange is not None:
            block = self._block(keep)
            out = dispatched_experts(x, probs, topk_idx, self._exchange, block, **to, beside=beside)
        elif self.recipe is None:
            out = bf16_experts(
                x, probs, group_by_expert(topk_idx, self.num_experts), keep=keep, **to
            )
        else:
            plan = ops.route(self.num_experts, topk_idx=topk_idx)
            copies, observe = self.fp8_weights(), self.observer
            out = fp8_experts(x, probs, plan, copies, self.recipe, keep=keep, observe=observe, **to)
        return out if len(shape) == 2 else out.view(shape)

    def _block(self, keep: str) -> Fp8Block | Bf16Block:
        if self.recipe is None:
            return Bf16Block(self.gate_up_proj, self.down_proj, keep)
        return Fp8Block(self.fp8_weights(), self.recipe, keep, self.observer)

    def backward_dw(self) -> None:
        """Run the weight gradients that `delay_wgrad` left behind, oldest first."""
        self._wgrads.run()

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, recipe={self.recipe}, "
            f"recompute={self.recompute!r}, save_preactivation={self.save_preactivation!r}, "
            f"transposed_weights={self.transposed_weights!r}"
            + (f", local_experts={self.local_experts}" if self._exchange is not None else "")
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_wgrads": WgradQueue(), "observer": None}

    def _check_compilable(self) -> None:
        # What the backward would have to do to Python objects, which a compiled one cannot.
        if self.delay_wgrad:
            raise RuntimeError("[MoEExperts] delay_wgrad=True cannot be compiled")
        if self.observer is not None:
            raise RuntimeError("[MoEExperts] telemetry cannot be compiled; unwatch the module")
        if self._exchange is not None:
            raise RuntimeError(
                "[MoEExperts] a layer with a group cannot be compiled; run it eagerly"
            )
        for name, weight in self.named_parameters():
            if hasattr(weight, "main_grad") and hasattr(weight, "grad_added_to_main_grad"):
                raise RuntimeError(
                    "[MoEExperts] grad_added_to_main_grad cannot be set by a compiled backward; "
                    f"got it on {name}; delete the attribute to have main_grad accumulate alone"
                )


def _rows(t: Tensor) -> Tensor:
    """t [..., C] as dense rows [N, C]: no view, which autograd would record, where it is one."""
    return (t if t.ndim == 2 else t.reshape(-1, t.shape[-1])).contiguous()
