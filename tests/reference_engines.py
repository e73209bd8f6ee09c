"""What SGLang and vLLM compute in a block-FP8 MoE layer on Hopper, step by step in plain torch.

Rules, read from sglang 0.5.23 and vllm 0.33.0 (docs/reference/numerics.md names the files); no code
of theirs. Nothing here uses the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# ---- the routers --------------------------------------------------------------------------------


def best(values: Tensor, count: int) -> Tensor:
    """Indices [T, count] of the largest of values [T, E]; of equal ones the lower comes first."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]


def route_deepseek_v3(
    logits: Tensor, bias: Tensor, top_k: int, groups: int, open_groups: int
) -> tuple[Tensor, Tensor]:
    """Ids and weights of logits [T, E] f32 and bias [E] f32, as FlashInfer's and vLLM's kernels
    choose; where theirs approximates tanh, torch's is exact."""
    scores = 0.5 * torch.tanh(0.5 * logits) + 0.5
    compared = scores + bias
    by_group = compared.view(len(logits), groups, -1)
    two = by_group.gather(2, torch.sort(by_group, dim=2, descending=True).indices[..., :2])
    is_open = torch.zeros(len(logits), groups, dtype=torch.bool)
    is_open.scatter_(1, best(two.sum(2), open_groups), True)
    ids = best(by_group.masked_fill(~is_open[..., None], -torch.inf).flatten(1), top_k)
    chosen = scores.gather(1, ids)
    return ids, (chosen.double() / (chosen.double().sum(1, keepdim=True) + 1e-20)).float()


def route_qwen3(logits: Tensor, top_k: int, engine: str) -> tuple[Tensor, Tensor]:
    """Ids and weights of logits [T, E] f32: SGLang divides, vLLM multiplies by reciprocals."""
    e = torch.exp(logits - logits.max(1, keepdim=True).values)
    total = e.sum(1, keepdim=True)
    p = e / total if engine == "sglang" else e * (1 / total)
    ids = best(p, top_k)
    chosen = p.gather(1, ids)
    total = torch.zeros_like(chosen[:, 0])
    for s in range(top_k):
        total = total + chosen[:, s]
    return ids, (chosen / total[:, None] if engine == "sglang" else chosen * (1 / total)[:, None])


# ---- quantizers ---------------------------------------------------------------------------------

LARGEST = torch.tensor(448.0)
INVERSE = 1 / LARGEST  # rounded, as a constant of float32 is


class Quantized(NamedTuple):
    """codes [M, K] in E4M3, scale [M, K / 128] f32."""

    codes: Tensor
    scale: Tensor


def amax_of(x: Tensor, floor: float) -> Tensor:
    """Of each 1x128 tile of x [M, K]: [M, K / 128, 1], at least `floor`."""
    tiles = x.float().view(len(x), -1, 128)
    return tiles.abs().amax(2, keepdim=True).clamp(min=floor)


def up_to_pow2(scale: Tensor) -> Tensor:
    """2^ceil(log2(scale)), exactly."""
    fraction, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).int())


def quantized(values: Tensor, scale: Tensor) -> Quantized:
    codes = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    return Quantized(codes.view(len(values), -1), scale[..., 0])


def quantize_vllm(x: Tensor, of_h: bool) -> Quantized:
    """Power-of-two scales. Of x a floor of the scale; of h one of the magnitude, and a product with
    the rounded 1 / 448."""
    tiles = x.float().view(len(x), -1, 128)
    if of_h:
        scale = up_to_pow2(amax_of(x, 1e-10) * INVERSE)
    else:
        scale = up_to_pow2((amax_of(x, 1e-10) / LARGEST).clamp(min=1e-10))
    return quantized(tiles / scale, scale)


def largest_over(amax: Tensor) -> Tensor:
    """448 / amax. SGLang's GPU divides approximately, this exactly."""
    return LARGEST / amax


def quantize_sglang(x: Tensor, of_h: bool) -> Quantized:
    """A stored scale that is not the reciprocal of what values are multiplied by."""
    amax = amax_of(x, 1e-10)
    tiles = x.float().view(len(x), -1, 128)
    return quantized(tiles * largest_over(amax), amax * INVERSE)


# ---- a GPU's instructions -----------------------------------------------------------------------

DIVIDE = 'float q; asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(q) : "f"(n), "f"(d)); return q;'
LARGEST_OVER = f"template <typename T> T largest_over(T d) {{ float n = 448.0f; {DIVIDE} }}"
SILU = f"""template <typename T> T silu(T n) {{
    float e, scaled = n * -1.4426950408889634f;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(scaled));
    float d = 1.0f + e;
    {DIVIDE} }}"""


def on_gpu(code: str) -> Callable[[Tensor], Tensor]:
    """A function of float32 tensors, elementwise on a GPU, from its CUDA source."""
    made: Callable[[Tensor], Tensor] = torch.cuda.jiterator._create_jit_fn(code)
    return lambda t: made(t.cuda().contiguous()).cpu()


# ---- the layer ----------------------------------------------------------------------------------

QUANTIZE = {"vllm": quantize_vllm, "sglang": quantize_sglang}
Gemm = Callable[[Quantized, int, str], Tensor]


def silu(gate: Tensor) -> Tensor:
    """Of gate f32. SGLang's GPU divides and exponentiates approximately; this is exact."""
    return (gate.double() / (1 + torch.exp(-gate.double()))).float()


def activation(z: Tensor, engine: str) -> Tensor:
    """silu(gate) up of z = [gate | up] in bf16, rounded once, or silu first."""
    gate, up = z.chunk(2, dim=1)
    if engine == "vllm":
        return silu(gate.float()).bfloat16() * up
    return (silu(gate.float()) * up.float()).bfloat16()


def weighted_sum(y: Tensor, probs: Tensor) -> Tensor:
    """y [T, S, H] bf16, probs [T, S] f32 -> [T, H] bf16: float32 fma by ascending slots, rounded
    once. float64 holds the products exactly."""
    total = torch.zeros_like(y[:, 0], dtype=torch.float64)
    for s in range(y.shape[1]):
        total = (total + y[:, s].double() * probs[:, s, None].double()).float().double()
    return total.bfloat16()


def experts(x: Tensor, ids: Tensor, probs: Tensor, engine: str, gemm: Gemm) -> Tensor:
    """x [T, H] bf16, ids [T, S] and probs [T, S] f32 -> [T, H] bf16. gemm(rows, expert, projection)
    multiplies rows by one expert's "gate_up" or "down", bf16 out."""
    quantize = QUANTIZE[engine]
    x_q = quantize(x, False)
    tokens, slots = ids.shape
    y = torch.zeros(tokens, slots, x.shape[1], dtype=torch.bfloat16)
    for e in ids.unique().tolist():
        token, slot = (ids == e).nonzero(as_tuple=True)
        z = gemm(Quantized(x_q.codes[token], x_q.scale[token]), e, "gate_up")
        y[token, slot] = gemm(quantize(activation(z, engine), True), e, "down")
    return weighted_sum(y, probs)
