"""What FP8 costs a layer, counted where the data is: on the device, without a host sync.

    with telemetry.watch(model) as seen:       # every MoEExperts in it
        loss(model(batch)).backward()
    print(seen.report())                       # the only wait for the device

Counted by ops.count_codes: for each quantized operand (x, h, dout, dz) the share of codes 0 in
1x128 tiles that hold another code: values that underflowed (or were 0 to begin with). For each
operand the layer transposes in FP8 (x, dout): the share of nonzero codes the shifts flush to 0, and
the histogram of the shifts k (new code = RN(old * 2^-k)) over its tiles. Counters live at fixed
addresses and are only added to, so that watching can be captured in a CUDA graph: replays count.

What it costs: six small kernels a layer and step. They read the codes of every `every`-th row, T
rows of x and of dout twice and R of h and dz once: (4 T H + 3 R I) / every bytes; at the default of
8 that is 0.3% of the bytes a layer moves without its GEMMs.

`snr` compares each GEMM of a layer with the same GEMM in bfloat16 over operands never quantized.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd import bf16, fp8, quantize_weights
from fp8moe_cutlass.autograd.experts import quantize
from fp8moe_cutlass.nn import MoEExperts
from fp8moe_cutlass.ops.count_codes import COUNTS
from fp8moe_cutlass.routing import RoutingPlan

OPERANDS = ("x", "h", "dout", "dz")
TRANSPOSES = ("x columns", "dout columns")
EVERY = 8  # rows: one in so many is looked at

Report = dict[str, Any]


class Counters:
    """The observer of one MoEExperts: a row of ops.count_codes' counters for each of OPERANDS and
    TRANSPOSES, over every `every`-th row."""

    def __init__(self, device: torch.device, every: int = EVERY) -> None:
        if every < 1:
            raise ValueError(f"[telemetry] every must be at least 1; got {every}")
        names = OPERANDS + TRANSPOSES
        self.counts = torch.zeros(len(names), COUNTS, dtype=torch.int64, device=device)
        self.of = dict(zip(names, self.counts, strict=True))
        self.every = every

    @torch.no_grad()
    def __call__(self, name: str, value: Any, plan: RoutingPlan, source: Any) -> None:
        if name in OPERANDS:
            ops.count_codes(value, plan, self.of[name], stride=self.every)
        elif name in TRANSPOSES and source.pow2 and value.pow2:
            ops.count_codes(source, plan, self.of[name], columns=value, stride=self.every)

    def report(self) -> Report:
        """Shares and counts as plain numbers; waits for the device."""
        words = dict(zip(self.of, self.counts.tolist(), strict=True))
        transposes: Report = {}
        for name in TRANSPOSES:
            _, _, moved, flushed, *shifts = words[name]
            transposes[name] = {"underflowed": flushed / max(moved, 1), "shifts": shifts}
        underflowed = {name: words[name][1] / max(words[name][0], 1) for name in OPERANDS}
        return {"underflowed": underflowed, "transposes": transposes}

    def reset(self) -> None:
        """Start counting from zero, in place."""
        self.counts.zero_()


class Watch:
    """The counters of every watched layer, by its name in the module."""

    def __init__(self, layers: dict[str, MoEExperts], every: int = EVERY) -> None:
        self.layers = layers
        self.counters = {n: Counters(m.gate_up_proj.device, every) for n, m in layers.items()}

    def report(self) -> dict[str, Report]:
        """Counters.report of each layer; waits for the device."""
        return {name: counters.report() for name, counters in self.counters.items()}

    def reset(self) -> None:
        """Start counting from zero, in place: a captured graph counts on."""
        for counters in self.counters.values():
            counters.reset()


def enable(module: nn.Module, every: int = EVERY) -> Watch:
    """Count in every FP8 MoEExperts of `module`, on the device its parameters are on now, until
    `disable`. Not in steps through integrations.deepep, which nothing watches. Raises ValueError if
    there is none, or `every` is below 1."""
    seen = Watch(fp8_layers(module), every)
    for name, layer in seen.layers.items():
        layer.observer = seen.counters[name]
    return seen


def fp8_layers(module: nn.Module) -> dict[str, MoEExperts]:
    """The FP8 MoEExperts of `module` by their names in it; ValueError if there is none."""
    layers = {
        name: m
        for name, m in module.named_modules()
        if isinstance(m, MoEExperts) and m.recipe is not None
    }
    if not layers:
        raise ValueError(
            f"[telemetry] module must contain an FP8 MoEExperts; got {type(module).__name__}"
        )
    return layers


def disable(module: nn.Module) -> None:
    """Stop counting in `module`."""
    for m in module.modules():
        if isinstance(m, MoEExperts):
            m.observer = None


@contextmanager
def watch(module: nn.Module, every: int = EVERY) -> Iterator[Watch]:
    """`enable` for a scope."""
    try:
        yield enable(module, every)
    finally:
        disable(module)


class Tape:
    """What came into every FP8 MoEExperts of a module in its last training forward, and the
    gradient of what went out: what `snr` needs."""

    def __init__(self, layers: dict[str, MoEExperts]) -> None:
        self.layers = layers
        self.inputs: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # x, topk_idx, topk_weights
        self.douts: dict[str, Tensor] = {}

    def snr(self, tokens: int = 2048) -> dict[str, dict[str, float]]:
        """`snr` of each layer over the first `tokens` tokens it saw; waits for the device."""
        found = {}
        for name, dout in self.douts.items():
            x, topk_idx, topk_weights = (t.flatten(0, -2)[:tokens] for t in self.inputs[name])
            dout = dout.flatten(0, -2)[:tokens].to(x.dtype)
            found[name] = snr(self.layers[name], x, topk_idx, topk_weights, dout)
        return found

    def _look(self, name: str, given: dict[str, Any], out: Tensor) -> None:
        if not out.requires_grad:
            return
        x, topk_idx, topk_weights = (given[n] for n in ("x", "topk_idx", "topk_weights"))
        # In the dtype the layer computed in, which under autocast is not x's.
        self.inputs[name] = x.detach().to(out.dtype), topk_idx, topk_weights.detach()
        hook = partial(self.douts.__setitem__, name)
        out.register_hook(hook)  # type: ignore[no-untyped-call]


@contextmanager
def tape(module: nn.Module) -> Iterator[Tape]:
    """Record what `snr` needs of every FP8 MoEExperts in `module`, for a scope."""
    tape = Tape(fp8_layers(module))
    arguments = inspect.signature(MoEExperts.forward)

    def looker(name: str) -> Any:
        def look(layer: Any, args: Any, kwargs: Any, out: Tensor) -> None:
            tape._look(name, arguments.bind(layer, *args, **kwargs).arguments, out)

        return look

    hooks = [
        layer.register_forward_hook(looker(name), with_kwargs=True)
        for name, layer in tape.layers.items()
    ]
    try:
        yield tape
    finally:
        for hook in hooks:
            hook.remove()


# ---- GEMMs against bfloat16 ---------------------------------------------------------------------


@torch.no_grad()
def snr(
    layer: MoEExperts, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, dout: Tensor
) -> dict[str, float]:
    """Signal to noise of each GEMM of an FP8 `layer`, dB: 10 log10(|D|^2 / |D_fp8 - D|^2).

    D is the GEMM in bfloat16 over what its operands were before quantization: x [T, H] and dout
    [T, H], bf16 h and dz made from the FP8 flow's z and dh, and the parameters. topk_idx [T, S],
    topk_weights [T, S]. Gradients are left alone. Waits for the device.
    """
    recipe = layer.recipe
    if recipe is None:
        raise ValueError("[telemetry.snr] layer must have an FP8 recipe; got recipe=None")
    if layer.group is not None:
        raise ValueError("[telemetry.snr] layer must hold all experts; got one with a group")
    seen: dict[str, Any] = {}

    def keep(name: str, value: Any, plan: RoutingPlan, source: Any) -> None:
        seen[name] = value

    probs = topk_weights.float().contiguous()
    plan = ops.route(layer.num_experts, topk_idx=topk_idx.contiguous())
    x_q = quantize(x, recipe)
    dout_q = quantize(dout, recipe, recipe.grad_dtype)
    weights = quantize_weights(layer.gate_up_proj, layer.down_proj, recipe)
    _, saved = fp8.forward(x_q, probs, plan, weights, recipe, keep="bf16", observe=keep)
    grads = fp8.backward(dout_q, saved, plan, weights, recipe, observe=keep)
    assert grads.gate_up is not None
    assert grads.down is not None

    defined = _defined_rows(plan)[:, None]
    token = _tokens(plan)
    gate_up, down = layer.gate_up_proj.bfloat16(), layer.down_proj.bfloat16()
    # Rows past the last expert's hold anything, NaN as well: a masked copy, not a product with 0.
    z, dh = (seen[name].masked_fill(~defined, 0.0) for name in ("z", "dh"))
    row_probs = saved.row_probs.masked_fill(~defined[:, 0], 0.0)
    x_rows = x.bfloat16()[token].masked_fill(~defined, 0.0)
    dy = dout.bfloat16()[token].masked_fill(~defined, 0.0)
    dz, _, h = bf16.swiglu_backward(dh, z, row_probs)
    ends = plan.row_offsets[1:].contiguous()
    pairs = {
        "fprop-1": (z, bf16.grouped_mm(x_rows, gate_up.mT, ends)),
        "fprop-2": (seen["y"], bf16.grouped_mm(h, down.mT, ends)),
        "dgrad-2": (dh, bf16.grouped_mm(dy, down, ends)),
        "dgrad-1": (seen["dx rows"], bf16.grouped_mm(dz, gate_up, ends)),
        "wgrad-1": (
            grads.gate_up.run(None, False, "float32"),
            bf16.grouped_mm(dz.mT, x_rows, ends),
        ),
        "wgrad-2": (grads.down.run(None, False, "float32"), bf16.grouped_mm(dy.mT, h, ends)),
    }
    found = {}
    for name, (got, want) in pairs.items():
        if got.ndim == 2:
            got, want = (t.masked_fill(~defined, 0.0) for t in (got, want))
        noise = (got.double() - want.double()).square().sum()
        found[name] = 10.0 * torch.log10(want.double().square().sum() / noise)
    return {name: float(value) for name, value in found.items()}


def _defined_rows(plan: RoutingPlan) -> Tensor:
    """[R] bool: rows that carry an assignment."""
    rows = torch.arange(plan.rows, device=plan.device)
    defined: Tensor = (rows < plan.row_offsets[-1]) & (plan.token_of_row >= 0)
    return defined


def _tokens(plan: RoutingPlan) -> Tensor:
    """[R] i64: the token of each row; any token where the row is undefined."""
    tokens: Tensor = plan.token_of_row.long().clamp(0, max(plan.tokens - 1, 0))
    return tokens
