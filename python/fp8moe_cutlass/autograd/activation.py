"""Activations in torch, in float32: what the bf16 body computes, and telemetry compares with.

One more activation has its formula and its derivative in `_terms`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe_cutlass.activation import Activation
from fp8moe_cutlass.autograd.compiled import compiled


class _Terms(NamedTuple):
    """h = f by, of the gate and up."""

    f: Tensor
    df: Tensor  # 0 beyond a limit
    by: Tensor
    beyond: Tensor | None  # where up is, which has no gradient there; None: nowhere


@functools.cache
def forward_of(activation: Activation) -> Callable[[Tensor, Tensor], Tensor]:
    """h(z, p) [A, I] in z's dtype, of z and the rows' probs [A] f32."""

    @compiled
    def forward(z: Tensor, p: Tensor) -> Tensor:
        if activation == Activation():
            gate, up = z.chunk(2, dim=-1)
            return (F.silu(gate.float()) * up * p[:, None]).to(z.dtype)
        if not activation.gated:
            return (F.relu(z.float()).square() * p[:, None]).to(z.dtype)
        of = _terms(z.float(), activation)
        return (of.f * of.by * p[:, None]).to(z.dtype)

    return forward


@functools.cache
def backward_of(
    activation: Activation,
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """(dh, z, p) -> dz of z's shape, the rows' dprob [A] f32, and h [A, I] again, from one pass
    over z."""

    @compiled
    def backward(dh: Tensor, z: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dh = dh.float()
        dout = dh * p[:, None]
        if not activation.gated:
            relu = F.relu(z.float())
            h = relu.square()
            dz = (dout * 2.0 * relu).to(z.dtype)
            return dz, (h * dh).sum(dim=-1), (h * p[:, None]).to(z.dtype)
        f, df, by, beyond = _terms(z.float(), activation)
        dgate, dup = dout * df * by, dout * f
        dup = dup if beyond is None else dup.masked_fill(beyond, 0.0)
        both = dgate.to(z.dtype), dup.to(z.dtype)
        with torch.autocast(z.device.type, enabled=False):  # float16's takes no bfloat16 here
            if activation.interleaved:
                dz = torch.stack(both, dim=-1).flatten(-2)
            else:
                dz = torch.cat(both, dim=-1)
        h = f * by
        return dz, (h * dh).sum(dim=-1), (h * p[:, None]).to(z.dtype)

    return backward


def _terms(z: Tensor, a: Activation) -> _Terms:
    gate, up = (z[..., ::2], z[..., 1::2]) if a.interleaved else z.chunk(2, dim=-1)
    if a.kind == "gelu_tanh":
        x = gate.clamp(-16.0, 16.0)  # beyond, the sigmoid is 0 or 1
        sigmoid = torch.sigmoid(1.5957691216 * (x + 0.044715 * x * x * x))
        slope = 1.5957691216 * (1.0 + 0.134145 * x * x)
        return _Terms(gate * sigmoid, sigmoid * (1.0 + gate * slope * (1.0 - sigmoid)), up, None)
    beyond = None if a.limit is None else up.abs() > a.limit
    by = up if a.limit is None else up.clamp(-a.limit, a.limit)
    by = by + a.offset if a.offset else by
    limited = a.limit is not None and a.kind == "swiglu"
    x = gate.clamp(max=a.limit) if limited else gate
    scaled = x if a.alpha == 1.0 else a.alpha * x
    sigmoid = torch.sigmoid(scaled)
    f, df = x * sigmoid, sigmoid * (1.0 + scaled * (1.0 - sigmoid))
    if a.limit is not None:
        df = df.masked_fill((gate if limited else f) > a.limit, 0.0)
        f = f if limited else f.clamp(max=a.limit)
    return _Terms(f, df, by, beyond)
