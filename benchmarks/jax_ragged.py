"""The expert block in bf16 by jax.lax.ragged_dot, what JAX has without this library: for
jax_layer.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


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
