"""Exchanges through the memory of other GPUs: the operators on one, the transport on several."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8moe_cutlass import Fp8Recipe, ops
from fp8moe_cutlass.nn import MoEExperts
from moe_problem import assert_same, moved
from ranks import Pool, results
from test_distributed import BIASES, EXPERTS, HIDDEN, INTERMEDIATE, SLOTS, batch, layer_of, rank_of
from test_peers import POISON, end_at, growing, in_flight, meetings, on_peers, random_routings

# ---- the operators ------------------------------------------------------------------------------


class Meeting:
    """Ranks of this GPU, a stream each."""

    def __init__(self, ranks: int, pinned: bool) -> None:
        def words(*shape: int) -> list[Any]:
            return [torch.zeros(shape, dtype=torch.int32, device="cuda") for _ in range(ranks)]

        self.ranks, self.mailboxes, self.calls = ranks, words(2, ranks, 32), words(1)
        self.ended = words(1)
        late = torch.zeros(ranks, ranks, dtype=torch.int32, pin_memory=pinned)
        self.late = list(late if pinned else late.cuda())
        self.peers = torch.tensor([m.data_ptr() for m in self.mailboxes], device="cuda")
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        torch.cuda.synchronize()

    def share(self, rank: int, words: Any, timeout_ms: int = 20000, out: Any = None) -> Any:
        with torch.cuda.stream(self.streams[rank]):
            own = words.numel() // 2
            return ops.share_words(
                *(
                    words[:own],
                    self.peers,
                    self.mailboxes[rank],
                    self.calls[rank],
                    self.ended[rank],
                ),
                self.late[rank],
                rank=rank,
                timeout_ms=timeout_ms,
                more=words[own:].view(-1, 1),
                out=out,
            )


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("count", [0, 1, 31])
def test_words_reach_every_rank(count: int, host: bool) -> None:
    meeting = Meeting(3, pinned=True)
    words = torch.randint(0, 1 << 30, (5, 3, count), dtype=torch.int32, device="cuda")
    out = torch.full((5, 3, 3, count), -1, dtype=torch.int32, pin_memory=True)
    torch.cuda.synchronize()
    told = [
        [meeting.share(r, words[n, r], out=out[n, r] if host else None) for r in range(3)]
        for n in range(5)
    ]
    torch.cuda.synchronize()
    for call in range(5):
        for r in range(3):
            assert torch.equal(told[call][r].cuda(), words[call])
    assert not any(t.any() for t in meeting.late)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_late_rank_ends_the_wait(pinned: bool) -> None:
    """By itself, and everything goes on."""
    meeting = Meeting(2, pinned)
    words = torch.full((2,), 5, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    start = time.monotonic()
    told = meeting.share(0, words, 50)
    torch.cuda.synchronize()
    assert 0.045 < time.monotonic() - start < 5
    assert told.tolist() == [[5, 5], [0, 0]]
    assert meeting.late[0].tolist() == [0, 1]
    start = time.monotonic()
    told = meeting.share(0, words, 60_000)
    torch.cuda.synchronize()
    assert told.tolist() == [[0, 0], [0, 0]]
    assert time.monotonic() - start < 5
    assert meeting.late[0].tolist() == [0, 1]
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_late_must_be_pinned() -> None:
    meeting = Meeting(1, pinned=False)
    meeting.late[0] = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"\[share_words\] late must be .* pinned memory; got page"
    ):
        meeting.share(0, torch.zeros(1, dtype=torch.int32, device="cuda"))


def test_rows_are_copied_from_their_places() -> None:
    there = [torch.randn(5, 72, device="cuda") for _ in range(3)]
    out = torch.full((6, 72), POISON, dtype=torch.float32, device="cuda")
    places = [[there[0].data_ptr(), 4, 2], [there[2].data_ptr(), 0, 6]]
    places.append([there[1][1].data_ptr(), 2, 0])
    ops.copy_rows(out, torch.tensor(places))
    assert torch.equal(out, torch.cat([there[1][1:3], there[0][:4]]))
    beside = torch.cuda.Stream()
    torch.cuda._sleep(20_000_000)
    want = there[0].fill_(3.0)[:4].clone()  # after the pause: the other stream waits for it
    ops.copy_rows(
        out[2:], torch.tensor(places[:1]) - torch.tensor([0, 0, 2]), beside=beside.cuda_stream
    )
    beside.synchronize()
    assert torch.equal(out[2:], want)
    with pytest.raises(ValueError, match=r"\[copy_rows\] places must be"):
        ops.copy_rows(out, torch.tensor(places, device="cuda"))


@pytest.mark.parametrize("segment", [0, 40, 700])
@pytest.mark.parametrize("slots", [0, 8])
@pytest.mark.parametrize("hidden", [272, 7168])
def test_rows_go_to_the_ranks_and_sums_come_from_them(
    hidden: int, slots: int, segment: int
) -> None:
    ranks, tokens = 4, 611
    g = torch.Generator().manual_seed(hidden + segment)
    ids = torch.randint(-1, 64, (tokens, 8), generator=g).cuda()
    x = torch.randn(tokens, hidden, generator=g).bfloat16().cuda()
    probs = torch.rand(tokens, 8, generator=g).cuda()
    plan, _ = ops.dispatch_plan(ids, 64, ranks, segment=segment, spare=int(segment > 0))
    of = (ids, probs) if slots else ()
    width = ops.packed_row_bytes(hidden, slots)
    want = torch.full((plan.rows, width), POISON, dtype=torch.uint8, device="cuda")
    ops.quantize_pack(x, plan, *of, num_experts=64, out=want)
    offsets = plan.row_offsets.tolist()
    for most in (tokens + 90, 33):
        there = torch.full((ranks, most, width), POISON, dtype=torch.uint8, device="cuda")
        addresses = torch.tensor([t.data_ptr() for t in there], device="cuda")
        ops.quantize_pack(x, plan, *of, num_experts=64, peers=addresses, out=there[1])
        for r in range(ranks):
            rows = min(most, offsets[r + 1] - offsets[r])
            assert torch.equal(there[r, :rows], want[offsets[r] : offsets[r] + rows])
            assert (there[r, rows:] == POISON).all()
        firsts = torch.tensor([0, 5, 2, 31], dtype=torch.int32)
        there.fill_(POISON)
        at = {"peers": addresses, "first": firsts, "out": there[1]}
        ops.quantize_pack(x, plan, *of, num_experts=64, **at)
        for r, before in enumerate(firsts.tolist()):
            rows = min(most - before, offsets[r + 1] - offsets[r])
            assert torch.equal(
                there[r, before : before + rows], want[offsets[r] : offsets[r] + rows]
            )
            assert (there[r, :before] == POISON).all()
            assert (there[r, before + rows :] == POISON).all()
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        rows = torch.randn(plan.rows, hidden, device="cuda").to(dtype)
        there = torch.full((ranks, plan.rows + 3, hidden), 9.0, dtype=dtype, device="cuda")
        for r in range(ranks):
            there[r, 3 : 3 + offsets[r + 1] - offsets[r]] = rows[offsets[r] : offsets[r + 1]]
        addresses = torch.tensor([t.data_ptr() for t in there], device="cuda")
        first = torch.full((ranks,), 3, dtype=torch.int32)
        got = ops.unpermute_unpad(there[2], plan, peers=addresses, first=first)
        assert torch.equal(got, ops.unpermute_unpad(rows, plan))
    narrow = torch.randn(plan.rows, 8, device="cuda")
    assert torch.equal(
        ops.unpermute_unpad(narrow, plan).cpu(), ops.unpermute_unpad(narrow.cpu(), plan.to("cpu"))
    )


def test_rows_behind_others_in_a_capture() -> None:
    """Where they go, of lengths that differ between ranks, is read when the call is captured."""
    ids = torch.randint(0, 8, (50, 2)).cuda()
    x, plan = torch.randn(50, 256, device="cuda"), ops.dispatch_plan(ids, 8, 2).plan
    wire = [torch.zeros(2, 80, ops.packed_row_bytes(256, 0)).byte().cuda() for _ in range(2)]
    at: list[Any] = [
        {"peers": torch.tensor([t.data_ptr() for t in there], device="cuda"), "out": there[0]}
        for there in wire
    ]
    first = torch.tensor([5, 17], dtype=torch.int32)
    ops.quantize_pack(x, plan, first=first, **at[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.quantize_pack(x, plan, first=first, **at[1])
    first.zero_()
    graph.replay()
    assert torch.equal(*wire)
    assert wire[0].any()


# ---- a group of one -----------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [None, 300])
def test_a_group_of_one(world: Any, capacity: Any, device: torch.device) -> None:
    p = moved(batch(300), device)
    want = p.run(layer_of(p, None))
    layer = layer_of(p, world, rank_capacity=capacity, transport="peer")
    assert_same(p.run(layer), want)
    layer.check()


# ---- several GPUs -------------------------------------------------------------------------------


def run(pool: Pool, function: Any, *args: Any) -> list[Any]:
    (size,) = pool.members
    return results(pool.run(size, function, *args))


def both(group: Any, p: Any, counts: list[int], options: dict[str, Any]) -> Any:
    return on_peers(group, moved(p, f"cuda:{rank_of(group)}"), counts, options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank_capacity": 90},
        {"rank_capacity": (30, 100)},  # which drops
        {"preactivation": "recompute"},
        {"recipe": None},
        BIASES,
        {"recipe": None, **BIASES},
        {"recipe": Fp8Recipe(grad_dtype="e5m2", scale="fp32", columns="column")},
    ],
    ids=str,
)
def test_equals_nccl(pool: Pool, options: dict[str, Any]) -> None:
    (size,) = pool.members
    counts = [90, 0, 55, 17, 90, 1, 64, 33][:size]
    run(pool, both, batch(sum(counts)), counts, options)


def on_mine(group: Any, function: Any, p: Any, *args: Any) -> Any:
    return function(group, moved(p, f"cuda:{rank_of(group)}"), *args)


@pytest.mark.parametrize("capacity", [None, 60], ids=["exact", "capacity"])
def test_nothing_that_a_backward_reads_is_overwritten(pool: Pool, capacity: Any) -> None:
    if pool.members.keys() != {2}:
        pytest.skip("the problem is of two ranks")
    run(pool, on_mine, in_flight, batch(110), capacity)


@pytest.mark.parametrize(("capacity", "count"), [(None, 5), (60, 4)], ids=["exact", "capacity"])
def test_meetings_of_a_step(pool: Pool, capacity: Any, count: int) -> None:
    assert set(run(pool, on_mine, meetings, batch(50), capacity)) == {count}


def test_batches_of_other_sizes(pool: Pool) -> None:
    run(pool, on_mine, growing, batch(100))


def by_auto(group: Any, p: Any) -> float:
    """Seconds of a first forward where one rank has no memory to share; then with it."""
    from torch.distributed import _symmetric_memory

    ranks, mine = list(range(group.size())), rank_of(group)
    want = p.run(layer_of(p, group, transport="nccl"))
    of = _symmetric_memory.empty

    def empty(*args: Any, **kwargs: Any) -> Any:
        if mine == len(ranks) - 1:
            raise torch.OutOfMemoryError("no memory")
        return of(*args, **kwargs)

    _symmetric_memory.empty = empty  # type: ignore[assignment]
    layer = layer_of(p, dist.new_group(ranks), transport="auto")
    start = time.monotonic()
    try:
        assert_same(p.run(layer), want)
    finally:
        _symmetric_memory.empty = of
    taken = time.monotonic() - start
    assert layer._exchange._peers is None  # type: ignore[union-attr]
    layer = layer_of(p, dist.new_group(ranks), transport="auto")
    assert_same(p.run(layer), want)
    assert layer._exchange._peers is not None  # type: ignore[union-attr]
    return taken


def test_auto_takes_the_memory_that_all_ranks_have(pool: Pool) -> None:
    for taken in run(pool, on_mine, by_auto, batch(100)):
        assert taken < 20


def test_random_routings(pool: Pool) -> None:
    run(pool, on_mine, random_routings, batch(1), 300)


def two_streams(group: Any, p: Any) -> None:
    """Two batches on a stream each, forward and backward, again and again without a wait."""
    layers = [layer_of(p, group, transport=t) for t in ("nccl", "peer", "peer")]
    other = replace(p, x=p.x.flip(0), topk_idx=p.topk_idx.flip(0))
    want = [q.run(layers[0]) for q in (p, other)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs, grads = [], []
    for _ in range(20):
        for q, layer, stream in zip((p, other), layers[1:], streams, strict=True):
            with torch.cuda.stream(stream):
                x, probs = q.x.clone().requires_grad_(), q.probs.clone().requires_grad_()
                out = layer(x, q.topk_idx, probs)
                outs.append(out)
                grads.append(torch.autograd.grad(out, (x, probs), q.dout))
    torch.cuda.synchronize()
    for n, (out, (dx, dprobs)) in enumerate(zip(outs, grads, strict=True)):
        assert torch.equal(out, want[n % 2].out)
        assert torch.equal(dx, want[n % 2].dx)
        assert torch.equal(dprobs, want[n % 2].dprobs)


def test_two_batches_on_two_streams(pool: Pool) -> None:
    run(pool, on_mine, two_streams, batch(1000))


def replayed(group: Any, p: Any) -> None:
    """A captured step, replayed under other routings, between eager ones."""
    tokens = p.x.shape[0]
    layer = layer_of(p, group, rank_capacity=(tokens, 2 * tokens * SLOTS), transport="peer")
    x, probs, idx = p.x.clone().requires_grad_(), p.probs.clone().requires_grad_(), p.topk_idx
    leaves = (x, probs, *layer.parameters())

    def step() -> Any:
        out = layer(x, idx, probs)
        return out, torch.autograd.grad(out, leaves, p.dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grads = step()
    for seed in range(6):
        q = moved(batch(tokens, seed=seed + 7 * rank_of(group)), x.device)
        with torch.no_grad():
            for into, value in ((x, q.x), (probs, q.probs), (idx, q.topk_idx)):
                into.copy_(value)
        for _ in range(1 + seed % 3):
            graph.replay()
        eager_out, eager_grads = step()
        assert torch.equal(out, eager_out)
        for captured, eager in zip(grads, eager_grads, strict=True):
            assert torch.equal(captured, eager)
    layer.check()


def test_one_graph_for_every_routing(pool: Pool) -> None:
    run(pool, on_mine, replayed, batch(200))


def captured_after_eager_steps(group: Any, p: Any) -> None:
    """Steps on the default stream, by exact sizes too, and then a capture of one, `.grad` and all:
    it joins no stream that it did not come to by its own."""
    tokens = p.x.shape[0]
    capacity = (tokens, 2 * tokens * SLOTS)
    layer = layer_of(p, group, rank_capacity=capacity, transport="peer")
    x, probs = p.x.clone().requires_grad_(), p.probs.clone().requires_grad_()
    leaves = (x, probs, *layer.parameters())

    def step() -> list[Any]:
        for leaf in leaves:
            leaf.grad = None
        out = layer(x, p.topk_idx, probs)
        out.backward(p.dout)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    want = step()
    p.run(layer_of(p, group, transport="peer"))
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for _ in range(3):
        for _ in range(2):
            graph.replay()
        for got in (made, step()):
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b)
    layer.check()


def test_a_step_captured_after_eager_steps(pool: Pool) -> None:
    run(pool, on_mine, captured_after_eager_steps, batch(200))


def captured_in_turn(group: Any, p: Any) -> None:
    """Steps of both transports, each captured behind the other, replayed in turn as often as
    benchmarks/ep.py does; and again when an eager batch has made the memory grow."""
    tokens = p.x.shape[0]
    capacity = (tokens, 2 * tokens * SLOTS)
    layers = [layer_of(p, group, rank_capacity=capacity, transport=t) for t in ("nccl", "peer")]
    x, probs = p.x.clone().requires_grad_(), p.probs.clone().requires_grad_()
    graphs, wants, made = [], [], []
    for layer in layers:
        leaves = (x, probs, *layer.parameters())

        def step(layer: Any = layer, leaves: Any = leaves) -> list[Any]:
            out = layer(x, p.topk_idx, probs)
            return [out, *torch.autograd.grad(out, leaves, p.dout)]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            wants.append(step())
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            made.append(step())
    several = replace(
        p, **{f: getattr(p, f).repeat(3, 1) for f in ("x", "topk_idx", "probs", "dout")}
    )
    for _ in range(2):
        for _ in range(8):
            for graph in graphs:
                graph.replay()
                graph.replay()
        for got, want in zip(made, wants, strict=True):
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b)
        several.run(layer_of(p, group, transport="peer"))  # needs more memory


def test_graphs_of_both_transports_in_turn(pool: Pool) -> None:
    run(pool, on_mine, captured_in_turn, batch(2000))


def losing_a_peer(group: Any, when: str) -> tuple[str, float]:
    device = torch.device("cuda", rank_of(group))
    layer = MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, group=group, transport="peer", device=device)
    x = torch.randn(9, HIDDEN, device=device).bfloat16().requires_grad_()
    idx = torch.arange(27, device=device).view(9, SLOTS) % EXPERTS
    probs = torch.ones(9, SLOTS, device=device)
    layer(x, idx, probs)  # all is well
    out = layer(x, idx, probs) if when == "backward" else None
    torch.cuda.synchronize()
    if rank_of(group) == 1:
        time.sleep(0.5)
        end_at(when, layer, x, idx, probs)
    if when != "combine":
        time.sleep(1.5)
    start = time.monotonic()
    try:
        if out is not None:
            out.sum().backward()
        layer(x, idx, probs)
        layer.check()
    except RuntimeError as error:
        taken = time.monotonic() - start
        layer.down_proj.cpu()  # the device still serves
        return str(error), taken
    return "", 0.0


@pytest.mark.parametrize("when", ["forward", "combine", "backward"])
def test_a_lost_peer_is_an_error_in_bounded_time(when: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = Pool(2, {2: [0, 1]}, timeout=5.0, backend="nccl")
    try:
        error, seconds = results(pool.run(2, losing_a_peer, when, wait_for=[0]))[0]
    finally:
        pool.close()
    assert "every rank must come to an exchange within the group's timeout of 5 s" in error
    assert seconds < 5 + 5
