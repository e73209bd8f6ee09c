"""The same expert block in bf16 torch and, where they can be imported, in other libraries.

A peer is a module called as MoEExperts is, (x, topk_idx, probs) -> out. Nobody else's numbers are
kept here: a peer that is installed is timed in the same process, one that is not is left out.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8moe_cutlass.autograd.compiled import compiled
from fp8moe_cutlass.nn import MoEExperts

Factory = Callable[[MoEExperts, int], nn.Module]


def peers(device: torch.device) -> dict[str, Factory]:
    """name -> factory(layer, slots), for what can run here."""
    found: dict[str, Factory] = {
        "torch bf16": TorchExperts,
        "torch bf16, index_select and index_add": IndexingTorchExperts,
    }
    if device.type == "cuda":
        if importable("transformer_engine.pytorch"):
            found["TransformerEngine FP8"] = lambda layer, slots: TransformerEngineExperts(layer)
            found["TransformerEngine bf16"] = lambda layer, slots: TransformerEngineExperts(
                layer, fp8=False
            )
        if importable("sonicmoe"):
            found["SonicMoE bf16"] = SonicExperts
    return found


def importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


# ---- torch --------------------------------------------------------------------------------------


class TorchExperts(nn.Module):
    """grouped_mm, compiled SwiGLU, gathers in both directions: no atomics, no host sync. Shares the
    layer's parameters; CPU: nothing is compiled."""

    def __init__(self, layer: MoEExperts, slots: int) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = layer.gate_up_proj, layer.down_proj

    def forward(self, x: Tensor, topk_idx: Tensor, probs: Tensor) -> Tensor:
        expert, order = torch.sort(topk_idx.flatten(), stable=True)
        rows = torch.arange(order.numel(), device=order.device)
        row_of = torch.empty_like(order).scatter_(0, order, rows).view(topk_idx.shape)
        experts = torch.arange(len(self.down_proj), device=order.device)
        ends = torch.searchsorted(expert, experts, right=True, out_int32=True)
        x_rows, p = self.to_rows(x, probs, order, row_of)
        z = F.grouped_mm(x_rows, self.gate_up_proj.transpose(1, 2), offs=ends)
        h = swiglu(z, p)
        y = F.grouped_mm(h, self.down_proj.transpose(1, 2), offs=ends)
        return self.to_tokens(y, order, row_of)

    def to_rows(self, x: Tensor, probs: Tensor, order: Tensor, row_of: Tensor) -> Any:
        return _ToRows.apply(x, probs, order, row_of)  # type: ignore[no-untyped-call]

    def to_tokens(self, y: Tensor, order: Tensor, row_of: Tensor) -> Tensor:
        out: Tensor = _ToTokens.apply(y, order, row_of)  # type: ignore[no-untyped-call]
        return out


class IndexingTorchExperts(TorchExperts):
    """The same as it is usually written: rows moved by index_select and index_add, whose sums are
    atomic and in bf16."""

    def to_rows(self, x: Tensor, probs: Tensor, order: Tensor, row_of: Tensor) -> Any:
        return x.index_select(0, order // row_of.shape[1]), probs.flatten().index_select(0, order)

    def to_tokens(self, y: Tensor, order: Tensor, row_of: Tensor) -> Tensor:
        tokens, slots = row_of.shape
        return y.new_zeros(tokens, y.shape[1]).index_add(0, order // slots, y)


@compiled
def swiglu(z: Tensor, p: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up * p[:, None]).to(z.dtype)


@compiled
def sum_slots(rows: Tensor, row_of: Tensor) -> Tensor:
    """Slot by slot: inductor's reduction over slots takes up to eight times as long."""
    first, *others = row_of.unbind(1)
    total = rows[first].float()
    for row in others:
        total = total + rows[row].float()
    return total.to(rows.dtype)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, order: Tensor, row_of: Tensor) -> Any:
        ctx.save_for_backward(row_of)
        return x[order // row_of.shape[1]], probs.flatten()[order]

    @staticmethod
    def backward(ctx: Any, dx_rows: Tensor, dp: Tensor) -> tuple[Tensor | None, ...]:
        (row_of,) = ctx.saved_tensors
        return sum_slots(dx_rows, row_of), dp[row_of], None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(order, row_of)
        return sum_slots(y.detach(), row_of)  # detached: compiled once for both passes

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        order, row_of = ctx.saved_tensors
        return dout[order // row_of.shape[1]], None, None


# ---- other libraries ----------------------------------------------------------------------------


class TransformerEngineExperts(nn.Module):
    """TransformerEngine's permutation and GroupedLinear, FP8 with block scaling or bf16. The group
    sizes are lists on the host: it waits for the device (its grouped product without wants cuBLAS
    13.4 on Hopper, 13.6 with FP8 blocks, newer than what torch brings)."""

    def __init__(self, layer: MoEExperts, fp8: bool = True) -> None:
        super().__init__()
        self.te: Any = importlib.import_module("transformer_engine.pytorch")
        recipes = importlib.import_module("transformer_engine.common.recipe")
        self.fp8, recipe = fp8, recipes.Float8BlockScaling() if fp8 else None
        # Renamed in 2.17; the old name is deprecated.
        if hasattr(self.te, "autocast"):
            self.autocast = functools.partial(self.te.autocast, enabled=fp8, recipe=recipe)
        else:
            self.autocast = functools.partial(self.te.fp8_autocast, enabled=fp8, fp8_recipe=recipe)
        self.experts = layer.num_experts
        h, i = layer.hidden_size, layer.intermediate_size
        options = {"bias": False, "params_dtype": torch.bfloat16}
        self.fc1 = self.te.GroupedLinear(self.experts, h, 2 * i, **options)
        self.fc2 = self.te.GroupedLinear(self.experts, i, h, **options)
        self.weights_ready = False

    def forward(self, x: Tensor, topk_idx: Tensor, probs: Tensor) -> Tensor:
        shape = (len(x), self.experts)
        mask = torch.zeros(shape, dtype=torch.int32, device=x.device).scatter_(1, topk_idx, 1)
        dense = torch.zeros(shape, device=x.device).scatter(1, topk_idx, probs)
        counts, offsets = mask.sum(dim=0), None
        if self.fp8:  # groups of 16 rows
            rows, p, row_map, offsets, counts = self.te.moe_permute_and_pad_with_probs(
                x, dense, mask, counts, 16
            )
        else:
            rows, p, row_map = self.te.moe_permute_with_probs(x, dense, mask, topk_idx.numel())
        splits = counts.tolist()
        first = not self.weights_ready
        with self.autocast():
            z = self.fc1(rows, splits, is_first_microbatch=first)
            h = swiglu(z, p)
            y = self.fc2(h, splits, is_first_microbatch=first)
        self.weights_ready = True
        out: Tensor = self.te.moe_unpermute(
            y, row_map, restore_shape=x.shape, map_type="mask", pad_offsets=offsets
        )
        return out


class SonicExperts(nn.Module):
    """SonicMoE with the given routing. Its weights are in the layout it prefers: gate and up rows
    alternate."""

    def __init__(self, layer: MoEExperts, slots: int) -> None:
        super().__init__()
        self.sonic: Any = importlib.import_module("sonicmoe.functional")
        self.swiglu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
        gate_up = layer.gate_up_proj.detach().view(layer.num_experts, 2, -1, layer.hidden_size)
        self.gate_up_proj = nn.Parameter(gate_up.transpose(1, 2).flatten(1, 2))
        self.down_proj = layer.down_proj

    def forward(self, x: Tensor, topk_idx: Tensor, probs: Tensor) -> Tensor:
        rows = torch.arange(topk_idx.numel(), dtype=torch.int32, device=x.device)
        out: Tensor = self.sonic.moe_general_routing_inputs(
            x,
            probs.flatten(),
            rows // topk_idx.shape[1],
            topk_idx.flatten().int(),
            self.gate_up_proj.permute(1, 2, 0),
            None,  # no biases
            self.down_proj.permute(1, 2, 0),
            None,
            len(self.down_proj),
            torch.cuda.current_stream().cuda_stream,
            self.swiglu,
        )[0]
        return out
