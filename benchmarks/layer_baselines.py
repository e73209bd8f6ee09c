"""The expert layer in other libraries, and in torch as it is usually written.

A baseline is a module called as MoEExperts is: (x, topk_idx, probs) -> out. What cannot be
imported is left out.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe_cutlass.nn import MoEExperts
from torch_experts import TorchExperts, swiglu

TORCH = "torch bf16"
Factory = Callable[[MoEExperts], nn.Module]


def peers(device: torch.device) -> dict[str, Factory]:
    """What can run here, by name; torch at its best first."""
    found: dict[str, Factory] = {
        TORCH: TorchExperts,
        "torch bf16, index_select and index_add": IndexingTorchExperts,
    }
    if device.type == "cuda":
        if importable("transformer_engine.pytorch"):
            found["TransformerEngine FP8"] = TransformerEngineExperts
            found["TransformerEngine FP8, quantized in each step"] = functools.partial(
                TransformerEngineExperts, reuse=False
            )
            found["TransformerEngine bf16"] = functools.partial(TransformerEngineExperts, fp8=False)
        if importable("sonicmoe"):
            found["SonicMoE bf16"] = SonicExperts
    return found


def importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


class IndexingTorchExperts(TorchExperts):
    """The same as it is usually written: rows moved by index_select and index_add, whose sums are
    atomic and in bf16."""

    def to_rows(self, x: Tensor, probs: Tensor, order: Tensor, row_of: Tensor) -> Any:
        return x.index_select(0, order // row_of.shape[1]), probs.flatten().index_select(0, order)

    def to_tokens(self, y: Tensor, order: Tensor, row_of: Tensor) -> Tensor:
        tokens, slots = row_of.shape
        return y.new_zeros(tokens, y.shape[1]).index_add(0, order // slots, y)


class TransformerEngineExperts(nn.Module):
    """TransformerEngine's permutation and GroupedLinear, FP8 with block scaling or bf16. On Hopper
    its grouped product, whose group sizes stay on the device, wants cuBLAS 13.6, newer than what
    torch brings, and at most 64 experts. Otherwise TransformerEngine multiplies expert by expert,
    with sizes that the host waits for."""

    def __init__(self, layer: MoEExperts, fp8: bool = True, reuse: bool = True) -> None:
        super().__init__()
        self.reuse = reuse  # FP8 weights of the first step; else each step quantizes them
        self.te: Any = importlib.import_module("transformer_engine.pytorch")
        recipes = importlib.import_module("transformer_engine.common.recipe")
        self.fp8, recipe = fp8, recipes.Float8BlockScaling() if fp8 else None
        self.autocast = functools.partial(self.te.autocast, enabled=fp8, recipe=recipe)
        self.experts = layer.num_experts
        h, i = layer.hidden_size, layer.intermediate_size
        options = {"bias": False, "params_dtype": torch.bfloat16, "use_grouped_tensor": True}
        self.fc1 = self.te.GroupedLinear(self.experts, h, 2 * i, **options)
        self.fc2 = self.te.GroupedLinear(self.experts, i, h, **options)
        self.weights_ready = False

    def forward(self, x: Tensor, topk_idx: Tensor, probs: Tensor) -> Tensor:
        shape = (len(x), self.experts)
        mask = torch.zeros(shape, dtype=torch.int32, device=x.device).scatter_(1, topk_idx, 1)
        dense = torch.zeros(shape, device=x.device).scatter(1, topk_idx, probs)
        splits, offsets = mask.sum(dim=0), None
        if self.fp8:  # groups of 128 rows
            rows, p, row_map, offsets, splits = self.te.moe_permute_and_pad_with_probs(
                x, dense, mask, splits, 128
            )
        else:
            rows, p, row_map = self.te.moe_permute_with_probs(x, dense, mask, topk_idx.numel())
        first = not self.weights_ready if self.reuse else None
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

    def __init__(self, layer: MoEExperts) -> None:
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
