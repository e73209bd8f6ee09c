"""What stands beside some operators in the record of ops.py: the same work in torch.

A reference is registered for one operator under a name. It gets the Work's inputs and returns the
call to time, or None where it does not apply (another device, another variant).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Reference = Callable[[dict[str, Any]], Callable[[], object] | None]
TORCH: dict[str, dict[str, Reference]] = {}


def beside(op: str, name: str) -> Callable[[Reference], Reference]:
    """Register the decorated factory as `name` beside `op`."""

    def register(factory: Reference) -> Reference:
        TORCH.setdefault(op, {})[name] = factory
        return factory

    return register


def compiled(function: Callable[[], object], device: torch.device) -> Callable[[], object] | None:
    """The function through torch.compile, which is what a user writes on a GPU; None elsewhere."""
    if device.type != "cuda":
        return None
    torch._dynamo.reset()  # a new shape would otherwise soon fall back to eager, silently
    return torch.compile(function, dynamic=False)


@beside("quantize", "torch compiled, row scales")
def torch_quantize(inputs: dict[str, Any]) -> Callable[[], object] | None:
    x = inputs["x"]
    if x.shape[1] % 128:
        return None

    def quantize() -> tuple[torch.Tensor, torch.Tensor]:
        tiles = x.view(x.shape[0], -1, 128).float()
        largest = tiles.abs().amax(dim=-1, keepdim=True).clamp_min(1e-10)
        scale = torch.exp2(torch.floor(torch.log2(448.0 / largest)))
        q = (tiles * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return q.view(x.shape), scale.squeeze(-1).reciprocal()

    return compiled(quantize, x.device)


@beside("permute_pad", "torch index_select")
def torch_permute(inputs: dict[str, Any]) -> Callable[[], object] | None:
    x, plan = inputs["x"], inputs["plan"]
    if not isinstance(x, torch.Tensor) or plan.align != 1:
        return None
    tokens = plan.token_of_row.long()
    if bool((tokens < 0).any()):
        return None
    return lambda: x.index_select(0, tokens)


@beside("unpermute_unpad", "torch index_add")
def torch_unpermute(inputs: dict[str, Any]) -> Callable[[], object] | None:
    y, plan, probs = inputs["y"], inputs["plan"], inputs["probs"]
    tokens = plan.token_of_row.long()
    if plan.align != 1 or bool((tokens < 0).any()):
        return None
    out = torch.zeros(inputs["T"], y.shape[1], dtype=y.dtype, device=y.device)
    if probs is None:
        return lambda: out.zero_().index_add_(0, tokens, y)
    weights = probs[tokens, plan.slot_of_row.long()].to(y.dtype)[:, None]
    return lambda: out.zero_().index_add_(0, tokens, y * weights)


@beside("act_quantize", "torch silu * up, bf16 out")
def torch_swiglu(inputs: dict[str, Any]) -> Callable[[], object] | None:
    gate, up = inputs["z"].chunk(2, dim=-1)
    probs = inputs["probs"][:, None]
    return lambda: (F.silu(gate) * up * probs).bfloat16()


@beside("act_quantize", "torch compiled silu * up, bf16 out")
def torch_swiglu_compiled(inputs: dict[str, Any]) -> Callable[[], object] | None:
    z, probs = inputs["z"], inputs["probs"]

    def swiglu() -> torch.Tensor:
        gate, up = z.chunk(2, dim=-1)
        h: torch.Tensor = (F.silu(gate) * up * probs[:, None]).bfloat16()
        return h

    return compiled(swiglu, z.device)


@beside("grouped_gemm", "torch bf16 _grouped_mm")
def torch_grouped_mm(inputs: dict[str, Any]) -> Callable[[], object] | None:
    x, w = inputs["x"], inputs["w"]
    if x.device.type != "cuda":
        return None
    ends = inputs["plan"].row_offsets[1:]
    return lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends, out_dtype=torch.bfloat16)


@beside("grouped_gemm", "torch bf16, a matmul an expert")
def torch_loop(inputs: dict[str, Any]) -> Callable[[], object] | None:
    x, w = inputs["x"], inputs["w"]
    if x.device.type != "cpu":
        return None
    counts = inputs["plan"].tokens_per_expert.tolist()
    return lambda: [rows @ we.t() for rows, we in zip(x.split(counts), w, strict=True)]


@beside("grouped_gemm_wgrad", "torch bf16 _grouped_mm")
def torch_grouped_wgrad(inputs: dict[str, Any]) -> Callable[[], object] | None:
    dy, x = inputs["dy"], inputs["x"]
    if x.device.type != "cuda" or inputs["columns"] != "block":
        return None
    ends = inputs["plan"].row_offsets[1:]
    return lambda: torch._grouped_mm(dy.t(), x, offs=ends, out_dtype=torch.bfloat16)
