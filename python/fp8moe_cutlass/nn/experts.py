"""MoEExperts: the experts of a Mixture-of-Experts layer, in FP8 or in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8moe_cutlass import build_info
from fp8moe_cutlass.autograd import (
    Counters,
    Fp8Weights,
    Grouped,
    Local,
    Move,
    Options,
    experts,
    grouped_plan,
    quantize_weights,
    weight_grads,
)
from fp8moe_cutlass.autograd.streams import in_backward
from fp8moe_cutlass.autograd.weight_grad import Pending, WeightGrads
from fp8moe_cutlass.distributed import Exchange, GroupMove
from fp8moe_cutlass.nn._sharded import whole, writable
from fp8moe_cutlass.nn._validate import check_inputs, check_options, check_rows, check_sizes
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.slow_path import slow_path

if TYPE_CHECKING:
    from fp8moe_cutlass.nn.reuse import Reused


class MoEExperts(nn.Module):
    """out[t] = sum over slots s of weight[t, s] * down_e (silu(gate_e x[t]) * up_e x[t]), where
    e = topk_idx[t, s].

    Parameters: gate_up_proj [E, 2I, H] (gate first) and down_proj [E, H, I], of `dtype` (bfloat16,
    float32 or float16). H and I are multiples of 16 with an FP8 recipe, of 8 without.

    recipe: how to quantize (Fp8Recipe), or None for bfloat16 throughout, in plain torch.
    preactivation: what backward reads of z = x gate_up^T. "save": z in bf16. "save_fp8": half the
      memory; the weight gradient of down_proj then sees the quantized z. "recompute": x alone is
      saved, and z computed again; the same bits as "save".
    transposed_weights: what dgrad reads of the weights. "save": their FP8 codes, made in forward
      and kept until the backward, one byte per parameter for each forward in flight. "recompute":
      each backward makes them from the parameters, which must then be what they were (torch's
      "modified by an inplace operation"); the same bits. For fully_shard, and for many forwards in
      flight.
    delay_wgrad: backward leaves the weight gradients to `backward_dw()`, which must run before the
      next training forward. Hooks on the parameters, and so DistributedDataParallel's average,
      have run by then: average those gradients yourself.
    These options are read-only.

    Each forward quantizes the parameters it multiplies, in FP8, and nothing of that stays. To
    quantize once for several forwards, pass them `weights=layer.quantize_weights()`, or run them
    `with reuse_fp8_weights(model):`. Frozen parameters cost what their use does: nothing is saved
    or made for a gradient that nobody takes.

    A parameter with `main_grad` gets its gradient added there, or written with
    overwrite_main_grad=True (autograd/weight_grad.py); else in .grad, in its grad_dtype.

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
    who passed what; with a capacity, in the first forward of its kind. docs/how-to/several-gpus.md.
    """

    _counters: Counters | None = None  # of telemetry
    _reused: Reused | None = None  # inside reuse_fp8_weights

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        recipe: Fp8Recipe | None = Fp8Recipe(),  # noqa: B008 (frozen)
        preactivation: str = "save",
        transposed_weights: str = "save",
        delay_wgrad: bool = False,
        group: dist.ProcessGroup | None = None,
        capacity: int | tuple[int, int] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_experts, hidden_size, intermediate_size, 8 if recipe is None else 16)
        check_options(recipe, preactivation, transposed_weights, dtype)
        _say_what_is_slow(recipe)
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self._options = Options(recipe, preactivation, transposed_weights)
        self._delayed: list[Pending] | None = [] if delay_wgrad else None
        self._move = _move(group, num_experts, capacity)
        factory: Any = {"dtype": dtype, "device": device}
        e, h, i = len(self.local_experts), hidden_size, intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * i, h, **factory))
        self.down_proj = nn.Parameter(torch.empty(e, h, i, **factory))
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
    def recipe(self) -> Fp8Recipe | None:
        recipe: Fp8Recipe | None = self._options.recipe
        return recipe

    @property
    def preactivation(self) -> str:
        return self._options.preactivation

    @property
    def transposed_weights(self) -> str:
        return self._options.transposed_weights

    @property
    def delay_wgrad(self) -> bool:
        return self._delayed is not None

    @property
    def local_experts(self) -> range:
        """The experts whose weights this rank holds."""
        exchange = self._exchange
        return range(self.num_experts) if exchange is None else exchange.local_experts

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

    @property
    def _exchange(self) -> Exchange | None:
        return self._move.exchange if isinstance(self._move, GroupMove) else None

    def forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        no_expert: int = -1,
        weights: Fp8Weights | None = None,
        overwrite_main_grad: bool = False,
    ) -> Tensor:
        """x [..., H] float, topk_idx [..., S] int32 or int64, topk_weights [..., S] float
        -> out [..., H] in x's dtype (under autocast: in the autocast dtype).

        no_expert: the id of a slot without an expert, besides -1, such as transformers'
        num_experts. Other ids out of range raise on the CPU; on a GPU they are dropped and counted.
        weights: the FP8 weights to multiply, such as `quantize_weights()` made; gradients are the
        parameters'. None: the parameters, quantized now.
        overwrite_main_grad: this forward's backward writes main_grad instead of adding to it. It
        must be the first one to run after the optimizer's step; one that runs later raises, but
        not where it or the one before is compiled, nor under a reentrant checkpoint: then what
        was added is lost.
        """
        check_inputs(self.gate_up_proj, x, topk_idx, topk_weights)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        shape = x.shape
        x, topk_idx, probs = _rows(x), _rows(topk_idx), _rows(topk_weights).float()
        if no_expert != -1:
            topk_idx = topk_idx.masked_fill(topk_idx == no_expert, -1)
        out = self.run(self._move, x, topk_idx, probs, weights, overwrite_main_grad)
        return out if len(shape) == 2 else out.view(shape)

    def forward_rows(
        self,
        rows: Tensor,
        counts: Tensor | Sequence[int] | RoutingPlan,
        probs: Tensor | None = None,
        *,
        weights: Fp8Weights | None = None,
        overwrite_main_grad: bool = False,
    ) -> Tensor:
        """The block over rows that came grouped by local expert: rows [R, H] float -> [R, H] in
        their dtype, in the same order, for callers that move tokens themselves. Nothing is moved
        and nothing is read by the host.

        counts: rows of each local expert [E], on the host or on the device; or a plan of
        ops.plan_from_counts, for experts whose rows begin at multiples of its align. Rows past
        their sum influence nothing; what comes out there, and as their gradient, is unspecified.
        probs [R]: multiply the activation, before it is quantized. None: the caller weights.
        weights, overwrite_main_grad: as of forward.
        """
        check_rows(self.gate_up_proj, rows, counts, probs)
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        probs = None if probs is None else probs.float().contiguous()
        move = Grouped(grouped_plan(self.recipe, counts, rows))
        return self.run(move, rows.contiguous(), None, probs, weights, overwrite_main_grad)

    def run(
        self,
        move: Move,
        x: Tensor,
        topk_idx: Tensor | None,
        probs: Tensor | None,
        weights: Fp8Weights | None = None,
        overwrite_main_grad: bool = False,
        **how: Any,
    ) -> Tensor:
        """The block over these parameters by any `move`, as autograd.experts, which takes `how`."""
        gate_up, down = self.gate_up_proj, self.down_proj  # once: a look-up takes a microsecond
        if torch.compiler.is_compiling():
            self._check_compilable()
        weights, grads = self._prepare(gate_up, down, weights, overwrite_main_grad)
        how |= {"move": move, "weights": weights, "grads": grads, "counters": self._counters}
        return experts(x, topk_idx, probs, gate_up, down, self._options, **how)

    def quantize_weights(self) -> Fp8Weights:
        """The parameters in FP8, a value for forward's `weights=`. With what dgrad reads, unless
        under no_grad or with transposed_weights="recompute". Collective where they are sharded."""
        if self.recipe is None:
            raise ValueError("[quantize_weights] the layer must have an FP8 recipe; got None")
        transposed = self.transposed_weights == "save" and torch.is_grad_enabled()
        gate_up, down = (whole(w.detach()) for w in (self.gate_up_proj, self.down_proj))
        return quantize_weights(gate_up, down, self.recipe, transposed=transposed)

    def _prepare(
        self, gate_up: Tensor, down: Tensor, weights: Fp8Weights | None, overwrite_main_grad: bool
    ) -> tuple[Fp8Weights | None, WeightGrads]:
        """Of a forward over these parameters: the FP8 weights it multiplies, None if it quantizes
        them, and where the gradients go."""
        if type(overwrite_main_grad) is not bool:
            raise ValueError(
                "[MoEExperts] overwrite_main_grad must be True or False; "
                f"got {overwrite_main_grad!r}"
            )
        if self.delay_wgrad:
            self._check_delay(gate_up, down)
        if weights is not None:
            if not isinstance(weights, Fp8Weights):
                raise ValueError(f"[MoEExperts] weights must be Fp8Weights; got {type(weights)}")
            weights.check(gate_up, down, self.recipe)
        elif self._reused is not None:
            self._reused.compare(self)
            weights = self._reused.weights
        elif gate_up.is_leaf and gate_up.grad is not None and not torch.compiler.is_compiling():
            _say_what_repeats(self.recipe)
        return weights, weight_grads(gate_up, down, overwrite_main_grad, self._delayed)

    def backward_dw(self) -> None:
        """Run the weight gradients that `delay_wgrad` left behind, oldest first. One that raises
        is still pending, with those behind it."""
        delayed = self._delayed or []
        while delayed:
            wanted = delayed[0].to.weight
            if not any(wanted is w for w in (self.gate_up_proj, self.down_proj)):
                raise RuntimeError(
                    "[MoEExperts] backward_dw() needs the parameters that forward saw; got others "
                    "(fully_shard, or a new Parameter), which would not see the gradients"
                )
            delayed[0].run()
            del delayed[0]  # and what it has saved

    def _check_delay(self, gate_up: Tensor, down: Tensor) -> None:
        if not (gate_up.is_leaf and down.is_leaf):
            raise RuntimeError(
                "[MoEExperts] delay_wgrad must be False where weights are computed (parametrize, "
                "functional_call): backward_dw() has no way back to what they are made of; got True"
            )
        # A checkpointed forward runs again inside a backward: there others may be pending.
        if torch.is_grad_enabled() and not in_backward():
            self._check_nothing_pending("the next training forward")

    def _check_nothing_pending(self, before: str) -> None:
        if self._delayed:
            raise RuntimeError(
                f"[MoEExperts] backward_dw() must run before {before}; "
                f"got {len(self._delayed)} weight gradients that still wait for it"
            )

    def _save_to_state_dict(self, *args: Any) -> None:
        self._check_nothing_pending("state_dict()")
        super()._save_to_state_dict(*args)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, recipe={self.recipe}, "
            f"preactivation={self.preactivation!r}, "
            f"transposed_weights={self.transposed_weights!r}"
            + (f", local_experts={self.local_experts}" if self._exchange is not None else "")
        )

    def __getstate__(self) -> dict[str, Any]:
        self._check_nothing_pending("a copy of the layer")
        own: Any = {"_delayed": None if self._delayed is None else []}
        return {**self.__dict__, **own, "_reused": None, "_counters": None}

    def _check_compilable(self) -> None:
        # What the backward would have to do to Python objects, which a compiled one cannot.
        if self.delay_wgrad:
            raise RuntimeError("[MoEExperts] delay_wgrad=True cannot be compiled")
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


def _move(
    group: dist.ProcessGroup | None, num_experts: int, capacity: int | tuple[int, int] | None
) -> Local | GroupMove:
    if group is not None:
        return GroupMove(Exchange(group, num_experts, capacity))
    if capacity is not None:
        raise ValueError(f"[MoEExperts] capacity is of a group; got {capacity} and group=None")
    return Local(num_experts)


def _say_what_repeats(recipe: Fp8Recipe | None) -> None:
    """Of a forward over weights with a gradient: it accumulates."""
    if recipe is not None and torch.is_grad_enabled() and not in_backward():
        slow_path(
            "weights quantized in every forward",
            "[MoEExperts] several forwards before an optimizer step quantize the same weights; "
            "run them `with fp8moe_cutlass.nn.reuse_fp8_weights(model):` to quantize once",
        )


def _say_what_is_slow(recipe: Fp8Recipe | None) -> None:
    if recipe is not None and recipe.scale == "fp32":
        slow_path(
            "float32 scales",
            "[MoEExperts] float32 scales cannot be shifted in FP8: backward quantizes x and dout "
            'a second time; Fp8Recipe(scale="pow2") does not',
        )
    if not build_info()["cuda"] and torch.cuda.is_available():
        slow_path(
            "built for the CPU alone",
            "[MoEExperts] this build has no CUDA backend, and torch sees a GPU: layers run on the "
            "CPU; install with FP8MOE_CUDA=ON",
        )


def _rows(t: Tensor) -> Tensor:
    """t [..., C] as dense rows [N, C]: no view, which autograd would record, where it is one."""
    return (t if t.ndim == 2 else t.reshape(-1, t.shape[-1])).contiguous()
