"""act_quantize and its gradient with each activation, beside SwiGLU and a copy of the same bytes.

"rows" is the forward, "dz" the backward, "dz and columns" the backward with the operands of the
weight gradients.
"""

from __future__ import annotations

import argparse

import torch

from cases import into, ragged, size_of, written
from common import OnResult, Record, environment, main, parser, row
from fp8moe_cutlass import Activation, ops
from timing import Limits

ACTIVATIONS = {
    "SwiGLU": Activation(),
    "SwiGLU, limited": Activation(limit=1.3),
    "GPT-OSS's": Activation(alpha=1.702, offset=1.0, limit=1.5),
    "GPT-OSS's, interleaved": Activation(alpha=1.702, offset=1.0, limit=7.0, interleaved=True),
    "limit after silu": Activation("swiglu_limit_after", limit=0.9),
    "gelu_tanh": Activation("gelu_tanh"),
    "relu2, no gate": Activation("relu2"),
}
SIZES = [(32768, 32, 2048), (16384, 32, 2880), (24576, 128, 1856), (32768, 128, 704)]  # R, E, I
QUICK = [(256, 4, 128), (256, 4, 80)]


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    limits = Limits(device)
    record: Record = {"environment": environment(limits), "results": []}
    for rows, experts, inner in QUICK if given.quick else SIZES:
        plan = ragged(rows, experts, device)
        probs = torch.rand(rows, device=device)
        dh = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
        workspace = ops.zero_workspace(dh)
        for variant in ("rows", "dz", "dz and columns"):
            runs, moved = [], []
            for a in ACTIVATIONS.values():
                z = 2 * torch.randn(rows, a.parts * inner, device=device, dtype=torch.bfloat16)
                if variant == "rows":
                    step, out = into(ops.act_quantize, z, plan, probs=probs, activation=a)
                    moved.append(size_of(z, probs) + written(plan, out))
                else:
                    columns = "block" if "columns" in variant else None
                    how = {"columns": columns, "workspace": workspace, "activation": a}
                    step, out = into(ops.act_quantize_backward, dh, z, plan, probs, **how)
                    moved.append(size_of(dh, z, probs) + written(plan, out))
                runs.append(step)
            *samples, copy = limits.timer.measure(*runs, limits.copy(max(moved)))
            for name, sample, bytes in zip(ACTIVATIONS, samples, moved, strict=True):
                shape = {"R": rows, "E": experts, "I": inner}
                peers = {"copy": copy.ms * bytes / max(moved), "SwiGLU": samples[0].ms}
                result = row(variant, shape, name, sample, peers=peers, limit_ms=None, bytes=bytes)
                record["results"].append(result)
                on_result(result)
    return record


if __name__ == "__main__":
    main(parser(__doc__), run)
