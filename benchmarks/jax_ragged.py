"""The expert block in bf16 by jax.lax.ragged_dot: what JAX has without this library.

python benchmarks/jax_ragged.py compiles the steps that jax_layer.py times, into the cache that
JAX_COMPILATION_CACHE_DIR names: on a GPU that takes minutes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

SHAPES: dict[str, dict[str, int]] = {
    "DeepSeek-V3, 32 experts": {"T": 4096, "E": 32, "S": 8, "H": 7168, "I": 2048},
    "Qwen3-30B, 128 experts": {"T": 4096, "E": 128, "S": 8, "H": 2048, "I": 768},
}
QUICK = {"tiny": {"T": 64, "E": 4, "S": 2, "H": 256, "I": 128}}


@jax.custom_vjp
def moved(x: Any, order: Any, back: Any) -> Any:
    """x[order], a permutation, whose gradient is the gather by `back` and no scatter."""
    return x[order]


moved.defvjp(
    lambda x, order, back: (x[order], (order, back)),
    lambda orders, dy: (dy[orders[1]], None, None),
)


def ragged_experts(x: Any, topk_idx: Any, probs: Any, gate_up: Any, down: Any) -> Any:
    """moe_experts in bf16. gate_up [E, H, 2I] and down [E, I, H], as ragged_dot takes them."""
    slots, experts = topk_idx.shape[1], gate_up.shape[0]
    flat = topk_idx.ravel()
    order = jnp.argsort(flat)
    back = jnp.argsort(order)
    counts = jnp.bincount(flat, length=experts).astype(jnp.int32)
    rows = moved(jnp.repeat(x, slots, axis=0), order, back)
    z = jax.lax.ragged_dot(rows, gate_up, counts)
    gate, up = jnp.split(z, 2, axis=-1)
    weight = moved(probs.ravel(), order, back)[:, None]
    h = (jax.nn.silu(gate.astype(jnp.float32)) * up * weight).astype(x.dtype)
    y = moved(jax.lax.ragged_dot(h, down, counts), back, order)
    return y.reshape(*topk_idx.shape, -1).astype(jnp.float32).sum(1).astype(x.dtype)


def step_of(block: Any) -> Any:
    """Forward and backward of `block` as one compiled function: out and the gradients."""

    def step(x: Any, ids: Any, probs: Any, gate_up: Any, down: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda x, *more: block(x, ids, *more), x, probs, gate_up, down)
        return out, *pull(dout)

    return jax.jit(step)


def compile_ragged(shape: dict[str, int]) -> None:
    t, e, s, h, i = (shape[name] for name in "TESHI")
    bf16 = jnp.bfloat16
    shapes = ((t, h), bf16), ((t, s), jnp.int32), ((t, s), jnp.float32), ((e, h, 2 * i), bf16)
    given = [jax.ShapeDtypeStruct(*of) for of in (*shapes, ((e, i, h), bf16), ((t, h), bf16))]
    step_of(ragged_experts).lower(*given).compile()


if __name__ == "__main__":
    for model, shape in SHAPES.items():
        compile_ragged(shape)
        print(model, "compiled", flush=True)
