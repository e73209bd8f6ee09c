"""The FP8 expert block in JAX: `moe_experts` under jit, grad, remat, scan and shard_map.

CMakeLists.txt builds libfp8moe_jax.so beside a copy of this file.
"""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

HANDLERS = ["forward", "backward", "weight_gradient", "pack", "pack_gradient", "unpack", "sum"]
WORKSPACE_BYTES = 576  # kZeroWorkspaceBytes of fp8moe/ops.h

_library = ctypes.CDLL(str(Path(__file__).with_name("libfp8moe_jax.so")))
for _name in HANDLERS:
    for _platform in ("cpu", "CUDA"):
        _handler = jax.ffi.pycapsule(getattr(_library, f"fp8moe_{_name}_{_platform.lower()}"))
        jax.ffi.register_ffi_target(f"fp8moe_{_name}", _handler, platform=_platform)


def moe_experts(
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    axis: str | None = None,
) -> jax.Array:
    """out[t] = sum over slots of weight * down_e (silu(gate) * up), [gate | up] = gate_up_e x[t].

    x [..., H] float32, bfloat16 or float16; topk_idx [..., S] int32 or int64, -1 for none;
    topk_weights [..., S]; gate_up [E, 2I, H] and down [E, H, I]. H and I are multiples of 16.
    Differentiable once in all but topk_idx. Each call quantizes the weights.
    axis: within shard_map, the mesh axis whose devices share the experts. gate_up and down are
    then this device's E / devices experts, in order; topk_idx counts all experts. Each device has
    as many tokens, and a token's experts are distinct.
    """
    _check(x, topk_idx, topk_weights, gate_up, down)
    slots, (experts, hidden, intermediate) = topk_idx.shape[-1], down.shape
    tokens = int(np.prod(x.shape[:-1]))
    if tokens == 0:
        return x  # of which no gradient is but zero
    devices = 1 if axis is None else lax.axis_size(axis)
    arriving = tokens * devices
    sizes = _Sizes(
        arriving,
        slots,
        experts,
        hidden,
        intermediate,
        arriving * (slots if axis is None else min(slots, experts)),
        int(axis is not None),
    )
    out = _block(
        _How(sizes, axis, devices, x.dtype, gate_up.dtype, down.dtype),
        x.reshape(tokens, hidden),
        topk_idx.reshape(tokens, slots),
        topk_weights.reshape(tokens, slots).astype(jnp.float32),
        gate_up,
        down,
    )
    return out.reshape(x.shape)


def _check(x: Any, topk_idx: Any, topk_weights: Any, gate_up: Any, down: Any) -> None:
    """ValueError unless shapes and dtypes are moe_experts'."""
    e, h, i = down.shape if down.ndim == 3 else (-1, -1, -1)
    if gate_up.shape != (e, 2 * i, h):
        raise ValueError(
            "[moe_experts] gate_up must be [E, 2I, H] and down [E, H, I]; "
            f"got {gate_up.shape} and {down.shape}"
        )
    if h % 16 or i % 16:
        raise ValueError(f"[moe_experts] H and I must be multiples of 16; got {h} and {i}")
    if x.ndim < 2 or x.shape[-1] != h:
        raise ValueError(f"[moe_experts] x must be [..., {h}]; got {x.shape}")
    if topk_idx.shape[:-1] != x.shape[:-1] or topk_weights.shape != topk_idx.shape:
        leading = ", ".join(map(str, x.shape[:-1]))
        raise ValueError(
            f"[moe_experts] topk_idx and topk_weights must be [{leading}, S]; "
            f"got {topk_idx.shape} and {topk_weights.shape}"
        )
    if topk_idx.dtype not in (jnp.int32, jnp.int64):
        raise ValueError(f"[moe_experts] topk_idx must be int32 or int64; got {topk_idx.dtype}")
    if getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", None):
        raise ValueError(
            "[moe_experts] shard_map must have check_vma=False, for foreign functions do not say "
            "which axes their results vary over; got check_vma=True"
        )


class _Sizes(NamedTuple):
    """experts::Sizes: of the tokens that arrive here, and of this device's experts."""

    tokens: int
    slots: int
    experts: int
    hidden: int
    intermediate: int
    capacity: int
    came_in_fp8: int


class _How(NamedTuple):
    """What a trace knows."""

    sizes: _Sizes
    axis: str | None
    devices: int
    x: Any  # the dtypes of the gradients
    gate_up: Any
    down: Any


class _Bytes(NamedTuple):
    """What fp8moe_block_bytes says."""

    saved: int
    kept: int
    forward: int
    forward_alone: int
    backward: int
    gradient: int

    @staticmethod
    def of(sizes: _Sizes) -> _Bytes:
        return _Bytes(*_numbers("block_bytes", 6, *sizes, _cuda()))


def _cuda() -> int:
    """Whether scratch is to suffice on a GPU, too."""
    return int(jax.default_backend() == "gpu")


def _numbers(name: str, count: int, *given: int) -> list[int]:
    """What a function of the library says of sizes."""
    function, found = getattr(_library, f"fp8moe_{name}"), (ctypes.c_int64 * count)()
    function.restype = ctypes.c_char_p
    error = function((ctypes.c_int64 * len(given))(*given), found)
    if error is not None:
        raise ValueError(error.decode())
    return list(found)


def _call(name: str, outputs: Any, *operands: Any, in_place: Any = None, **attributes: Any) -> Any:
    """One handler. in_place: of each operand that is written, the output that it becomes."""
    made = jax.ffi.ffi_call(
        f"fp8moe_{name}", outputs, vmap_method="sequential", input_output_aliases=in_place
    )
    return made(*operands, **attributes)


def _array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _bytes(count: int) -> jax.ShapeDtypeStruct:
    return _array(jnp.uint8, count)


def _zeros() -> jax.Array:
    """A zero workspace. Each call has its own, so that XLA may leave out those nobody reads."""
    return jnp.zeros(WORKSPACE_BYTES, jnp.uint8)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _block(how: _How, *operands: jax.Array) -> jax.Array:
    return _forward(how, *operands, backward=False)[0]


def _forward(
    how: _How,
    x: jax.Array,
    topk_idx: jax.Array,
    probs: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    backward: bool = True,
) -> tuple[jax.Array, Any]:
    """out, and what _backward reads."""
    s, need, plan, rows = how.sizes, _Bytes.of(how.sizes), None, None
    if how.axis is not None:
        rows, topk_idx, probs, plan = _send(how, x, topk_idx, probs)
        x = rows
    out, saved, _ = _call(
        "forward",
        (
            _array(jnp.bfloat16, s.tokens, s.hidden),
            _bytes(need.saved if backward else 0),
            _bytes(need.forward if backward else need.forward_alone),
        ),
        *(x, topk_idx, probs, gate_up, down),
        sizes=np.array(s),
    )
    if how.axis is not None:
        out = _return(how, out, plan)
    return out.astype(how.x), (saved, rows, plan)


def _backward(how: _How, left: Any, dout: jax.Array) -> tuple[Any, ...]:
    """The gradients of _block's operands."""
    (saved, rows, plan), s, need = left, how.sizes, _Bytes.of(how.sizes)
    if how.axis is not None:
        dout = _send_gradient(how, dout, plan)
    workspace = _bytes(WORKSPACE_BYTES)
    sizes: Any = {"sizes": np.array(s)}
    dx, dprobs, kept, *_ = _call(
        "backward",
        (
            _array(jnp.bfloat16, s.tokens, s.hidden),
            _array(jnp.float32, s.tokens, s.slots),
            _bytes(need.kept),
            workspace,
            _bytes(need.backward),
        ),
        *(dout, saved, _zeros()),
        in_place={2: 3},
        **sizes,
    )
    gradients = []
    shapes = (
        (s.experts, 2 * s.intermediate, s.hidden),
        (s.experts, s.hidden, s.intermediate),
    )
    for of_down, shape in enumerate(shapes):
        dtype = how.down if of_down else how.gate_up
        exact = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
        came = saved if how.axis is None else (rows, dout)[of_down]
        dw, *_ = _call(
            "weight_gradient",
            (_array(exact, *shape), workspace, _bytes(need.gradient)),
            *(came, saved, kept, _zeros()),
            in_place={3: 1},
            of_down=bool(of_down),
            **sizes,
        )
        gradients.append(dw.astype(dtype))
    if how.axis is not None:
        dprobs = jnp.pad(dprobs, ((0, 0), (0, -s.slots % 16)))  # rows that the sum takes
        dx, dprobs = _return(how, dx, plan), _return(how, dprobs, plan)[:, : s.slots]
    return dx.astype(how.x), None, dprobs, *gradients


_block.defvjp(_forward, _backward)


def _exchange(how: _How, rows: jax.Array) -> jax.Array:
    """As many rows to each device as from it."""
    return lax.all_to_all(rows, how.axis, 0, 0, tiled=True)


def _travel(how: _How) -> list[int]:
    """Words of a plan, bytes of a row and of a gradient's row, bytes of scratch."""
    s = how.sizes
    tokens = s.tokens // how.devices
    return _numbers("travel_sizes", 4, tokens, s.slots, how.devices, s.hidden, _cuda())


def _send(how: _How, x: jax.Array, topk_idx: jax.Array, probs: jax.Array) -> tuple[Any, ...]:
    """Packed rows, ids and probs that arrive here; and the plan by which tokens went."""
    s, (words, row, _, scratch) = how.sizes, _travel(how)
    packed, plan, *_ = _call(
        "pack",
        (
            _array(jnp.uint8, s.tokens, row),
            _array(jnp.int32, words),
            _array(jnp.int32, how.devices, 2),
            _bytes(scratch),
        ),
        *(x, topk_idx, probs),
        devices=how.devices,
        num_experts=how.devices * s.experts,
    )
    rows = _exchange(how, packed)
    slots = [_array(dtype, s.tokens, s.slots) for dtype in (jnp.int32, jnp.float32)]
    return rows, *_call("unpack", slots, rows, hidden=s.hidden), plan


def _send_gradient(how: _How, dout: jax.Array, plan: jax.Array) -> jax.Array:
    row = _travel(how)[2]
    packed = _array(jnp.uint8, how.sizes.tokens, row)
    return _exchange(how, _call("pack_gradient", packed, dout, plan, devices=how.devices))


def _return(how: _How, rows: jax.Array, plan: jax.Array) -> jax.Array:
    """Rows back to the devices of their tokens, and each token's sum."""
    back = _exchange(how, rows)
    out = _array(rows.dtype, how.sizes.tokens // how.devices, rows.shape[1])
    return _call("sum", out, back, plan, devices=how.devices)
