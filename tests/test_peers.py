"""Exchanges through the memory of other ranks, over gloo and memory that the processes share: the
whole protocol. What torch.distributed carries is the oracle, bit for bit.
"""

from __future__ import annotations

import gc
import os
import re
import time
import warnings
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ranks
from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.distributed import peers as peers_module
from fp8moe_cutlass.distributed import symmetric
from fp8moe_cutlass.nn import MoEExperts
from moe_problem import Problem, assert_same
from ranks import MEMBERS, Pool, results
from test_distributed import (
    BIASES,
    COUNTS,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    SLOTS,
    batch,
    layer_of,
    on_a_rank,
    rank_of,
    routings,
    share,
    shares,
)

POISON = 0xA5
pytestmark = pytest.mark.slow
pool = ranks.pool(8, MEMBERS)


def poison(layer: MoEExperts) -> None:
    """In everything that travels, while no rank uses it."""
    exchange: Any = layer._exchange
    dist.barrier(exchange.group)
    used = exchange._peers.peers
    for area in used._room or ():
        area.memory.mine.fill_(POISON)
    dist.barrier(exchange.group)


def on_peers(group: Any, p: Problem, counts: list[int], options: dict[str, Any]) -> Any:
    """on_a_rank by both transports; whether they gave the same, and the second's sums lay there."""
    want = on_a_rank(group, p, counts, {**options, "transport": "nccl"})
    got = on_a_rank(group, p, counts, {**options, "transport": "peer"})
    assert_same(got[0], want[0])
    assert got[1] == want[1]
    return True


def check(pool: Pool, counts: list[int], p: Problem, **options: Any) -> None:
    results(pool.run(len(counts), on_peers, p, counts, options))


@pytest.mark.parametrize("capacity", [None, 80], ids=["exact", "capacity"])
@pytest.mark.parametrize("ranks", COUNTS)
def test_equals_torch_distributed(pool: Pool, ranks: int, capacity: Any) -> None:
    counts = COUNTS[ranks]
    check(pool, counts, batch(sum(counts)), rank_capacity=capacity)


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": None},
        {"preactivation": "recompute"},
        {"preactivation": "save_fp8"},
        {"recipe": Fp8Recipe(weighting="output")},
        {"recipe": Fp8Recipe(grad_dtype="e5m2", scale="fp32", columns="column")},
        BIASES,
        {"rank_capacity": (9, 30)},  # which drops
    ],
    ids=str,
)
def test_options(pool: Pool, options: dict[str, Any]) -> None:
    check(pool, [40, 33, 1, 50], batch(124), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dtypes(pool: Pool, dtype: torch.dtype) -> None:
    check(pool, [25, 31], batch(56, dtype=dtype))


@pytest.mark.parametrize("name", routings())
def test_routings(pool: Pool, name: str) -> None:
    for capacity in (None, 40):
        check(pool, [40, 0, 50, 30], batch(120, topk_idx=routings()[name]), rank_capacity=capacity)


def test_a_first_exchange_of_no_rows() -> None:
    own = Pool(2, {2: [0, 1]})
    check(own, [0, 0], batch(0))
    check(own, [7, 5], batch(12))
    own.close()


def in_flight(group: Any, p: Problem, capacity: Any) -> None:
    """Two layers and two batches: all forwards, then all backwards, the memory poisoned between."""
    mine = share(p, shares([60, 50])[rank_of(group)])
    other = replace(mine, x=mine.x.flip(0), topk_idx=mine.topk_idx.flip(0))
    found = []
    for transport in ("nccl", "peer"):
        options = {"rank_capacity": capacity, "transport": transport}
        layers = [layer_of(p, group, **options), layer_of(p, group, delay_wgrad=True, **options)]
        xs, outs = [], []
        for batch_ in (mine, other):
            x = batch_.x.clone().requires_grad_()
            probs = batch_.probs.clone().requires_grad_()
            h = layers[0](x, batch_.topk_idx, probs)
            h = checkpoint(layers[1], h, batch_.topk_idx, probs, use_reentrant=False)
            xs += [x, probs]
            outs.append(h)
            if transport == "peer":
                poison(layers[0])
        with torch.no_grad():
            outs.append(layers[0](mine.x, mine.topk_idx, mine.probs))
        for out in outs[:2]:
            if transport == "peer":
                poison(layers[0])
            out.backward(mine.dout)
        if transport == "peer":
            poison(layers[0])
        layers[1].backward_dw()
        grads = [w.grad for layer in layers for w in layer.parameters()]
        found.append([*outs, *(x.grad for x in xs), *grads])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("capacity", [None, 60], ids=["exact", "capacity"])
def test_nothing_that_a_backward_reads_is_overwritten(pool: Pool, capacity: Any) -> None:
    results(pool.run(2, in_flight, batch(110), capacity))


def meetings(group: Any, p: Problem, capacity: Any) -> int:
    """Meetings of the ranks in a step of one stream, all rows that came poisoned once the sums are
    there: others may store rows then."""
    meet, ready, count = peers_module._Meetings.meet, peers_module.Peers.ready, 0

    def counting(self: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        return meet(self, *args)

    def poisoning(self: Any) -> None:
        self._room.wire.memory.mine.fill_(POISON)
        ready(self)

    peers_module._Meetings.meet = counting  # type: ignore[method-assign]
    peers_module.Peers.ready = poisoning  # type: ignore[method-assign]
    try:
        for options in ({}, {"delay_wgrad": True}, {"recipe": Fp8Recipe(columns="column")}):
            found = []
            for transport in _BOTH:
                layer = layer_of(p, group, rank_capacity=capacity, transport=transport, **options)
                for _ in range(2):  # the first tells its terms
                    layer.zero_grad()
                    count = 0
                    result = p.run(layer)
                    layer.backward_dw()
                result.dgate_up, result.ddown = (w.grad for w in layer.parameters())
                found.append(result)
            assert_same(found[1], found[0])
    finally:
        peers_module._Meetings.meet, peers_module.Peers.ready = meet, ready  # type: ignore[method-assign]
    return count


@pytest.mark.parametrize(("capacity", "count"), [(None, 5), (60, 4)], ids=["exact", "capacity"])
def test_meetings_of_a_step(pool: Pool, capacity: Any, count: int) -> None:
    assert results(pool.run(2, meetings, batch(50), capacity)) == [count] * 2


def growing(group: Any, p: Problem) -> list[int]:
    """Batches of other sizes, also of none, through one layer."""
    layers = [layer_of(p, group, transport=t) for t in ("nccl", "peer")]
    sizes = []
    for tokens in (4, 3, 0, 40, 60, 20):
        count = tokens + 3 * rank_of(group)
        part = slice(0, count)
        mine = replace(
            p, x=p.x[part], topk_idx=p.topk_idx[part], probs=p.probs[part], dout=p.dout[part]
        )
        want, got = (mine.run(layer) for layer in layers)
        assert_same(got, want)
        for layer in layers:
            layer.zero_grad()
        sizes.append(layers[1]._exchange._peers.peers._has.wire)  # type: ignore[union-attr]
    return sizes


def test_memory_grows_with_the_batches() -> None:
    pool = Pool(2, {2: [0, 1]})  # whose groups have no memory yet
    try:
        found = results(pool.run(2, growing, batch(64)))
    finally:
        pool.close()
    assert found[0] == found[1]
    sizes = found[0]
    assert sizes == sorted(sizes)
    assert sizes[0] == sizes[1] == sizes[2] < sizes[3] < sizes[4] == sizes[5]


def growing_beside_a_graph(group: Any, p: Problem) -> list[bool]:
    """Whether the memory of captured and of eager exchanges still lives when it had to grow."""
    layer = layer_of(p, group, transport="peer")
    tokens = (4, 9, 20, 40)  # each needs more memory
    held, eager = [], peers_module.capturing
    for n, count in enumerate(tokens):
        mine = replace(
            p,
            x=p.x[:count],
            topk_idx=p.topk_idx[:count],
            probs=p.probs[:count],
            dout=p.dout[:count],
        )
        mine.run(layer)
        # As if a graph took this one's addresses.
        peers_module.capturing = lambda device, n=n: n in (0, 2)
        mine.run(layer)
        peers_module.capturing = eager
        room = layer._exchange._peers.peers._room  # type: ignore[union-attr]
        held.append(weakref.ref(room.sums.memory))
        del room
    gc.collect()
    return [memory() is not None for memory in held]


def test_memory_of_a_graph_lives_on() -> None:
    pool = Pool(2, {2: [0, 1]})  # whose groups have no memory yet
    try:
        found = results(pool.run(2, growing_beside_a_graph, batch(64)))
    finally:
        pool.close()
    assert found == [[True, False, True, True]] * 2


def compiled(group: Any, p: Problem, capacity: Any) -> None:
    mine = share(p, shares([60, 50])[rank_of(group)])
    layer = layer_of(p, group, rank_capacity=capacity, transport="peer")
    want = mine.run(layer)
    for w in layer.parameters():
        w.grad = None
    run = torch.compile(layer, backend="aot_eager")
    x, probs = mine.x.clone().requires_grad_(), mine.probs.clone().requires_grad_()
    out = run(x, mine.topk_idx, probs)
    out.backward(mine.dout)
    assert torch.equal(out, want.out)
    assert torch.equal(x.grad, want.dx)
    assert torch.equal(layer.down_proj.grad, want.ddown)


@pytest.mark.parametrize("capacity", [None, 60], ids=["exact", "capacity"])
def test_compiled(pool: Pool, capacity: Any) -> None:
    results(pool.run(2, compiled, batch(110), capacity))


def random_routings(group: Any, p: Problem, batches: int) -> None:
    """Batches of random sizes and routings, which differ between the ranks."""
    layers = [layer_of(p, group, transport=t, rank_capacity=c) for c in (None, 30) for t in _BOTH]
    g = torch.Generator().manual_seed(rank_of(group))
    for _ in range(batches):
        count = int(torch.randint(0, 31, (1,), generator=g))
        ids = torch.randint(-1, EXPERTS, (count, SLOTS), generator=g)
        x = torch.randn(count, HIDDEN, generator=g).bfloat16()
        x, ids, probs = (t.to(p.x.device) for t in (x, ids, torch.rand(count, SLOTS, generator=g)))
        mine = replace(p, x=x, topk_idx=ids, probs=probs, dout=x)
        found = [mine.run(layer) for layer in layers]
        assert_same(found[1], found[0])
        assert_same(found[3], found[2])
        for layer in layers:
            layer.zero_grad()


_BOTH = ("nccl", "peer")


def test_random_routings(pool: Pool) -> None:
    results(pool.run(4, random_routings, batch(1), 10))


def frozen(group: Any, p: Problem) -> None:
    """Exchanges that bring nothing back in backward, or dx or dprobs alone."""
    for x_grad, probs_grad in ((False, False), (True, False), (False, True)):
        found = []
        for transport in _BOTH:
            layer = layer_of(p, group, transport=transport)
            for _ in range(3):
                x = p.x.clone().requires_grad_(x_grad)
                probs = p.probs.clone().requires_grad_(probs_grad)
                out = layer(x, p.topk_idx, probs)
                out.backward(p.dout)
            found.append([out, x.grad, probs.grad, layer.down_proj.grad, layer.gate_up_proj.grad])
        for a, b in zip(*found, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def test_gradients_that_nobody_asks_for(pool: Pool) -> None:
    results(pool.run(2, frozen, batch(30)))


def fetched(group: Any, p: Problem) -> list[int]:
    """How often rows are copied in a backward with weight gradients, without, and delayed."""
    counts = []
    fetch = peers_module.Peers.fetch
    for options, frozen in (({}, False), ({}, True), ({"delay_wgrad": True}, False)):
        layer = layer_of(p, group, transport="peer", **options).requires_grad_(not frozen)
        parts = []

        def counting(self: Any, part: Any, *args: Any, parts: Any = parts) -> Any:
            parts.append(part.dtype)
            return fetch(self, part, *args)

        peers_module.Peers.fetch = counting  # type: ignore[method-assign]
        try:
            p.run(layer)
        finally:
            peers_module.Peers.fetch = fetch  # type: ignore[method-assign]
        assert set(parts) <= {torch.bfloat16}
        counts.append(len(parts))
    return counts


def test_dx_is_copied_beside_weight_gradients_alone(pool: Pool) -> None:
    assert results(pool.run(2, fetched, batch(30))) == [[1, 0, 0]] * 2


# ---- what is wrong ------------------------------------------------------------------------------


def disagreeing(group: Any, hidden: int) -> str:
    hidden = hidden if rank_of(group) == 1 else HIDDEN
    layer = MoEExperts(EXPERTS, hidden, INTERMEDIATE, group=group, transport="peer")
    idx = torch.zeros(9, SLOTS, dtype=torch.int64)
    try:
        layer(torch.randn(9, hidden).bfloat16(), idx, torch.ones(9, SLOTS))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_all_raise(pool: Pool) -> None:
    for error in results(pool.run(3, disagreeing, 256)):
        assert "hidden_size must be equal on all ranks" in error
    assert results(pool.run(3, disagreeing, HIDDEN)) == [""] * 3  # as good as before


def end_at(when: str, layer: MoEExperts, *batch_: Any) -> None:
    """Ends this process now or, in a forward, before it says that its sums are there."""

    def end(_: Any = None) -> None:
        if batch_[0].is_cuda:
            torch.cuda.synchronize()
        os._exit(1)

    if when == "combine":
        peers_module.Peers.ready = end  # type: ignore[method-assign]
        layer(*batch_)
    end()


def losing_a_peer(group: Any, when: str) -> tuple[str, float]:
    layer = MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, group=group, transport="peer")
    x = torch.randn(9, HIDDEN).bfloat16().requires_grad_()
    idx, probs = torch.arange(27).view(9, SLOTS) % EXPERTS, torch.ones(9, SLOTS)
    layer(x, idx, probs)  # all is well
    out = layer(x, idx, probs) if when == "backward" else None
    if dist.get_rank() == 1:
        end_at(when, layer, x, idx, probs)
    start = time.monotonic()
    try:
        if out is not None:
            out.sum().backward()
        layer(x, idx, probs)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.parametrize("when", ["forward", "combine", "backward"])
def test_a_lost_peer_is_an_error_in_bounded_time(when: str) -> None:
    pool = Pool(2, {2: [0, 1]}, timeout=2.0)
    try:
        error, seconds = results(pool.run(2, losing_a_peer, when, wait_for=[0]))[0]
    finally:
        pool.close()
    assert "every rank must come to an exchange within the group's timeout of 2 s" in error
    assert "got none from rank 1" in error
    assert seconds < 2 + 5


def one_forward(group: Any) -> None:
    layer = MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, group=group, transport="peer")
    layer(torch.zeros(2, HIDDEN).bfloat16(), torch.zeros(2, 1).long(), torch.ones(2, 1))


def test_a_timeout_of_years() -> None:
    """As training scripts give it that want none."""
    pool = Pool(2, {2: [0, 1]}, timeout=1.8e8)
    try:
        results(pool.run(2, one_forward))
    finally:
        pool.close()


def choices(group: Any) -> list[str]:
    layer = MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, group=group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.zeros(2, HIDDEN).bfloat16(), torch.zeros(2, 1).long(), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"transport must be 'auto', 'nccl' or 'peer'; got 'ring'"):
        MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, group=group, transport="ring")
    return [layer._exchange.transport, str(layer._exchange._peers)]  # type: ignore[union-attr]


def test_auto_takes_torch_distributed_on_the_cpu() -> None:
    """It is the default, and says nothing there."""
    pool = Pool(2, {2: [0, 1]})
    try:
        assert results(pool.run(2, choices)) == [["auto", "None"]] * 2
    finally:
        pool.close()


def without_room(group: Any, transport: str) -> str:
    """What is said where the second rank has no memory to share."""

    def make(group: Any, size: int, device: Any) -> symmetric.Memory:
        if rank_of(group) == 1:
            raise OSError("no room")
        share = torch.zeros(size, dtype=torch.uint8)
        return symmetric.Memory([share, share], share, None)

    symmetric._of_files = make
    peers_module.wanted = lambda device, transport: True
    layer = MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, group=group, transport=transport)
    of = torch.zeros(2, HIDDEN).bfloat16(), torch.zeros(2, 1).long(), torch.ones(2, 1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            layer(*of)
        except RuntimeError as error:
            return str(error)
    return str(said[0].message)


def test_no_memory_to_share() -> None:
    """All ranks say so; "auto" goes on by torch.distributed."""
    for transport, begins in (("peer", ""), ("auto", "rows go by torch.distributed: ")):
        pool = Pool(2, {2: [0, 1]})
        try:
            found = results(pool.run(2, without_room, transport))
        finally:
            pool.close()
        for text, got in zip(found, ("none on another rank", "no room"), strict=True):
            assert re.match(rf"\[MoEExperts\] {begins}transport 'peer' needs \d+ bytes", text)
            assert f"got {got}; use transport='nccl'" in text


def outgrowing(group: Any, p: Problem, capacity: Any) -> list[str]:
    """A batch for which the second rank has no memory, between the two halves of a step: of "auto"
    it goes by torch.distributed, and so do all later ones; "peer" raises, and goes on with less."""
    peers_module.wanted = lambda device, transport: transport != "nccl"
    of, room = symmetric._of_files, [1 << 60]

    def make(group: Any, size: int, device: Any) -> symmetric.Memory:
        made = of(group, size, device)
        if rank_of(group) == 1 and size > room[0]:
            raise OSError("no room")
        return made

    symmetric._of_files = make
    options = {} if capacity is None else {"rank_capacity": capacity}
    layers = [layer_of(p, group, transport=t, **options) for t in ("nccl", "auto", "peer")]
    small, outs, said = share(p, slice(0, 8)), [], []
    for layer in layers:
        x = small.x.clone().requires_grad_()
        outs.append((x, layer(x, small.topk_idx, small.probs)))
    room[0] = 0
    if capacity is not None:  # another one needs more
        layers = [layer_of(p, group, transport=t, rank_capacity=100) for t in ("nccl", "auto")]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            assert_same(p.run(layers[1]), p.run(layers[0]))
    said += [str(w.message) for w in told if "torch.distributed" in str(w.message)]
    assert layers[1]._exchange._peers is None  # type: ignore[union-attr]
    if capacity is None:
        with pytest.raises(RuntimeError) as error:
            layers[2](p.x, p.topk_idx, p.probs)
        said.append(str(error.value))
    grads = [torch.autograd.grad(out, x, small.dout)[0] for x, out in outs]
    assert torch.equal(grads[1], grads[0])
    assert torch.equal(grads[2], grads[0])
    return said


@pytest.mark.parametrize("capacity", [None, 20], ids=["exact", "capacity"])
def test_a_batch_that_outgrows_the_memory(capacity: Any) -> None:
    pool = Pool(2, {2: [0, 1]})
    try:
        found = results(pool.run(2, outgrowing, batch(90), capacity))
    finally:
        pool.close()
    for said, got in zip(found, ("none on another rank", "no room"), strict=True):
        assert len(said) == (2 if capacity is None else 1)
        assert said[0].startswith("[MoEExperts] rows go by torch.distributed: transport 'peer'")
        assert all(f"got {got}; use transport='nccl'" in text for text in said)


def test_transport_is_of_a_group() -> None:
    for transport in ("nccl", "peer"):
        with pytest.raises(ValueError, match=f"transport needs group=; got '{transport}' and gro"):
            MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, transport=transport)


def test_the_names_of_torch_that_are_used() -> None:
    """Its symmetric memory is alpha: what symmetric.py calls has the arguments it gives."""
    import inspect

    from torch.distributed import _symmetric_memory

    of = inspect.signature(_symmetric_memory.empty).parameters
    assert {"dtype", "device"} <= set(of)
    assert list(inspect.signature(_symmetric_memory.rendezvous).parameters) == ["tensor", "group"]
    said = torch._C._distributed_c10d._SymmetricMemory.get_buffer.__doc__
    assert re.search("rank: .* sizes: .* dtype: .* storage_offset: ", said)
    assert peers_module._WORDS > 4 + 2 * 64 + 8 + 64  # of 64 ranks
