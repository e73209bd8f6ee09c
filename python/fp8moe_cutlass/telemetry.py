"""Counts what FP8 loses in a layer, on the device, without a host sync.

    with telemetry.watch(model) as seen:       # every MoEExperts in it
        loss(model(batch)).backward()
    print(seen.report())                       # the only wait for the device

Counted by ops.count_codes: for each quantized operand (x, h, dout, dz) the share of codes 0 in
1x128 tiles that hold another code: values that underflowed (or were 0 to begin with). For each
operand the layer transposes in FP8 (x, dout): the share of nonzero codes the shifts flush to 0, and
the histogram of the shifts k (new code = RN(old * 2^-k)) over its tiles. Counters live at fixed
addresses and are only added to, so that watching can be captured in a CUDA graph: replays count.
A compiled layer counts, too; run each backward before the next forward, or torch raises that the
counters were modified in place.

The cost is six small kernels per layer and step. They read the codes of every `every`-th row, T
rows of x and of dout twice and R of h and dz once: (4 T H + 3 R I) / every bytes; at the default of
8 that is 0.3% of the bytes a layer moves without its GEMMs.

`snr` compares each GEMM of a layer with the same GEMM in bfloat16 over operands never quantized.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd import Counters, bf16, fp8, quantize_weights
from fp8moe_cutlass.autograd.activation import backward_of, forward_of
from fp8moe_cutlass.autograd.body import COUNTED
from fp8moe_cutlass.autograd.fp8_wgrad import Wgrad
from fp8moe_cutlass.autograd.weights import is_codes
from fp8moe_cutlass.nn import MoEExperts
from fp8moe_cutlass.nn._validate import check_weights_alone
from fp8moe_cutlass.nn.expert_block import ExpertBlock, blocks_of
from fp8moe_cutlass.ops.quantize import COUNTS

__all__ = ["Watch", "disable", "enable", "snr", "watch"]

OPERANDS, TRANSPOSES = COUNTED[:4], COUNTED[4:]
EVERY = 8  # rows: one in so many is looked at

Report = dict[str, Any]


class Watch:
    """The counters of every watched layer, by its name in the module."""

    def __init__(self, layers: dict[str, ExpertBlock], every: int = EVERY) -> None:
        if every < 1:
            raise ValueError(f"[telemetry] every must be at least 1; got {every}")
        self.layers = layers
        self.counters: dict[str, Counters] = {}
        for name, layer in layers.items():
            device = layer.gate_up_proj.device
            counts = torch.zeros(len(COUNTED), COUNTS, dtype=torch.int64, device=device)
            self.counters[name] = Counters(counts, every)

    def report(self) -> dict[str, Report]:
        """Shares and counts of each layer as plain numbers; waits for the device."""
        return {name: _report(counters) for name, counters in self.counters.items()}

    def reset(self) -> None:
        """Start counting from zero, in place: a captured graph counts on."""
        for counters in self.counters.values():
            counters.counts.zero_()


def _report(counters: Counters) -> Report:
    words = dict(zip(COUNTED, counters.counts.tolist(), strict=True))
    transposes: Report = {}
    for name in TRANSPOSES:
        _, _, moved, flushed, *shifts = words[name]
        transposes[name] = {"underflowed": flushed / max(moved, 1), "shifts": shifts}
    underflowed = {name: words[name][1] / max(words[name][0], 1) for name in OPERANDS}
    return {"underflowed": underflowed, "transposes": transposes}


def enable(module: nn.Module, every: int = EVERY) -> Watch:
    """Count in every FP8 MoEExperts of `module`, on the device its parameters are on now, until
    `disable`. Raises ValueError if there is none, or `every` is below 1, RuntimeError if one of
    them is watched already."""
    seen = Watch(fp8_layers(module), every)
    for name, layer in seen.layers.items():
        if layer._counters is not None:
            raise RuntimeError(
                "[telemetry] a layer can be watched once at a time; got one that is watched "
                f"already, {name or type(layer).__name__}"
            )
    for name, layer in seen.layers.items():
        layer._counters = seen.counters[name]
    return seen


def fp8_layers(module: nn.Module) -> dict[str, Any]:
    """The FP8 MoEExperts of `module` by their names in it; ValueError if there is none."""
    layers = {name: m for name, m in blocks_of(module).items() if m.recipe is not None}
    if not layers:
        raise ValueError(
            f"[telemetry] module must contain an FP8 MoEExperts; got {type(module).__name__}"
        )
    return layers


def disable(module: nn.Module) -> None:
    """Stop counting in `module`."""
    for layer in blocks_of(module).values():
        layer._counters = None


@contextmanager
def watch(module: nn.Module, every: int = EVERY) -> Iterator[Watch]:
    """`enable` for a scope."""
    seen = enable(module, every)
    try:
        yield seen
    finally:
        disable(module)


# ---- GEMMs against bfloat16 ---------------------------------------------------------------------


@torch.no_grad()
def snr(
    layer: MoEExperts, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, dout: Tensor
) -> dict[str, float]:
    """Signal to noise of each GEMM of an FP8 `layer`, dB: 10 log10(|D|^2 / |D_fp8 - D|^2).

    D is the GEMM in bfloat16 over what its operands were before quantization: x [T, H] and dout
    [T, H], bf16 h and dz made from the FP8 flow's z and dh, and the parameters. D_fp8 is by the
    layer's recipe and, with preactivation "save_fp8", by the z that backward reads.
    topk_idx [T, S], topk_weights [T, S]. Gradients are left alone. Waits for the device.
    """
    recipe = layer.recipe
    if recipe is None:
        raise ValueError("[telemetry.snr] layer must have an FP8 recipe; got recipe=None")
    check_weights_alone("telemetry.snr", layer)
    if is_codes(layer.gate_up_proj):
        raise ValueError(
            "[telemetry.snr] layer must hold parameters before quantization; got one of from_fp8"
        )
    if layer.group is not None:
        raise ValueError("[telemetry.snr] layer must hold all experts; got one with a group")
    probs = topk_weights.float().contiguous()
    plan = ops.route(layer.num_experts, topk_idx=topk_idx.contiguous())
    weights = layer.local_weights()
    w: Any = quantize_weights(*weights, recipe)
    x_q, dout_q = fp8.enter(x, recipe), fp8.enter(dout, recipe, gradient=True)
    activation = layer.activation
    how: Any = {"activation": activation, "scale": recipe.scale, "eps": recipe.eps}
    row_probs: Any
    rows, row_probs = ops.permute_pad(x_q, plan, probs)
    z = ops.grouped_gemm(rows, w.gate_up, plan)
    made: Any = fp8.hidden(z, plan, row_probs, layer._options, layer.preactivation == "save_fp8")
    h_q, saved_z = made if isinstance(made, tuple) else (made, None)
    saved_z = z if saved_z is None else ops.dequantize(saved_z)
    y = ops.grouped_gemm(h_q, w.down, plan)
    dh = ops.grouped_gemm(ops.permute_pad(dout_q, plan)[0], w.down_t, plan)
    made = ops.act_quantize_backward(
        dh, saved_z, plan, row_probs, columns=recipe.columns, fp8_dtype=recipe.grad_dtype, **how
    )
    dz_q, dz_columns, h_columns, _ = made
    dx_rows = ops.grouped_gemm(dz_q, w.gate_up_t, plan)
    d_gate_up = Wgrad("x", x_q, dz_columns, plan, recipe).run(None, False, "float32")
    d_down = Wgrad("dout", dout_q, h_columns, plan, recipe).run(None, False, "float32")

    at: Any = torch.arange(plan.rows, device=plan.device)
    defined = ((at < plan.row_offsets[-1]) & (plan.token_of_row >= 0))[:, None]
    token = plan.token_of_row.long().clamp(0, max(plan.tokens - 1, 0))  # any, where undefined
    gate_up, down = (t.bfloat16() for t in weights)
    # Rows past the last expert's hold anything, NaN as well: a masked copy, not a product with 0.
    z, dh = (t.masked_fill(~defined, 0.0) for t in (z, dh))
    row_probs = row_probs.masked_fill(~defined[:, 0], 0.0)
    x_rows = x.bfloat16()[token].masked_fill(~defined, 0.0)
    dy = dout.bfloat16()[token].masked_fill(~defined, 0.0)
    dz, _, h = backward_of(activation)(dh, z, row_probs)
    last = recipe.weighting == "output"
    h_forward = forward_of(activation)(z, torch.ones_like(row_probs)) if last else h
    ends = plan.row_offsets[1:].contiguous()
    pairs = {
        "fprop-1": (z, bf16.grouped_mm(x_rows, gate_up.mT, ends)),
        "fprop-2": (y, bf16.grouped_mm(h_forward, down.mT, ends)),
        "dgrad-2": (dh, bf16.grouped_mm(dy, down, ends)),
        "dgrad-1": (dx_rows, bf16.grouped_mm(dz, gate_up, ends)),
        "wgrad-1": (d_gate_up, bf16.grouped_mm(dz.mT, x_rows, ends)),
        "wgrad-2": (d_down, bf16.grouped_mm(dy.mT, h, ends)),
    }
    found = {}
    for name, (got, want) in pairs.items():
        if got.ndim == 2:
            got, want = (t.masked_fill(~defined, 0.0) for t in (got, want))
        noise = (got.double() - want.double()).square().sum()
        found[name] = 10.0 * torch.log10(want.double().square().sum() / noise)
    return {name: float(value) for name, value in found.items()}
