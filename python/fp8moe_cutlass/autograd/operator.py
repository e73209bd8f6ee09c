"""torch.ops.fp8moe.experts and experts_backward: the block of torch_op.py as operators of torch's.

Their arguments are tensors, numbers and words, and so is what is saved between them. An operator's
outputs are tensors of their own: empty ones stand for None and for inputs. The fakes say shapes
alone, written by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fp8moe_cutlass.activation import Activation
from fp8moe_cutlass.autograd import bf16, block, fp8
from fp8moe_cutlass.autograd.block import Grouped, Local, Move
from fp8moe_cutlass.autograd.body import Biases, Lora, Need, Options
from fp8moe_cutlass.autograd.low_rank import LORA_TENSORS, LoraSaved
from fp8moe_cutlass.autograd.torch_op import Owner, owners
from fp8moe_cutlass.autograd.weight_grad import Destination, WeightGrads, averaged
from fp8moe_cutlass.autograd.weights import Fp8Weights, is_turned
from fp8moe_cutlass.ops._torch import compiling
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan, buffer_words
from fp8moe_cutlass.slow_path import slow_path
from fp8moe_cutlass.tensor import Fp8Tensor, scale_shape

_FORWARD = (
    "(Tensor x, Tensor? topk_idx, Tensor? probs, Tensor? plan, Tensor gate_up, Tensor down, "
    "Tensor? up, Tensor[] codes, Tensor[] biases, Tensor[] lora, float scaling, str how, "
    "SymInt[] sizes, {} key, bool[] need) -> Tensor[]"
)
_NEED = len(Need._fields)
_BACKWARD = (
    "(Tensor dout, Tensor[] saved, str how, SymInt[] sizes, {} key, bool[] need, int[] widths, "
    "str dtypes, SymInt slots, float scaling) -> Tensor[]"
)


class _Forward(NamedTuple):
    """The arguments of a forward."""

    x: Tensor
    topk_idx: Tensor | None
    probs: Tensor | None
    plan: Tensor | None  # its buffer, or the counts, of rows that came grouped
    gate_up: Tensor
    down: Tensor
    up: Tensor | None  # not None: gate_up is the gate alone
    codes: list[Tensor]  # of given FP8 weights: codes and scales of the four parts
    biases: list[Tensor]  # both, or none
    lora: list[Tensor]  # the factors of a Lora, or none
    scaling: float  # its
    how: str  # words: the version, what moves the tokens, the options
    sizes: Sequence[int]  # of the plan; of a group, of what GroupMove.op_sizes says
    key: int | Tensor  # of the owner, of a group a tensor; -1: none is needed
    need: list[bool]  # Need, and what has a main_grad, as Owner.owned; empty: there is no backward


class _Backward(NamedTuple):
    """The arguments of a backward."""

    dout: Tensor
    saved: list[Tensor]
    how: str
    sizes: Sequence[int]
    key: int | Tensor
    need: list[bool]
    widths: list[int]  # E, H, I
    dtypes: str  # of the weights: gate_up, down and, where gate_up is the gate alone, up
    slots: int  # 0: rows that came grouped
    scaling: float  # of a Lora; 0: there is none


def _read(how: str) -> tuple[str, Options]:
    """What moves the tokens, and the options."""
    _, kind, preactivation, transposed, word, *words = how.split()
    recipe = Fp8Recipe.of_word(*words) if words else None
    return kind, Options(recipe, preactivation, transposed, Activation.of_word(word))


def _move_of(kind: str, plan: Tensor | None, sizes: Sequence[int], owner: Owner | None) -> Move:
    if kind == "group":
        assert owner is not None
        return owner._move
    if kind == "tokens":
        return Local(sizes[2], None if sizes[4] == sizes[0] * sizes[1] else sizes[4])
    assert plan is not None
    return Grouped(RoutingPlan(plan, *sizes) if kind == "plan" else plan)


def _weights_of(codes: Sequence[Tensor], options: Options) -> Fp8Weights | None:
    if not codes:
        return None
    pow2 = options.recipe.scale == "pow2"
    parts: list[Any] = [
        Fp8Tensor(data, scale, "block", pow2, "e4m3", check=False) if data.ndim == 3 else None
        for data, scale in zip(codes[::2], codes[1::2], strict=True)
    ]
    return Fp8Weights(*parts)


def _forward_of(*arguments: Any) -> list[Tensor]:
    of = _Forward(*arguments)
    (kind, options), number = _read(of.how), int(of.key)
    owner = owners[number] if number >= 0 else None
    move = _move_of(kind, of.plan, of.sizes, owner)
    out, saved, route = block.forward(
        *(of.x, of.topk_idx, of.probs, of.gate_up, of.down, options, move),
        _weights_of(of.codes, options),
        Need(*of.need[:_NEED]) if of.need else None,
        owner._counters if owner is not None and of.need else None,
        Lora(tuple(of.lora), of.scaling) if of.lora else None,
        Biases(*of.biases) if of.biases else None,
        of.up,
    )
    if not of.need:
        return [out]
    tensors = saved.tensors()
    if kind == "group":
        own: Any = move
        tensors = own.owned(saved, options.recipe).tensors() + own.route_tensors(route)
    return [out, *_owned(tensors, of)]


def _fake(*arguments: Any) -> list[Tensor]:
    """Makes the shapes alone. Rows from a group without a rank capacity have unknown sizes."""
    of = _Forward(*arguments)
    out = of.x.new_empty(of.x.shape)
    if not of.need:
        return [out]
    (kind, options), route = _read(of.how), []
    buffer: Any = of.plan
    size: Any = None
    sent: Sequence[Any] = ()
    if kind == "group":
        sent, of = of.sizes[:7], of._replace(sizes=of.sizes[7:])
    if not of.sizes:
        slots = 0 if of.topk_idx is None else of.topk_idx.shape[1]
        # Each must be a size of an output. Where no rows are kept, the plan's is all that is known.
        rows, size = (_new_size(), None) if _keeps_x(of.need, options) else (0, _new_size())
        of = of._replace(sizes=[rows, slots, of.gate_up.shape[0], 1, _new_size()])
    if kind != "plan":
        size = buffer_words(*of.sizes) if size is None else size
        buffer = of.x.new_empty(size, dtype=torch.int32)
    like: Any = _fake_bf16 if options.recipe is None else _fake_fp8
    saved = like(of, buffer, options, kind)
    if sent:  # as GroupMove.owned and route_tensors
        *plan, row_bytes, words = sent
        if saved.x is not None:
            saved = saved._replace(x=of.x.new_empty(of.sizes[0], row_bytes, dtype=torch.uint8))
        if options.recipe is None:
            saved = saved._replace(probs=None)
        route = [of.x.new_empty(buffer_words(*plan), dtype=torch.int32)]
        route += [torch.empty(words, dtype=torch.int64, device="cpu")] if words else []
    return [out, *_owned([*saved.tensors(), *route], of)]


def _new_size() -> Any:
    """A size that the routing decides. Without fullgraph=True torch raises and breaks the graph."""
    try:
        return torch.library.get_ctx().new_dynamic_size()
    except Exception:
        slow_path(
            "graph break",
            "[MoEExperts] torch.compile breaks the graph at the experts of a group with exact "
            "sizes: pass fullgraph=True",
        )
        raise


def _keeps_x(need: Sequence[bool], options: Options) -> bool:
    """Whether a backward reads the rows of x, or, without a recipe, where they went."""
    of_fp8 = options.preactivation == "recompute" or need[2] or need[4]
    return options.recipe is None or of_fp8


def _fake_fp8(of: _Forward, buffer: Tensor, options: Options, kind: str) -> fp8.Saved:
    """fp8.forward's Saved."""
    x, probs, gate_up, down, sizes, need = of.x, of.probs, of.gate_up, of.down, of.sizes, of.need
    given = _weights_of(of.codes, options)

    def codes(shape: Sequence[int], layout: str) -> Fp8Tensor:
        data = x.new_empty(shape, dtype=torch.float8_e4m3fn)
        scales = x.new_empty(scale_shape(tuple(shape), layout), dtype=torch.float32)
        return Fp8Tensor(data, scales, layout, options.recipe.scale == "pow2", "e4m3", check=False)

    grouped = kind in ("counts", "plan")
    rows = x.shape[0] if grouped else sizes[4]
    (experts, double, hidden), inner = gate_up.shape, down.shape[2]
    if of.up is not None:
        double = 2 * double
    again = options.preactivation == "recompute"
    z: Any = None
    if not again:
        z_is_fp8 = options.preactivation == "save_fp8"
        z_of = (rows, double)
        z = codes(z_of, "row") if z_is_fp8 else x.new_empty(z_of, dtype=torch.bfloat16)
    row_probs = probs if grouped else x.new_empty(rows, dtype=torch.float32)
    source: tuple[Any, Any] = (gate_up, down)
    gate_up_t = down_t = None
    if given is not None:
        source, gate_up_t, down_t = (given.gate_up, given.down), given.gate_up_t, given.down_t
    elif options.transposed_weights == "save":
        source = codes((experts, double, hidden), "block"), codes(down.shape, "block")
        gate_up_t = codes((experts, hidden, double), "block") if need[0] else None
        down_t = codes((experts, inner, hidden), "block")
    gate_up_t = gate_up_t if need[0] else None
    return fp8.Saved(
        RoutingPlan(buffer, *sizes),
        codes((sizes[0], hidden), "gemm" if grouped else "row")
        if _keeps_x(need, options)
        else None,
        row_probs,
        z,
        source[0] if again or (need[0] and gate_up_t is None) else None,
        source[1] if down_t is None else None,
        gate_up_t,
        down_t,
        Biases(*of.biases) if of.biases else None,
        _fake_lora(of, None if again else codes((rows, inner), "gemm"), rows),
    )


def _fake_lora(of: _Forward, h: Fp8Tensor | None, rows: Any) -> LoraSaved | None:
    if not of.lora:
        return None
    u1, u2 = (
        of.x.new_empty(rows, of.lora[0].shape[1], dtype=torch.bfloat16) if of.need[4] else None
        for _ in range(2)
    )
    return LoraSaved(tuple(of.lora), h if of.need[4] else None, u1, u2)


def _fake_bf16(of: _Forward, buffer: Tensor, options: Options, kind: str) -> bf16.Saved:
    """bf16.forward's Saved."""
    x, probs, gate_up, down = of.x, of.probs, of.gate_up, of.down
    tokens, slots, experts, align, assignments = of.sizes
    grouped = kind in ("counts", "plan")
    rows = x.shape[0] if grouped else assignments
    order = row_of = padding = z = None
    if not grouped:
        order = x.new_empty(rows, dtype=torch.int64)
        row_of = x.new_empty(tokens, slots, dtype=torch.int64)
    if options.preactivation != "recompute":
        z = x.new_empty(rows, gate_up.shape[1], dtype=torch.bfloat16)
    x = x.bfloat16()
    if kind == "plan" and align > 1:
        padding, x = x.new_empty(rows, dtype=torch.bool), torch.empty_like(x)
        probs = None if probs is None else torch.empty_like(probs)
    offsets = x.new_empty(experts, dtype=torch.int32)
    return bf16.Saved(offsets, order, row_of, padding, x, z, probs, gate_up, down, *of.biases)


_ABSENT, _AN_INPUT = (0,) * 4, (0,) * 5  # the shapes that stand for a saved tensor


def _owned(tensors: Sequence[Tensor | None], of: _Forward) -> list[Tensor]:
    """An operator's outputs are tensors of their own: empty ones stand for None and for inputs."""
    inputs = (of.x, of.probs, of.plan, of.gate_up, of.down, *of.codes, *of.biases, *of.lora)
    return [
        of.x.new_empty(_ABSENT)
        if t is None
        else (of.x.new_empty(_AN_INPUT) if any(t is given for given in inputs) else t)
        for t in tensors
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    of = _Forward(*inputs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    biases = of.biases or (None, None)
    by_place: list[Tensor | None]  # inputs, where the body saves them
    if _read(of.how)[1].recipe is None:
        by_place = [None, None, None, None, of.x, None, of.probs, of.gate_up, of.down, *biases]
    else:
        weights: Any = of.codes or [of.gate_up, None, of.down, *[None] * 5]
        by_place = [of.plan, of.probs, *[None] * 4, *weights, *biases, *of.lora]
    saved = [by_place[n] if t.ndim == len(_AN_INPUT) else t for n, t in enumerate(output[1:])]
    ctx.key = None if isinstance(of.key, Tensor) else of.key
    ctx.save_for_backward(*saved, *([of.key] if ctx.key is None else []))
    slots = 0 if of.topk_idx is None else of.topk_idx.shape[1]
    ctx.codes, ctx.biases, ctx.lora = len(of.codes), len(of.biases), len(of.lora)
    ctx.how, ctx.need, ctx.scaling = (of.how, of.sizes), of.need, of.scaling
    dtypes = " ".join(str(w.dtype) for w in (of.gate_up, of.down, of.up) if w is not None)
    ctx.shapes = [*of.down.shape], dtypes, slots


def _backward(op: Any, ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    none = (None,) * 5
    dout = grads[0]
    if dout is None:
        lists = ctx.codes, ctx.biases, ctx.lora
        return *(None,) * 7, *([None] * n for n in lists), *none
    if torch.is_grad_enabled() and not compiling():
        raise RuntimeError("[experts] has no second derivative; got create_graph=True")
    saved = list(ctx.saved_tensors)
    key = ctx.key if ctx.key is not None else saved.pop()
    made = op(dout.contiguous(), saved, *ctx.how, key, ctx.need, *ctx.shapes, ctx.scaling)
    dx, dprobs, *grads = (None if t.ndim == len(_ABSENT) else t for t in made)
    lists = [None] * ctx.codes, grads[3 : 3 + ctx.biases], grads[5:]
    return dx, None, dprobs, None, *grads[:3], *lists, *none


def _backward_of(*arguments: Any) -> list[Tensor]:
    dout, saved, how, sizes, key, need, widths, dtypes, slots, scaling = _Backward(*arguments)
    (kind, options), owner = _read(how), owners.get(int(key))
    asked = Need(*need[:_NEED])
    there = [None if t.ndim == len(_ABSENT) else t for t in saved]
    tensors = [t if t is None or is_turned(t) else t.contiguous() for t in there]
    body, route = block.body_of(options.recipe), None
    count = body.SAVED_TENSORS + (LORA_TENSORS if scaling else 0)
    if kind == "group":
        move: Any = owner._move  # type: ignore[union-attr]
        route = move.route_of(
            tensors[count:], dout.shape[0], widths[1], slots, options.recipe, asked
        )
        sizes = move.sizes_of(route)
    else:
        move = _move_of(kind, saved[0], sizes, owner)
    read = body.Saved.of(tensors[:count], sizes, options.recipe, kind in ("counts", "plan"))
    if kind == "group":
        read = move.viewed(read, widths[1], slots, options.recipe)
    experts, hidden, width = widths
    double = options.activation.parts * width
    shapes = [torch.Size((experts, double, hidden)), torch.Size((experts, hidden, width))]
    of, up = _dtypes(dtypes)
    for t in tensors[body.SAVED_TENSORS - 2 : body.SAVED_TENSORS]:
        if t is not None:
            of, shapes = [*of, t.dtype], [*shapes, t.shape]
    own: tuple[Any, ...] = (None,) * len(of)
    average = counters = low_rank = None
    if owner is not None:
        own, average, low_rank = owner.owned(), owner._average, owner._lora_average
        counters = owner._counters
    in_place = need[_NEED:]
    if any(
        into and getattr(w, "main_grad", None) is None
        for w, into in zip(own, in_place, strict=True)
    ):
        raise RuntimeError(
            "[MoEExperts] main_grad must stay from a compiled forward to its backward; got none"
        )
    to = [
        Destination(weight, dtype, shape, average, returned=not into)
        for weight, dtype, shape, into in zip(own, of, shapes, in_place, strict=True)
    ]
    del there, tensors
    grads = WeightGrads(to[0], to[1], None, up, to[2:])
    dx, dprobs, weights = block.backward(
        dout, read, route, options, move, grads, counters, asked, scaling
    )
    weights[5:] = averaged(weights[5:], low_rank)
    made = (dx, dprobs, *weights)  # dprobs of a group is a part of longer rows
    return [dout.new_empty(_ABSENT) if t is None else t.contiguous() for t in made]


def _dtypes(words: str) -> tuple[list[torch.dtype], torch.dtype | None]:
    """The dtypes of gate_up's and down's gradients, and of up's. torch 2.11's graphs would pass
    dtypes as numbers."""
    of = [getattr(torch, word.removeprefix("torch.")) for word in words.split()]
    return of[:2], of[2] if len(of) > 2 else None


def _fake_backward(*arguments: Any) -> list[Tensor]:
    given = _Backward(*arguments)
    dout, need, slots, (experts, hidden, width) = given.dout, given.need, given.slots, given.widths
    tokens, (of, up) = dout.shape[0], _dtypes(given.dtypes)
    options = _read(given.how)[1]
    parts = 1 if up is not None else options.activation.parts
    shapes: Any = (
        ((tokens, hidden), dout.dtype),
        ((tokens, slots) if slots else (tokens,), torch.float32),
        ((experts, parts * width, hidden), of[0]),
        ((experts, hidden, width), of[1]),
        ((experts, width, hidden), up),
    )
    in_place = [*need[_NEED:], False, False]  # two for biases, where there are none
    returned = [*need[:2], need[2] and not in_place[0], need[3] and not in_place[1]]
    returned.append(need[2] and up is not None)
    made = [
        dout.new_empty(shape, dtype=dtype) if wanted else dout.new_empty(_ABSENT)
        for (shape, dtype), wanted in zip(shapes, returned, strict=True)
    ]
    body = block.body_of(options.recipe)
    biases = given.saved[body.SAVED_TENSORS - 2 : body.SAVED_TENSORS]
    made += [
        dout.new_empty(t.shape, dtype=t.dtype) if need[5] and not there else dout.new_empty(_ABSENT)
        for t, there in zip(biases, in_place[2:4], strict=True)
    ]
    if given.scaling:
        factors = given.saved[fp8.SAVED_TENSORS :][:4]
        made += [t.new_empty(t.shape) if need[4] else t.new_empty(_ABSENT) for t in factors]
    return made


def _flops(*shapes: Any, **_: Any) -> int:
    """Counts two GEMMs of 2 A N K each; the arguments are shapes."""
    of: Any = _Forward(*shapes)
    assignments = of.x[0] if of.topk_idx is None else of.x[0] * of.topk_idx[1]
    double = of.gate_up[1] if of.up is None else 2 * of.gate_up[1]
    flops: int = 2 * assignments * (double * of.gate_up[2] + of.down[1] * of.down[2])
    return flops


def _flops_backward(*shapes: Any, **_: Any) -> int:
    of: Any = _Backward(*shapes)
    options, need = _read(of.how)[1], of.need
    again, parts = options.preactivation == "recompute", options.activation.parts
    gemms = 1 + parts * (need[0] + need[2] + again) + need[3]
    flops: int = 2 * of.dout[0] * max(of.slots, 1) * of.widths[1] * of.widths[2] * gemms
    return flops


def _define(name: str, key: str, *tags: torch.Tag) -> None:
    backward = torch.library.custom_op(
        f"fp8moe::{name}_backward",
        _backward_of,
        mutates_args=(),
        schema=_BACKWARD.format(key),
        tags=tags,
    )
    backward.register_fake(_fake_backward)
    forward = torch.library.custom_op(
        f"fp8moe::{name}", _forward_of, mutates_args=(), schema=_FORWARD.format(key), tags=tags
    )
    forward.register_fake(_fake)
    op = getattr(torch.ops.fp8moe, f"{name}_backward")
    forward.register_autograd(functools.partial(_backward, op), setup_context=_setup)
    register_flop_formula(getattr(torch.ops.fp8moe, name))(_flops)
    register_flop_formula(op)(_flops_backward)


_define("experts", "int")
_define("group_experts", "Tensor", torch.Tag.cudagraph_unsafe)
