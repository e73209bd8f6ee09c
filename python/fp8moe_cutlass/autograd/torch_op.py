"""The block as torch sees it: an autograd.Function, or an operator where something traces.

Eager code runs the Function straight. Where torch.compile, make_fx, jit.trace or a dispatch mode
looks on, the block is one opaque operator each way, torch.ops.fp8moe.experts and experts_backward
(of a group, which sends and may read on the host, group_experts and group_experts_backward), with
the same bits.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fp8moe_cutlass.autograd import block
from fp8moe_cutlass.autograd.arguments import check_options, check_tensor, check_weights
from fp8moe_cutlass.autograd.block import Grouped, Local, Move
from fp8moe_cutlass.autograd.body import Biases, Counters, Lora, Need, Options
from fp8moe_cutlass.autograd.weight_grad import (
    Average,
    Pending,
    WeightGrads,
    averaged,
    weight_grads,
)
from fp8moe_cutlass.autograd.weights import Fp8Weights, is_turned
from fp8moe_cutlass.ops._torch import compiling, refuse_transforms, runs, watched
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.version import __version__


def experts(
    x: Tensor,
    topk_idx: Any,
    probs: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    options: Options = Options(),  # noqa: B008 (frozen)
    *,
    move: Move | None = None,
    weights: Fp8Weights | None = None,
    need: Need | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The block, its arguments checked.

    out [T, H] in x's dtype of x [T, H], topk_idx [T, S] and probs [T, S] f32; differentiable in
    x, probs and two tensors of any origin, gate_up [E, 2I, H] and down [E, H, I]; of an
    activation without a gate gate_up is [E, I, H]. Weights [E, in, out] are used as they lie when
    they are passed as `w.mT`; their gradients lie alike.

    move: None: gate_up and down are all experts. weights: the FP8 weights to multiply; None: the
    two tensors, quantized now. need: whose gradients a backward will be asked for; None: of what
    requires one. biases: of gate_up [E, 2I] and of down [E, H], which probs weight, too;
    differentiable.
    """
    if not isinstance(options, Options):
        raise ValueError(f"[experts] options must be Options; got {type(options).__name__}")
    check_options("experts", options)
    check_weights("experts", gate_up, down, options.activation)
    check_tensor("experts", "x", x)
    if x.ndim != 2 or x.shape[1] != down.shape[1]:
        raise ValueError(f"[experts] x must be [T, {down.shape[1]}]; got {tuple(x.shape)}")
    for name, t in (("topk_idx", topk_idx), ("probs", probs)):
        if t is not None:
            check_tensor("experts", name, t)
    if topk_idx is not None and (topk_idx.ndim != 2 or len(topk_idx) != len(x)):
        raise ValueError(f"[experts] topk_idx must be [{len(x)}, S]; got {tuple(topk_idx.shape)}")
    of_probs, like = (x.shape[:1], "x's") if topk_idx is None else (topk_idx.shape, "topk_idx's")
    if probs is not None and probs.shape != of_probs:
        raise ValueError(
            f"[experts] probs must be {like} {tuple(of_probs)}; got {tuple(probs.shape)}"
        )
    if not isinstance(weights, Fp8Weights | None):
        raise ValueError(f"[experts] weights must be Fp8Weights; got {type(weights).__name__}")
    if weights is not None:
        weights.check(gate_up, down, options.recipe)
    if move is not None and not hasattr(move, "send"):
        raise ValueError(f"[experts] move must be a Move or None; got {type(move).__name__}")
    move = move or Local(gate_up.shape[0])
    of = None
    if biases is not None:
        of = Biases(*biases)
        for name, bias, w in (("gate_up", of.gate_up, gate_up), ("down", of.down, down)):
            check_tensor("experts", f"biases: {name}", bias)
            if bias.shape != w.shape[:2]:
                raise ValueError(
                    f"[experts] biases: {name} must be {tuple(w.shape[:2])}; got "
                    f"{tuple(bias.shape)}"
                )
    return run(x, topk_idx, probs, gate_up, down, options, move, weights, need, biases=of)


def run(
    x: Tensor,
    topk_idx: Any,
    probs: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    options: Options,
    move: Move,
    weights: Fp8Weights | None = None,
    need: Need | None = None,
    owner: Owner | None = None,
    lora: Lora | None = None,
    biases: Biases | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """`experts`, for a caller that has checked its arguments. owner: says where the gradients of
    the two weights go, and what counts. lora: low-rank terms, for a recipe in FP8. up [E, I, H]:
    gate_up is the gate alone, [E, I, H] with I a multiple of 128; for a recipe in FP8 with
    transposed_weights="save", without weights, lora, main_grad and DTensors. The gradients of the
    two are tensors of their own."""
    factors: tuple[Tensor, ...] = () if lora is None else lora.factors
    more = (*(biases or ()), *factors)
    refuse_transforms("experts", x, probs, gate_up, down, *more)
    of_probs = probs is not None and probs.requires_grad
    of_lora = any(t.requires_grad for t in factors) if factors else False
    of_biases = any(t.requires_grad for t in biases) if biases else False
    of_gate_up = gate_up.requires_grad or (up is not None and up.requires_grad)
    required = Need(x.requires_grad, of_probs, of_gate_up, down.requires_grad, of_lora, of_biases)
    if not (torch.is_grad_enabled() and any(required)):
        need = None
    elif need is None:
        need = required
    if watched():
        return _through_torch(
            *(x, topk_idx, probs, gate_up, down, options, move, weights, need, owner, lora),
            biases,
            up,
        )
    if need is None:
        rest = (options, move, weights, None, None, lora, biases, up)
        return block.forward(x, topk_idx, probs, gate_up, down, *rest)[0]
    held: tuple[Tensor, ...] = (gate_up, down) if biases is None else (gate_up, down, *biases)
    of, counters = held, None
    pending = average = of_low_rank = None
    if owner is not None:
        pending, average = owner._delayed, owner._average
        if average is not None:
            of = owner.owned()
        counters, of_low_rank = owner._counters, owner._lora_average
    scaling = 0.0 if lora is None else lora.scaling
    of_up = None if up is None else up.dtype
    grads = weight_grads(of, held, pending, average, of_up)
    how = How(options, move, grads, counters, need, scaling, of_low_rank)
    out: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
        x, probs, gate_up, down, up, topk_idx, weights, how, *more
    )
    return out


class How(NamedTuple):
    """The values beside tensors that a forward leaves to its backward."""

    options: Options
    move: Move
    grads: WeightGrads
    counters: Counters | None
    need: Need
    scaling: float  # of low-rank terms; 0: there are none
    low_rank: Average | None  # of their gradients


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor | None,
        gate_up: Tensor,
        down: Tensor,
        up: Tensor | None,
        topk_idx: Any,
        weights: Fp8Weights | None,
        how: How,
        *more: Tensor,
    ) -> Tensor:
        options, move, grads, counters, need, scaling, _ = how
        beside = len(grads.biases)
        lora = Lora(more[beside:], scaling) if scaling else None
        biases = Biases(*more[:beside]) if beside else None
        out, saved, ctx.route = block.forward(
            *(x, topk_idx, probs, gate_up, down, options, move, weights, need, counters),
            lora,
            biases,
            up,
        )
        ctx.save_for_backward(*saved.tensors())
        ctx.how, ctx.sizes = how, saved.sizes
        ctx.more = len(more)
        ctx.at = 1 if probs is None else 2  # of gate_up among the tensors, which have edges
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("[experts] has no second derivative; got create_graph=True")
        options, move, grads, counters, need, scaling, low_rank = ctx.how
        edges = ctx.next_functions
        gate_up, asked_gate_up = runs(edges[ctx.at][0])
        down, asked_down = runs(edges[ctx.at + 1][0])
        if grads.up is not None:
            gate_up = gate_up or runs(edges[ctx.at + 2][0])[0]
        of_biases: Any = ()
        if grads.biases:
            first = len(edges) - ctx.more
            of_biases = [runs(edge[0]) for edge in edges[first : first + len(grads.biases)]]
        if asked_gate_up or asked_down or of_biases:
            grads = grads.returning(asked_gate_up, asked_down, of_biases)
        x, probs = (need.x, need.probs) if move.collective else ctx.needs_input_grad[:2]
        body = block.body_of(options.recipe)
        # Dense, wherever a saved-tensor hook has put them, but for rows that came with a gap.
        tensors = [
            t
            if t is None
            or t.is_contiguous()
            or (n in body.ROWS_APART and t.stride(-1) == 1)
            or is_turned(t)
            else t.contiguous()
            for n, t in enumerate(ctx.saved_tensors)
        ]
        saved = body.Saved.of(tensors, ctx.sizes, options.recipe, isinstance(move, Grouped))
        del tensors
        dx, dprobs, dweights = block.backward(
            *(dout, saved, ctx.route, options, move, grads, counters),
            Need(x, probs, gate_up, down, need.lora, need.biases),
            scaling,
        )
        of_lora = averaged(dweights[5:], low_rank) if scaling else ()
        biases = dweights[3:5] if of_biases else ()
        return dx, dprobs, *dweights[:3], None, None, None, *biases, *of_lora


# ---- as an operator -----------------------------------------------------------------------------


class Owner:
    """Who a forward is of: an operator's arguments are tensors and numbers, so it finds here by
    `key` where gradients go (main_grad), what counts, and the group that moves tokens."""

    gate_up_proj: Any
    down_proj: Any
    _move: Move
    _counters: Counters | None = None
    _delayed: list[Pending] | None = None  # a list with delay_wgrad
    _average: Average | None = None  # of shard_experts: the two are DTensors over a group's ranks
    _lora_average: Average | None = None  # of the gradients of low-rank terms
    key = -1
    key_tensor: Tensor  # the same, for operators of a group: no constant, so layers share a graph
    has_bias = False

    def own_biases(self) -> Biases:
        """Where has_bias: the biases of both projections, as `gate_up_proj` is."""
        raise NotImplementedError

    def owned(self) -> tuple[Any, ...]:
        """The two weights, and biases."""
        biases = self.own_biases() if self.has_bias else ()
        return self.gate_up_proj, self.down_proj, *biases


owners: WeakValueDictionary[int, Owner] = WeakValueDictionary()
_keys = itertools.count()
_calls = itertools.count()


def give_key(owner: Owner) -> None:
    """Gives owner a key, a number of this process by which an operator finds it while it lives."""
    owner.key = next(_keys)
    owners[owner.key] = owner
    with torch.inference_mode(False):
        owner.key_tensor = torch.tensor(owner.key, device="cpu")


def _through_torch(
    x: Tensor,
    topk_idx: Any,
    probs: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    options: Options,
    move: Move,
    weights: Fp8Weights | None,
    need: Need | None,
    owner: Owner | None,
    lora: Lora | None,
    biases: Biases | None,
    up: Tensor | None,
) -> Tensor:
    """`experts` by the operator: everything as tensors, numbers and words."""
    if owner is not None and owner._delayed is not None:
        raise RuntimeError("[MoEExperts] delay_wgrad=True cannot be traced or compiled")
    own: tuple[Any, ...] = (gate_up, down, *(biases or ()))
    if owner is not None and owner._average is not None:
        own = owner.owned()
    in_place = [w.requires_grad and getattr(w, "main_grad", None) is not None for w in own]
    plan, op = None, torch.ops.fp8moe.experts
    key: int | Tensor = -1
    call = ""
    if owner is not None and (any(in_place) or owner._counters is not None):
        key, call = owner.key, _number_of_call() if compiling() else ""
    tokens, experts = x.shape[0], gate_up.shape[0]
    if isinstance(move, Local):
        kind, most, slots = "tokens", move.max_assignments, topk_idx.shape[1]
        sizes = [tokens, slots, experts, 1, tokens * slots if most is None else most]
    elif isinstance(move, Grouped):
        kind, plan, sizes = "counts", move.counts, [tokens, 1, experts, 1, tokens]
        if isinstance(plan, RoutingPlan):
            kind, sizes, plan = "plan", list(plan.sizes), plan.buffer
        elif not isinstance(plan, Tensor):
            plan = torch.tensor(plan, dtype=torch.int32)
    elif owner is not None and move is owner._move:
        kind, op, key = "group", torch.ops.fp8moe.group_experts, owner.key_tensor
        sizes = move.op_sizes(*x.shape, topk_idx.shape[1], options.recipe)  # type: ignore[attr-defined]
    else:
        raise RuntimeError(f"[MoEExperts] {type(move).__name__} cannot be traced or compiled")
    for weight, into in zip(own, in_place, strict=True):
        _check_traceable(weight, into, owner, need)
    codes: list[Tensor] = []
    if weights is not None:
        for part in weights.parts:
            codes += [gate_up.new_empty(0)] * 2 if part is None else [part.data, part.scale_inv]
    asked = [] if need is None else [*need, *in_place]
    # The version: torch keeps compiled graphs on disk, with the backward of the release then.
    how = f"{__version__}{call} {kind} {words_of(options)}"
    factors, scaling = ([], 0.0) if lora is None else (list(lora.factors), lora.scaling)
    more = list(biases or ()), factors, scaling
    out: Tensor = op(
        x, topk_idx, probs, plan, gate_up, down, up, codes, *more, how, sizes, key, asked
    )[0]
    return out


def _check_traceable(weight: Tensor, into: bool, owner: Owner | None, need: Need | None) -> None:
    if into and (owner is None or owner.key < 0):
        raise RuntimeError("[experts] main_grad can be traced and compiled in a layer alone")
    if into and need is not None and not (need.x or need.probs):
        raise RuntimeError(  # torch leaves a backward out that returns nothing
            "[MoEExperts] main_grad needs x or topk_weights that require a gradient, where a "
            "forward is compiled; got neither"
        )
    if into and hasattr(weight, "grad_added_to_main_grad"):
        raise RuntimeError(
            "[MoEExperts] grad_added_to_main_grad cannot be set by a compiled backward; delete the "
            "attribute to have main_grad accumulate alone"
        )
    if isinstance(weight, torch.nn.Parameter):
        dtype = _grad_dtype(weight)
        if dtype != weight.dtype:
            raise RuntimeError(
                "[MoEExperts] grad_dtype cannot be compiled; "
                f"got {dtype} of a {weight.dtype} weight"
            )


@torch.compiler.assume_constant_result
def _number_of_call() -> str:
    """Of each call in a graph its own: torch merges calls with equal arguments, and what their
    backwards add to main_grad would be added once."""
    return f"#{next(_calls)}"


@torch.compiler.assume_constant_result  # dynamo cannot read the attribute
def _grad_dtype(weight: Any) -> torch.dtype:
    dtype: torch.dtype = (
        getattr(weight, "grad_dtype", None) if weight.is_leaf else None
    ) or weight.dtype
    return dtype


def words_of(options: Options) -> str:
    """Options as words, for an operator's arguments."""
    recipe, preactivation, transposed, activation = options
    of = f"{preactivation} {transposed} {activation.word}"
    return of if recipe is None else f"{of} {recipe.word}"
