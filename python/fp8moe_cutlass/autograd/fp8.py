"""The expert block in FP8, forward and backward, as plain functions over FP8 tensors.

Two standalone casts exist, by `enter`: x before `forward`, the gradient of the output before
`backward`. Everything between stays in FP8 or is quantized by the activation's kernels.

Rows come as tokens, in row layout, which a plan of `make_plan` takes to their experts; or grouped
by expert already, in GEMM layout, with a plan of ops.plan_from_counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd import biases as bias_terms
from fp8moe_cutlass.autograd.arguments import as_counts
from fp8moe_cutlass.autograd.bf16 import expert_of, plus, plus_weighted
from fp8moe_cutlass.autograd.body import (
    Biases,
    Counters,
    ForwardWeights,
    Gradients,
    Lora,
    Need,
    Options,
    by_slot,
)
from fp8moe_cutlass.autograd.fp8_wgrad import Wgrad, count, turn
from fp8moe_cutlass.autograd.low_rank import DOWN, GATE_UP, NONE, LoraSaved, Terms, saved_of
from fp8moe_cutlass.autograd.streams import now_on
from fp8moe_cutlass.autograd.weights import Fp8Weights, quantize_weight, transpose
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor

SAVED_TENSORS = 16  # of Saved.tensors(), without a Lora's
ROWS_APART = (2, 3)  # of these, the codes and scales of x, which may be parts of longer rows


class Saved(NamedTuple):
    """The tensors that the backward reads of the forward; None: it makes them again or has no
    need of them."""

    plan: RoutingPlan
    x: Fp8Tensor | None  # [T, H], row layout, or [R, H] grouped
    row_probs: Tensor | None  # [R] f32
    z: Tensor | Fp8Tensor | None  # [R, 2I]
    gate_up: Fp8Tensor | Tensor | None  # codes as fprop reads them, or the parameter
    down: Fp8Tensor | Tensor | None
    gate_up_t: Fp8Tensor | None
    down_t: Fp8Tensor | None
    biases: Biases | None = None
    lora: LoraSaved | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the plan."""
        return self.plan.sizes

    def tensors(self) -> list[Tensor | None]:
        """The plan's buffer, row_probs, and two for each of the others: codes and scales, or a
        tensor and None; both biases."""
        found: list[Tensor | None] = [self.plan.buffer, self.row_probs]
        for part in (self.x, self.z, self.gate_up, self.down, self.gate_up_t, self.down_t):
            if isinstance(part, Fp8Tensor):
                found += part.data, part.scale_inv
            else:
                found += part, None
        found += self.biases or (None, None)
        if self.lora is not None:
            found += self.lora.tensors()
        return found

    @staticmethod
    def of(
        tensors: Sequence[Tensor | None], sizes: Sequence[int], recipe: Fp8Recipe, grouped: bool
    ) -> Saved:
        """The same again: sizes are the plan's."""
        buffer, row_probs, *pairs = tensors[: SAVED_TENSORS - 2]
        biases: Any = tensors[SAVED_TENSORS - 2 : SAVED_TENSORS]
        layouts = ("gemm" if grouped else "row", "row", "block", "block", "block", "block")
        pow2 = recipe.scale == "pow2"
        parts: list[Any] = [
            Fp8Tensor(data, scale, layout, pow2, "e4m3", check=False) if scale is not None else data
            for data, scale, layout in zip(pairs[::2], pairs[1::2], layouts, strict=True)
        ]
        lora = LoraSaved.of(tensors[SAVED_TENSORS:], pow2) if tensors[SAVED_TENSORS:] else None
        saved = Saved(RoutingPlan(buffer, *sizes), parts[0], row_probs, *parts[1:])
        return saved._replace(biases=None if biases[0] is None else Biases(*biases), lora=lora)


def enter(t: Tensor, recipe: Fp8Recipe, *, gradient: bool = False, grouped: bool = False) -> Any:
    """A standalone cast of the block: t [T, H], or [R, H] grouped by expert."""
    return ops.quantize(
        t.contiguous(),
        fp8_dtype=recipe.grad_dtype if gradient else "e4m3",
        scale=recipe.scale,
        eps=recipe.eps,
        scale_layout="gemm" if grouped else "row",
    )


def make_plan(topk_idx: Tensor, num_experts: int, capacity: int | None = None) -> RoutingPlan:
    """The plan of topk_idx [T, S], of capacity assignments; None: of all."""
    plan: RoutingPlan = ops.route(num_experts, topk_idx=topk_idx, capacity=capacity)
    return plan


def grouped_plan(counts: Tensor | Sequence[int] | RoutingPlan, rows: Tensor) -> RoutingPlan:
    """The plan of rows [R, H] that came grouped, from Grouped's counts."""
    if isinstance(counts, RoutingPlan):
        return counts
    counts = now_on(rows.device, as_counts("grouped_plan", counts).int())
    plan: RoutingPlan = ops.plan_from_counts(counts, capacity=rows.shape[0])
    return plan


def dropped(topk_idx: Tensor, plan: RoutingPlan) -> Tensor:
    """[1] how many entries found no place in the plan's capacity."""
    counted: Tensor = plan.status[:1]
    return counted


def weights(
    gate_up: Tensor,
    down: Tensor,
    given: Fp8Weights | None,
    options: Options,
    need: Need | None,
    up: Tensor | None = None,
) -> ForwardWeights:
    """The FP8 weights of a forward, those given or the parameters quantized now, in as many
    directions as a backward will read; need None: there is none. up: gate_up is the gate alone."""
    if given is not None:
        given.wait()
        return ForwardWeights(given, (given.gate_up, given.down))
    recipe, codes = options.recipe, need is not None and options.transposed_weights == "save"
    both = codes and need is not None and need.x
    gate_up_q, gate_up_t = quantize_weight(gate_up, recipe, transposed=both, below=up)
    down_q, down_t = quantize_weight(down, recipe, transposed=codes)
    made = Fp8Weights(gate_up_q, down_q, gate_up_t, down_t)
    return ForwardWeights(made, (gate_up_q, down_q) if codes else (gate_up, down))


def forward(
    x: Fp8Tensor,
    probs: Tensor | None,
    plan: RoutingPlan,
    weights: ForwardWeights,
    options: Options,
    need: Need | None,
    counters: Counters | None = None,
    into: Tensor | None = None,
    lora: Lora | None = None,
    biases: Biases | None = None,
) -> tuple[Tensor, Saved | None]:
    """out[t] = sum over slots of down_e (act(z) * prob), z = gate_up_e x[t]; or of
    prob * down_e act(z), by the recipe's weighting.

    x [T, H] and probs [T, S] f32 -> out [T, H] bf16; grouped: x [R, H] and probs [R] f32 or None
    -> out [R, H]. And what `backward` reads, if there is a `need`. into: where to write out, unless
    grouped. lora, biases: what both projections have beside their weights. A GEMM has place for
    one of them: beside a LoRA, biases are added to what it has rounded.
    """
    recipe, multiplied = options.recipe, weights.multiplied
    grouped = x.scale_layout == "gemm"  # rows [R, H] by expert; else a row per token
    rows, row_probs = (x, probs) if grouped else ops.permute_pad(x, plan, probs=probs)
    last = recipe.weighting == "output"
    terms = None if lora is None else Terms(lora, recipe)
    u1, pair = NONE if terms is None else terms.forward(GATE_UP, x, plan)
    inside, behind = (biases, None) if terms is None else (None, biases)
    if inside is not None:
        pair = bias_terms.pair(inside.gate_up, plan)
    z = ops.grouped_gemm(rows, multiplied.gate_up, plan, **pair)
    if behind is not None:
        z = _plus(z, behind.gate_up, plan)
    save_z: Any = need is not None and options.preactivation == "save_fp8"
    made = hidden(z, plan, row_probs, options, save_z)
    h, z = made if isinstance(made, tuple) else (made, z)
    u2, pair = NONE if terms is None else terms.forward(DOWN, h, plan)
    if inside is not None:
        pair = bias_terms.pair(inside.down, plan, None if last else row_probs)
    y = ops.grouped_gemm(h, multiplied.down, plan, **pair)
    if behind is not None:
        y = _plus(y, behind.down, plan, None if last else row_probs)
    if not grouped:
        out = ops.unpermute_unpad(y, plan, probs if last else None, out=into)
    else:
        out = weighted(y, row_probs) if last else y
    if need is None:
        return out, None
    if counters is not None:
        count(counters, "x", x, plan)
        count(counters, "h", h, plan)
    again = options.preactivation == "recompute"
    gate_up_t = multiplied.gate_up_t if need.x else None
    needs_gate_up = again or (need.x and gate_up_t is None)
    return out, Saved(
        plan,
        x if again or need.gate_up or need.lora else None,
        row_probs,
        None if again else z,
        weights.source[0] if needs_gate_up else None,
        weights.source[1] if multiplied.down_t is None else None,
        gate_up_t,
        multiplied.down_t,
        biases,
        None if lora is None else saved_of(lora, need, None if again else h, u1, u2),
    )


def turn_x(saved: Saved, options: Options, counters: Counters | None) -> Fp8Tensor:
    """What backward reads of x alone, for gate_up's gradient."""
    x: Any = saved.x
    return turn("x", x, saved.plan, options.recipe, counters)


def backward(
    dout: Fp8Tensor,
    saved: Saved,
    options: Options,
    need: Need,
    counters: Counters | None = None,
    into: tuple[Tensor, Tensor | None] | None = None,
    scaling: float = 0.0,
    x_turned: Fp8Tensor | None = None,
) -> Gradients:
    """The gradients of `forward`, given the quantized gradient of its output, of x's form. into:
    where to write dx and, if asked for, dprobs, unless grouped. scaling: of the low-rank terms that
    were saved. x_turned: turn_x."""
    recipe = options.recipe
    x: Any
    gate_up: Any
    down: Any
    plan, x, row_probs, z, gate_up, down, gate_up_t, down_t, biases, low = saved
    terms = None if low is None else Terms(Lora(low.factors, scaling), recipe)
    h = None if low is None else low.h
    grouped = dout.scale_layout == "gemm"
    dy = dout if grouped else ops.permute_pad(dout, plan)[0]
    du2, pair = NONE if terms is None else terms.backward(DOWN, dout, plan)
    dh = ops.grouped_gemm(dy, transpose(down, recipe) if down_t is None else down_t, plan, **pair)
    if z is None:
        if isinstance(gate_up, Tensor):
            gate_up, gate_up_t = quantize_weight(gate_up, recipe, transposed=need.x)
        _, pair = NONE if terms is None else terms.forward(GATE_UP, x, plan)
        if biases is not None and terms is None:
            pair = bias_terms.pair(biases.gate_up, plan)
        rows = x if grouped else ops.permute_pad(x, plan)[0]
        z = ops.grouped_gemm(rows, gate_up, plan, **pair)
        if biases is not None and terms is not None:
            z = _plus(z, biases.gate_up, plan)
        if need.lora:
            h = hidden(z, plan, row_probs, options)
        del rows
    elif isinstance(z, Fp8Tensor):
        z = ops.dequantize(z)
    wgrads = need.gate_up or need.down
    workspace = ops.zero_workspace(dout.data) if wgrads else None
    made: Any = ops.act_quantize_backward(
        dh,
        z,
        plan,
        probs=row_probs,
        activation=options.activation,
        columns=recipe.columns if wgrads else None,
        fp8_dtype=recipe.grad_dtype,
        scale=recipe.scale,
        eps=recipe.eps,
        workspace=workspace,
    )
    dz, dz_columns, h_columns, row_dprobs = made
    del dy, dh, z, made
    du1, pair = NONE
    if terms is not None and (need.x or need.lora):
        du1, pair = terms.backward(GATE_UP, dz, plan)
    if counters is not None:
        count(counters, "dout", dout, plan)
        count(counters, "dz", dz, plan)
    if biases is not None and need.probs and row_dprobs is not None:
        row_dprobs += bias_terms.dots(biases.down, dout, plan)
    dx, dprobs = None, row_dprobs if need.probs else None
    if need.x:
        gate_up_t = transpose(gate_up, recipe) if gate_up_t is None else gate_up_t
        dx = ops.grouped_gemm(dz, gate_up_t, plan, **pair)
        if not grouped:
            dx, dprobs = ops.permute_pad_backward(dx, plan, dprobs=dprobs, out=into)
    elif need.probs and not grouped:
        dprobs = by_slot(row_dprobs, plan.row_of.long())
    of_lora: list[Tensor | None] = []
    if terms is not None and low is not None and need.lora:
        u2 = low.u2
        if recipe.weighting == "output":  # dout and h are saved without their weight
            du2, u2 = weighted(du2, row_probs), weighted(u2, row_probs)
        of_lora = [
            terms.wgrad(GATE_UP, du1, x, plan),
            terms.wgrad(GATE_UP + 1, low.u1, dz, plan),
            terms.wgrad(DOWN, du2, h, plan),
            terms.wgrad(DOWN + 1, u2, dout, plan),
        ]
    of_biases: tuple[Tensor | None, Tensor | None] = (None, None)
    if biases is not None and need.biases:
        of_biases = (
            bias_terms.sums(biases.gate_up, dz, plan),
            bias_terms.sums(biases.down, dout, plan, row_probs),
        )
    return Gradients(
        dx,
        dprobs,
        Wgrad("x", x, dz_columns, plan, recipe, counters, x_turned) if need.gate_up else None,
        Wgrad("dout", dout, h_columns, plan, recipe, counters) if need.down else None,
        workspace,
        of_lora,
        of_biases,
    )


def _plus(y: Any, bias: Tensor, plan: RoutingPlan, weights: Tensor | None = None) -> Any:
    """y [R, N] + weights[row] * bias[e] of bias [E, N]; weights [R], None: 1."""
    expert = expert_of(plan.row_offsets[1:], y)
    return plus(y, bias, expert) if weights is None else plus_weighted(y, bias, expert, weights)


def hidden(
    z: Tensor, plan: RoutingPlan, row_probs: Tensor | None, options: Options, save_z: Any = False
) -> Any:
    """h of the forward; with save_z also Q(z)."""
    recipe = options.recipe
    return ops.act_quantize(
        z,
        plan,
        probs=None if recipe.weighting == "output" else row_probs,
        activation=options.activation,
        rounding=recipe.rounding,
        save_z=save_z,
        scale=recipe.scale,
        eps=recipe.eps if recipe.activation_eps is None else recipe.activation_eps,
    )


def weighted(rows: Any, row_probs: Tensor | None) -> Any:
    """rows [R, C] times row_probs [R] f32, rounded once."""
    if row_probs is None:
        return rows
    return torch.mul(rows, row_probs[:, None], out=torch.empty_like(rows))
