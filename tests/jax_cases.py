"""What test_jax_moe.py runs in a process of its own: python jax_cases.py BUILD PROBLEMS.npz OUT.npz

PROBLEMS: of each case its tensors as float32 or int32, and their dtype. OUT: of each case its
results as float32, and what errors said.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

sys.path.insert(0, sys.argv[1])
import fp8moe_jax
from fp8moe_jax import moe_experts

NAMES = ("out", "dx", "dprobs", "dgate_up", "ddown")
Block = Callable[..., jax.Array]


def step(block: Block, x: Any, ids: Any, probs: Any, gate_up: Any, down: Any, dout: Any) -> Any:
    """out and the gradients."""
    out, pull = jax.vjp(lambda *given: block(given[0], ids, *given[1:]), x, probs, gate_up, down)
    return out, *pull(dout)


def forward(others: tuple[Any, ...], x: Any) -> jax.Array:
    """The block as a function of x."""
    return moe_experts(x, *others)


def over_layers(block: Block, x: Any, ids: Any, probs: Any, gate_up: Any, down: Any) -> jax.Array:
    """Residual layers, of weights [L, ...], by scan."""

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        return x + block(x, ids, probs, *weights), None

    return jax.lax.scan(layer, x, (gate_up, down))[0]


def batched(x: Any, ids: Any, probs: Any, gate_up: Any, down: Any) -> jax.Array:
    """The block over [1, T, H]."""
    return moe_experts(x[None], ids[None], probs[None], gate_up, down)[0]


def shared(devices: int) -> Block:
    """The block with the experts shared by so many devices."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("experts",))
    return jax.shard_map(
        partial(moe_experts, axis="experts"),
        mesh=mesh,
        in_specs=P("experts"),
        out_specs=P("experts"),
        check_vma=False,
    )


def blocks() -> Iterator[tuple[str, Block]]:
    """The ways to call the block."""
    yield "jit", moe_experts
    yield "remat", jax.checkpoint(moe_experts)
    yield (
        "batched",
        lambda x, ids, *more: moe_experts(x[None], ids[None], more[0][None], *more[1:])[0],
    )
    for devices in (1, 2, 4):
        if devices <= len(jax.devices()):
            yield f"shared {devices}", shared(devices)


def errors(x: Any, ids: Any, probs: Any, gate_up: Any, down: Any) -> Iterator[tuple[str, str]]:
    """What wrong calls say."""
    given: dict[str, tuple[Any, ...]] = {
        "id": (x, ids + 100, probs, gate_up, down),
        "width": (x[:, :250], ids, probs, gate_up[:, :, :250], down[:, :250]),
        "weights": (x, ids, probs, gate_up[:, :-1], down),
        "x": (x[:, :128], ids, probs, gate_up, down),
        "ids": (x, ids[:-1], probs, gate_up, down),
        "dtype": (x, ids.astype(jnp.int16), probs, gate_up, down),
    }
    if jax.default_backend() == "gpu":
        del given["id"]  # the host cannot read them
    for name, arguments in given.items():
        try:
            jax.block_until_ready(jax.jit(moe_experts)(*arguments))
        except Exception as error:
            yield name, str(error)
    mesh = Mesh(np.array(jax.devices()[:1]), ("experts",))
    block, spec = partial(moe_experts, axis="experts"), P("experts")
    tracked = jax.shard_map(block, mesh=mesh, in_specs=spec, out_specs=spec)
    try:
        tracked(x, ids, probs, gate_up, down)
    except ValueError as error:
        yield "check_vma", str(error)


def say(begins: str) -> None:
    """The last line of a process that dies tells where."""
    print(begins, file=sys.stderr, flush=True)


def first_steps() -> None:
    """JAX alone, then one of our kernels."""
    say("JAX finds its devices")
    say(str(jax.devices()))
    say("JAX copies there and back")
    ones = jnp.asarray(np.ones((3, 32), np.uint8))
    assert np.asarray(ones).all()
    say("JAX compiles and runs")
    assert int(jax.jit(jnp.sum)(ones)) == 96
    say("a handler of one kernel")
    outputs = [jax.ShapeDtypeStruct((3, 1), dtype) for dtype in (jnp.int32, jnp.float32)]
    ids, _ = jax.jit(partial(fp8moe_jax._call, "unpack", outputs, hidden=16))(ones)
    assert (np.asarray(ids) == 0x01010101).all()


def main() -> None:
    first_steps()
    problems, found = np.load(sys.argv[2]), {}

    def keep(case: str, results: Any, names: Any = NAMES) -> None:
        for name, result in zip(names, results, strict=True):
            found[f"{case}/{name}"] = np.asarray(result.astype(jnp.float32))

    for case in sorted({name.split("/")[0] for name in problems}):
        dtype = str(problems[f"{case}/dtype"])
        names = ("x", "topk_idx", "probs", "gate_up", "down", "dout")
        given = [jnp.asarray(problems[f"{case}/{name}"]) for name in names]
        x, ids, probs, gate_up, down, dout = (
            t.astype(dtype) if name not in ("topk_idx", "probs") else t
            for name, t in zip(names, given, strict=True)
        )
        say(case)
        if case == "layers":
            run = partial(step, partial(over_layers, jax.checkpoint(moe_experts)))
            keep(case, jax.jit(run)(x, ids, probs, gate_up, down, dout))
            continue
        for way, block in blocks():
            say(f"{case}, {way}")
            run = jax.jit(partial(step, block))
            keep(f"{case}, {way}", run(x, ids, probs, gate_up, down, dout))
        say(f"{case}, alone and vmap")
        of_x = partial(forward, (ids, probs, gate_up, down))
        keep(f"{case}, alone", [jax.jit(of_x)(x)], ["out"])
        keep(f"{case}, vmap", jax.vmap(of_x)(x[None]), ["out"])
        if case != "bfloat16":
            continue
        say("frozen and errors")
        frozen = jax.jit(lambda x, dout: jax.vjp(of_x, x)[1](dout))  # noqa: B023
        keep("frozen", frozen(x, dout), ["dx"])
        text = frozen.lower(x, dout).compile().as_text()
        calls = ("backward", "weight_gradient")
        found["frozen/calls"] = np.array([text.count(f'"fp8moe_{name}"') for name in calls])
        for name, said in errors(x, ids, probs, gate_up, down):
            found[f"error/{name}"] = np.array(said)
    np.savez(sys.argv[3], **found)


main()
