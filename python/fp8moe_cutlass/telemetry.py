"""What FP8 costs a layer, counted where the data is: on the device, without a host sync.

    with telemetry.watch(model) as seen:       # every MoEExperts in it
        loss(model(batch)).backward()
    print(seen.report())                       # the only wait for the device

Counted for each quantized operand (x, h, dout, dz): how many nonzero values became code 0. For
each operand the layer transposes in FP8 (x, dout): how many nonzero codes the shifts flushed to 0,
and the histogram of the shifts k (new code = RN(old * 2^-k)) over 1x128 row tiles that hold a
nonzero code. Counters live at fixed addresses and are only added to, so that watching can be
captured in a CUDA graph: replays count. The counting itself is plain torch, about one extra pass
over what it looks at; watch the steps you want to know about, not all.

`snr` compares each GEMM of a layer with the same GEMM in bfloat16 over operands never quantized.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd import bf16, fp8
from fp8moe_cutlass.autograd.experts import quantize
from fp8moe_cutlass.nn import MoEExperts
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import TILE, Fp8Tensor

OPERANDS = ("x", "h", "dout", "dz")
TRANSPOSES = ("x columns", "dout columns")
SHIFTS = 17  # bins: k <= 0 ("block" shifts are never negative), 1, ..., 15, and 16 or more

Report = dict[str, Any]


class Counters:
    """The observer of one MoEExperts: counters [.., 2] i64 of (nonzero before, zero after)."""

    def __init__(self, device: torch.device) -> None:
        self.operands = torch.zeros(len(OPERANDS), 2, dtype=torch.int64, device=device)
        self.transposes = torch.zeros(len(TRANSPOSES), 2, dtype=torch.int64, device=device)
        self.shifts = torch.zeros(len(TRANSPOSES), SHIFTS, dtype=torch.int64, device=device)

    @torch.no_grad()
    def __call__(self, name: str, value: Any, plan: RoutingPlan, source: Any) -> None:
        if name in OPERANDS:
            self.operands[OPERANDS.index(name)].add_(_underflow(name, value, plan, source))
        elif name in TRANSPOSES:
            at = TRANSPOSES.index(name)
            self.transposes[at].add_(_flushed(source, value, plan))
            if source.pow2:
                self.shifts[at].add_(_shifts(source, value, plan))

    def report(self) -> Report:
        """Shares and counts as plain numbers; waits for the device."""
        operands = zip(OPERANDS, self.operands.tolist(), strict=True)
        transposes = zip(TRANSPOSES, self.transposes.tolist(), self.shifts.tolist(), strict=True)
        return {
            "underflowed": {name: lost / max(n, 1) for name, (n, lost) in operands},
            "transposes": {
                name: {"underflowed": lost / max(n, 1), "shifts": shifts}
                for name, (n, lost), shifts in transposes
            },
        }

    def reset(self) -> None:
        """Start counting from zero, in place."""
        for counter in (self.operands, self.transposes, self.shifts):
            counter.zero_()


class Watch:
    """The counters of every watched layer, by its name in the module."""

    def __init__(self, layers: dict[str, MoEExperts]) -> None:
        self.layers = layers
        self.counters = {n: Counters(m.gate_up_proj.device) for n, m in layers.items()}

    def report(self) -> dict[str, Report]:
        """Counters.report of each layer; waits for the device."""
        return {name: counters.report() for name, counters in self.counters.items()}

    def reset(self) -> None:
        """Start counting from zero, in place: a captured graph counts on."""
        for counters in self.counters.values():
            counters.reset()


def enable(module: nn.Module) -> Watch:
    """Count in every FP8 MoEExperts of `module`, on the device its parameters are on now, until
    `disable`. Raises ValueError if there is none."""
    seen = Watch(fp8_layers(module))
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
def watch(module: nn.Module) -> Iterator[Watch]:
    """`enable` for a scope."""
    try:
        yield enable(module)
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

    def _look(self, name: str, args: tuple[Any, ...], out: Tensor) -> None:
        if not out.requires_grad:
            return
        x, topk_idx, topk_weights, *_ = args
        # In the dtype the layer computed in, which under autocast is not x's.
        self.inputs[name] = x.detach().to(out.dtype), topk_idx, topk_weights.detach()
        hook = partial(self.douts.__setitem__, name)
        out.register_hook(hook)  # type: ignore[no-untyped-call]


@contextmanager
def tape(module: nn.Module) -> Iterator[Tape]:
    """Record what `snr` needs of every FP8 MoEExperts in `module`, for a scope."""
    tape = Tape(fp8_layers(module))
    hooks = [
        layer.register_forward_hook(lambda _, args, out, name=name: tape._look(name, args, out))
        for name, layer in tape.layers.items()
    ]
    try:
        yield tape
    finally:
        for hook in hooks:
            hook.remove()


# ---- counting -----------------------------------------------------------------------------------


def _nonzero(codes: Tensor, dim: int) -> Tensor:
    """Nonzero FP8 codes (either zero has only the sign bit) along `dim`."""
    return torch.count_nonzero(codes.view(torch.uint8) << 1, dim=dim)


def _underflow(name: str, q: Fp8Tensor, plan: RoutingPlan, source: Any) -> Tensor:
    """(nonzero values, nonzero values whose code is 0) of a quantization, over defined rows."""
    if name == "h":
        source = bf16.swiglu(*source)
    elif name == "dz":
        dh, z, row_probs = source
        z = ops.dequantize(z) if isinstance(z, Fp8Tensor) else z
        source, _ = bf16.swiglu_backward(dh, z, row_probs)
    values = source != 0
    lost = values & (q.data.view(torch.uint8) << 1 == 0)
    rows: Tensor = torch.stack([values.sum(dim=1), lost.sum(dim=1)])
    if name in ("h", "dz"):
        rows = rows.masked_fill(~_defined_rows(plan), 0)
    return rows.sum(dim=1)


def _defined_rows(plan: RoutingPlan) -> Tensor:
    """[R] bool: rows that carry an assignment."""
    rows = torch.arange(plan.rows, device=plan.device)
    defined: Tensor = (rows < plan.row_offsets[-1]) & (plan.token_of_row >= 0)
    return defined


def _tokens(plan: RoutingPlan) -> Tensor:
    """[R] i64: the token of each row; any token where the row is undefined."""
    tokens: Tensor = plan.token_of_row.long().clamp(0, max(plan.tokens - 1, 0))
    return tokens


def _flushed(rows: Fp8Tensor, columns: Fp8Tensor, plan: RoutingPlan) -> Tensor:
    """(nonzero codes of the kept assignments' rows, those that are 0 in the columns)."""
    kept = (plan.row_of >= 0).sum(dim=1)
    before = (_nonzero(rows.data, 1) * kept).sum()
    column = torch.arange(plan.columns, device=plan.device)
    after = _nonzero(columns.data, 0).masked_fill(column >= plan.col_offsets[-1], 0).sum()
    return torch.stack([before, before - after])


def _shifts(rows: Fp8Tensor, columns: Fp8Tensor, plan: RoutingPlan) -> Tensor:
    """Histogram [SHIFTS] of k = log2 S - log2 s over the 1x128 tiles of the kept assignments' rows
    that hold a nonzero code; s a row tile's scale, S its tile's in `columns`. For
    columns="column", where each channel has its own S, the largest of the 128."""
    if plan.rows == 0:
        return torch.zeros(SHIFTS, dtype=torch.int64, device=plan.device)
    blocks = rows.scale_inv.shape[1]
    pad = blocks * TILE - rows.shape[1]
    row = torch.arange(plan.rows, device=plan.device)
    token = _tokens(plan)
    expert = torch.searchsorted(plan.row_offsets[1:].contiguous(), row, right=True, out_int32=True)
    expert = expert.clamp(max=plan.experts - 1)
    tile = (plan.col_offsets[expert] + row - plan.row_offsets[expert]) // TILE
    tile = tile.clamp(0, plan.columns // TILE - 1)

    codes = F.pad(rows.data.view(torch.uint8) << 1, (0, pad)).view(-1, blocks, TILE)
    live = (codes != 0).any(dim=2)[token] & _defined_rows(plan)[:, None]
    if columns.scale_layout == "block":
        scale = columns.scale_inv[:, tile].T
    else:
        channels = F.pad(columns.scale_inv[:, : rows.shape[1]], (0, pad))
        scale = channels.view(-1, blocks, TILE).amax(dim=2)[tile]
    shift = _log2(scale) - _log2(rows.scale_inv)[token]
    shift = shift.clamp(0, SHIFTS - 1).masked_fill(~live, -1)
    return torch.stack([(shift == k).sum() for k in range(SHIFTS)])


def _log2(scale: Tensor) -> Tensor:
    """The exponents of positive powers of two that are normal floats, plus 127."""
    return scale.contiguous().view(torch.int32) >> 23


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
    seen: dict[str, Any] = {}

    def keep(name: str, value: Any, plan: RoutingPlan, source: Any) -> None:
        seen[name] = value

    layer.quantize_weights()
    probs = topk_weights.float().contiguous()
    plan = ops.route(layer.num_experts, topk_idx=topk_idx)
    x_q = quantize(x, recipe)
    dout_q = quantize(dout, recipe, recipe.grad_dtype)
    weights = layer.fp8_weights()
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
    h = bf16.swiglu(z, row_probs)
    dz, _ = bf16.swiglu_backward(dh, z, row_probs)
    ends = plan.row_offsets[1:].contiguous()
    pairs = {
        "fprop-1": (z, F.grouped_mm(x_rows, gate_up.mT, offs=ends)),
        "fprop-2": (seen["y"], F.grouped_mm(h, down.mT, offs=ends)),
        "dgrad-2": (dh, F.grouped_mm(dy, down, offs=ends)),
        "dgrad-1": (seen["dx rows"], F.grouped_mm(dz, gate_up, offs=ends)),
        "wgrad-1": (grads.gate_up(None, False, "float32"), _wgrad(dz, x_rows, ends)),
        "wgrad-2": (grads.down(None, False, "float32"), _wgrad(dy, h, ends)),
    }
    found = {}
    for name, (got, want) in pairs.items():
        if got.ndim == 2:
            got, want = (t.masked_fill(~defined, 0.0) for t in (got, want))
        noise = (got.double() - want.double()).square().sum()
        found[name] = 10.0 * torch.log10(want.double().square().sum() / noise)
    return {name: float(value) for name, value in found.items()}


def _wgrad(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    dw: Tensor = F.grouped_mm(dy.mT, x, offs=ends)
    return dw
