"""DeepEP's own Buffer under integrations.deepep gives the bits of group=. Needs deep_ep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8moe_cutlass.integrations import deepep
from fp8moe_cutlass.nn import MoEExperts
from moe_problem import moved, problem
from ranks import Pool, results
from test_distributed import rank_of

pytest.importorskip("deep_ep")

# A token has a multiple of 512 bytes in DeepEP's kernels; ids go out of range nowhere.
EXPERTS, HIDDEN, INTERMEDIATE, SLOTS, TOKENS = 8, 512, 256, 4, 400


def beside_group(group: Any, p: Any) -> None:
    import deep_ep

    rank, ranks = rank_of(group), group.size()
    p = moved(p, f"cuda:{rank}")
    whole = MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, group=group, device=p.x.device)
    local = MoEExperts(EXPERTS // ranks, HIDDEN, INTERMEDIATE, device=p.x.device)
    mine = slice(rank * (EXPERTS // ranks), (rank + 1) * (EXPERTS // ranks))
    with torch.no_grad():
        for layer in (whole, local):
            layer.gate_up_proj.copy_(p.gate_up[mine])
            layer.down_proj.copy_(p.down[mine])
    buffer = deep_ep.Buffer(group, num_nvl_bytes=1 << 29)
    found = []
    for layer in (whole, local):
        x, probs = p.x.clone().requires_grad_(), p.probs.clone().requires_grad_()
        if layer is whole:
            out = layer(x, p.topk_idx, probs)
        else:
            out = deepep.experts(layer, buffer, x, p.topk_idx, probs, num_experts=EXPERTS)
        out.backward(p.dout)
        grads = layer.gate_up_proj.grad, layer.down_proj.grad
        found.append([out, x.grad, probs.grad, *grads])
    for want, got in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_equals_group(pool: Pool) -> None:
    (size,) = pool.members
    sizes = {"tokens": TOKENS, "experts": EXPERTS, "slots": SLOTS}
    p = problem(**sizes, hidden=HIDDEN, intermediate=INTERMEDIATE)
    results(pool.run(size, beside_group, p))
