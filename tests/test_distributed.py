"""Expert parallelism over gloo: equal to the layer of one process on the concatenated batch.

What is not a sum over ranks is bit-equal: gradients of the probs and of the weights. out and dx are
sums over the ranks a token went to of partial sums rounded to bfloat16, added in float32 in rank
order and rounded once: bit-equal to the same sum of the single-process layer's outputs when each
rank's experts alone are routed to; and so within the bound below of the single-process layer.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ranks
from fp8moe_cutlass import Activation, Fp8Recipe, ops, telemetry
from fp8moe_cutlass.nn import (
    MoE,
    MoEExperts,
    Router,
    RoutingRule,
    SharedExpert,
    reuse_fp8_weights,
    shard_experts,
)
from moe_problem import Problem, assert_same, problem, run_unaligned
from ranks import MEMBERS, Pool, results
from reference import Result, relative_error

EXPERTS, SLOTS, HIDDEN, INTERMEDIATE = (
    24,
    3,
    208,
    112,
)  # off every tile; 24 divides by 1, 2, 3, 4, 8
FP8 = Fp8Recipe()


pool = ranks.pool(8, MEMBERS)


# ---- the batch, its shares, and what one process makes of it ------------------------------------


def batch(tokens: int, **options: Any) -> Problem:
    return problem(tokens, SLOTS, EXPERTS, HIDDEN, INTERMEDIATE, **options)


def shares(counts: list[int]) -> list[slice]:
    ends = list(itertools.accumulate(counts))
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def share(p: Problem, part: slice) -> Problem:
    """The tokens of one rank."""
    mine = (t[part] for t in (p.x, p.topk_idx, p.probs, p.dout))
    x, topk_idx, probs, dout = (t.clone() for t in mine)
    return replace(p, x=x, topk_idx=topk_idx, probs=probs, dout=dout)


def layer_of(p: Problem, group: Any, **options: Any) -> MoEExperts:
    """This rank's part of the layer with the problem's weights."""
    dtype = options.pop("dtype", p.gate_up.dtype)
    options = {"device": p.x.device, "dtype": dtype, "group": group, **options}
    return p.fill(MoEExperts(*p.down.shape, **options))


def rank_of(group: Any) -> int:
    return torch.distributed.get_rank(group)


def on_a_rank(group: Any, p: Problem, counts: list[int], options: dict[str, Any]) -> Any:
    """Run the layer on this rank's share, twice; (Result, dropped)."""
    layer = layer_of(p, group, **options)
    mine = share(p, shares(counts)[rank_of(group)])
    first = mine.run(layer)
    dropped = layer.dropped.clone()
    layer.zero_grad()
    again = mine.run(layer)
    for name in vars(first):
        assert torch.equal(getattr(first, name), getattr(again, name)), f"two runs: {name}"
    assert torch.equal(layer.dropped, 2 * dropped)
    return first, dropped.tolist()


def joined(found: list[Result]) -> Result:
    """The results of all ranks as one."""
    first = found[0]
    return type(first)(*(torch.cat([getattr(r, name) for r in found]) for name in vars(first)))


def alone(pool: Pool, function: Any, *args: Any) -> Any:
    """function(*args) in one process, as single-threaded as the ranks."""
    return results(pool.run(1, _without_a_group, function, args))[0]


def _without_a_group(_: Any, function: Any, args: tuple[Any, ...]) -> Any:
    return function(*args)


def expected(p: Problem, ranks: int, options: dict[str, Any]) -> Result:
    """What `ranks` ranks must give, from the layer of one process alone.

    A rounding to bfloat16 moves a value by at most 2^-8 of itself: each partial sum's, and both
    final ones'. 2^-16 is more than enough for the float32 sums.
    """
    single = p.run(p.experts(**options))
    owner = p.topk_idx.div(EXPERTS // ranks, rounding_mode="floor")
    one_rank = (owner == owner[:, :1]).all(dim=1)
    parts = []
    for r in range(ranks):
        there = replace(p, topk_idx=p.topk_idx.masked_fill(owner != r, -1))
        parts.append(there.run(there.experts(**options)))
    want = replace(single)
    for name in ("out", "dx"):
        terms = torch.stack([getattr(part, name).bfloat16().float() for part in parts])
        total = torch.zeros_like(terms[0])
        for term in terms:
            total += term
        value = getattr(single, name)
        total = total.bfloat16().to(value.dtype)
        bound = 2**-8 * (terms.abs().sum(0) + total.abs() + value.abs())
        assert ((total - value).abs() <= bound + 2**-16 * terms.abs().sum(0)).all(), name
        assert torch.equal(total[one_rank], value[one_rank]), name
        setattr(want, name, total)
    return want


def assert_equal(got: Result, want: Result) -> None:
    for name in vars(want):
        a, b = getattr(got, name), getattr(want, name)
        assert a.dtype == b.dtype, name
        assert a.shape == b.shape, name
        assert torch.equal(a, b), f"{name}: {int((a != b).sum())} of {a.numel()} differ"


def check(pool: Pool, counts: list[int], p: Problem, *capacities: Any, **options: Any) -> None:
    """Every rank's results, with each capacity, are those of one process; nothing is dropped."""
    want = alone(pool, expected, p, len(counts), options)
    for rank_capacity in capacities or (None,):
        asked = {**options, "rank_capacity": rank_capacity}
        found = results(pool.run(len(counts), on_a_rank, p, counts, asked))
        assert [dropped for _, dropped in found] == [[0, 0, 0]] * len(counts)
        assert_equal(joined([r for r, _ in found]), want)


# ---- the same as one process --------------------------------------------------------------------

COUNTS = {1: [90], 2: [70, 41], 3: [30, 0, 75], 4: [40, 33, 1, 50], 8: [9, 30, 0, 17, 22, 1, 12, 8]}
FP8_AND_BF16 = pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])


@FP8_AND_BF16
@pytest.mark.parametrize("ranks", COUNTS)
def test_equals_one_process(pool: Pool, ranks: int, recipe: Any) -> None:
    counts = COUNTS[ranks]
    check(pool, counts, batch(sum(counts)), None, max(counts), recipe=recipe)


GPT_OSS = Activation(alpha=1.702, offset=1.0, limit=7.0, interleaved=True)
BIASES: dict[str, Any] = {"bias": True, "activation": GPT_OSS}
OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"recipe": FP8, "preactivation": "recompute"},
    "recompute_bf16": {"recipe": None, "preactivation": "recompute"},
    "fp8_z": {"recipe": FP8, "preactivation": "save_fp8"},
    "column": {"recipe": Fp8Recipe(columns="column")},
    "fp32_scales": {"recipe": Fp8Recipe(scale="fp32", columns="column")},
    "e5m2_gradients": {"recipe": Fp8Recipe(grad_dtype="e5m2")},
    "weighted_output": {"recipe": Fp8Recipe(weighting="output")},
    "biases": BIASES,
    "biases_bf16": {"recipe": None, **BIASES},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(pool: Pool, name: str) -> None:
    check(pool, [40, 33, 1, 50], batch(124), None, (64, 300), **OPTIONS[name])


@FP8_AND_BF16
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dtypes(pool: Pool, dtype: torch.dtype, recipe: Any) -> None:
    check(pool, [25, 31], batch(56, dtype=dtype), recipe=recipe)


def routings() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(5)
    some = torch.randint(0, EXPERTS, (120, SLOTS), generator=g)
    return {
        "one_rank_takes_all": some % 6 + 6,  # rank 1 of 4
        "one_expert_takes_all": torch.full((120, SLOTS), 17),
        "dropped": some.masked_fill(torch.rand(some.shape, generator=g) < 0.5, -1),
        "all_dropped": torch.full((120, SLOTS), -1),
        "named_twice": some[:, :1].expand(-1, SLOTS).contiguous(),
        "int32": some.int(),
    }


@FP8_AND_BF16
@pytest.mark.parametrize("name", routings())
def test_routings(pool: Pool, name: str, recipe: Any) -> None:
    check(pool, [60, 20, 0, 40], batch(120, topk_idx=routings()[name]), None, 60, recipe=recipe)


@FP8_AND_BF16
def test_nobody_has_tokens(pool: Pool, recipe: Any) -> None:
    check(pool, [0, 0], batch(0), None, 8, recipe=recipe)


# ---- a rank_capacity that is too small ----------------------------------------------------------


def clipped(p: Problem, counts: list[int], rows: int, most: int) -> tuple[Problem, list[list[int]]]:
    """The batch without what finds no place, and what each rank counts as dropped."""
    ranks, share_of = len(counts), EXPERTS // len(counts)
    idx, dropped = p.topk_idx.clone(), [[0, 0, 0] for _ in counts]
    for source, part in enumerate(shares(counts)):
        for rank in range(ranks):
            tokens = [t for t in range(part.start, part.stop) if (idx[t] // share_of == rank).any()]
            dropped[source][0] += len(tokens[rows:])
            for t in tokens[rows:]:
                idx[t, idx[t] // share_of == rank] = -1
    for rank in range(ranks):
        mine = [(int(e), t, s) for t, row in enumerate(idx) for s, e in enumerate(row)]
        mine = sorted(a for a in mine if a[0] >= 0 and a[0] // share_of == rank)
        dropped[rank][2] += len(mine[most:])
        for _, t, s in mine[most:]:
            idx[t, s] = -1
    return replace(p, topk_idx=idx), dropped


@FP8_AND_BF16
@pytest.mark.parametrize(("rows", "most"), [(9, 1000), (1000, 50), (12, 60)])
def test_overflow_is_dropped_and_counted(pool: Pool, rows: int, most: int, recipe: Any) -> None:
    counts = [30, 25, 0, 40]
    p = batch(95)
    kept, dropped = clipped(p, counts, rows, most)
    assert torch.tensor(dropped).sum() > 10
    options = {"recipe": recipe, "rank_capacity": (rows, most)}
    found = results(pool.run(4, on_a_rank, p, counts, options))
    assert [d for _, d in found] == dropped
    assert_equal(joined([r for r, _ in found]), alone(pool, expected, kept, 4, {"recipe": recipe}))


def overflowing(group: Any, p: Problem) -> None:
    layer = layer_of(p, group, rank_capacity=1)
    buffer = layer.dropped
    assert buffer.tolist() == [0, 0, 0]
    layer.check()
    with torch.inference_mode():
        layer(p.x, p.topk_idx, p.probs)
    layer(p.x, p.topk_idx, p.probs)
    with pytest.raises(ValueError, match=r"\d+ rows beyond rank_capacity"):
        layer.check()
    assert layer.dropped.data_ptr() == buffer.data_ptr()  # one memory, whatever runs first


def test_check_raises(pool: Pool) -> None:
    results(pool.run(2, overflowing, batch(20)))


# ---- everything else works as on one rank -------------------------------------------------------


def on_views_of_flat_buffers(group: Any, p: Problem, recipe: Any) -> None:
    want = p.run(layer_of(p, group, recipe=recipe))
    assert_same(run_unaligned(p, layer_of(p, group, recipe=recipe)), want)


@FP8_AND_BF16
def test_views_of_flat_buffers(pool: Pool, recipe: Any) -> None:
    results(pool.run(2, on_views_of_flat_buffers, batch(20), recipe))


def same(got: Result, want: Result, what: str) -> None:
    for name in vars(want):
        assert torch.equal(getattr(got, name), getattr(want, name)), f"{what}: {name}"


class Checkpointed(nn.Module):
    def __init__(self, layer: MoEExperts, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant
        self.gate_up_proj, self.down_proj = layer.gate_up_proj, layer.down_proj

    def forward(self, *args: Any) -> Tensor:
        return checkpoint(self.layer, *args, use_reentrant=self.reentrant)


def as_on_one_rank(group: Any, p: Problem, options: dict[str, Any]) -> None:
    """Each way of calling the layer against the plain one, on this rank."""
    mine = share(p, shares([20, 33])[rank_of(group)])
    layer = layer_of(p, group, **options)
    args = (mine.x, mine.topk_idx, mine.probs)
    want = mine.run(layer)

    with torch.no_grad():
        out = layer(*args)
    assert out.grad_fn is None
    assert torch.equal(out, want.out)
    with torch.inference_mode():
        assert torch.equal(layer(*args), want.out)
    shaped = layer(mine.x[None], mine.topk_idx[None], mine.probs[None])
    assert torch.equal(shaped[0], want.out)

    delayed = layer_of(p, group, **options, delay_wgrad=True)
    assert mine.run(delayed).dgate_up is None
    delayed.backward_dw()
    assert torch.equal(delayed.gate_up_proj.grad, want.dgate_up)
    assert torch.equal(delayed.down_proj.grad, want.ddown)

    if layer.recipe is not None:
        again = layer_of(p, group, **options, transposed_weights="recompute")
        same(mine.run(again), want, "transposes recomputed")
        for call in ({}, {"weights": layer.quantize_weights()}):
            layer.zero_grad()
            with reuse_fp8_weights(layer, check=True):
                same(mine.run(layer, **call), want, "reused")

    summed = layer_of(p, group, **options)
    for w in summed.parameters():
        w.main_grad = torch.zeros(w.shape)
    mine.run(summed)
    mine.run(summed)
    assert summed.down_proj.grad is None
    assert torch.equal((summed.down_proj.main_grad / 2).bfloat16(), want.ddown)

    for reentrant in (False, True):
        layer.zero_grad()
        same(mine.run(Checkpointed(layer, reentrant)), want, "checkpoint")

    twin = copy.deepcopy(layer)
    assert twin.group is layer.group
    twin.zero_grad()
    same(mine.run(twin), want, "deepcopy")
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(layer)
    other = layer_of(batch(1, seed=3), group, **options)
    other.load_state_dict(layer.state_dict())
    same(mine.run(other), want, "state_dict")
    assert layer.state_dict()["down_proj"].shape == (EXPERTS // 2, HIDDEN, INTERMEDIATE)

    layer.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        same(mine.run(layer), want, "saved tensor hooks")

    names = {"x": "dx", "probs": "dprobs", "gate_up_proj": "dgate_up", "down_proj": "ddown"}
    for wanted in names:
        leaves = {
            "x": mine.x.clone(),
            "probs": mine.probs.clone(),
            **dict(layer.named_parameters()),
        }
        layer.zero_grad()
        for name, leaf in leaves.items():
            leaf.requires_grad_(name == wanted)
        layer(leaves["x"], mine.topk_idx, leaves["probs"]).backward(mine.dout)
        for name, leaf in leaves.items():
            assert (leaf.grad is None) == (name != wanted)
        assert torch.equal(leaves[wanted].grad, getattr(want, names[wanted])), wanted


@FP8_AND_BF16
@pytest.mark.parametrize("rank_capacity", [None, 40], ids=["exact", "capacity"])
def test_as_on_one_rank(pool: Pool, rank_capacity: Any, recipe: Any) -> None:
    results(
        pool.run(2, as_on_one_rank, batch(53), {"recipe": recipe, "rank_capacity": rank_capacity})
    )


def under_autocast(group: Any, p: Problem, recipe: Any) -> Result:
    mine = share(p, shares([20, 33])[rank_of(group)])
    mine.dout = mine.dout.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        return mine.run(layer_of(p, group, recipe=recipe))


@FP8_AND_BF16
def test_autocast(pool: Pool, recipe: Any) -> None:
    p = batch(53, dtype=torch.float32)
    got = joined(results(pool.run(2, under_autocast, p, recipe)))
    low = replace(p, x=p.x.bfloat16(), dout=p.dout.bfloat16())
    want = alone(pool, expected, low, 2, {"recipe": recipe, "dtype": torch.float32})
    want.dx = want.dx.float()
    assert_equal(got, want)


def kept_by_dcp(group: Any, folder: str) -> tuple[Tensor, Tensor]:
    """This rank's experts, and what torch.distributed.checkpoint gives it back."""
    layer = MoEExperts(4, 128, 128, group=group)
    mine = layer.down_proj.detach().clone()
    dcp.save({"layer": layer.state_dict()}, checkpoint_id=folder, process_group=group)
    found = {"layer": layer.state_dict()}
    dcp.load(found, checkpoint_id=folder, process_group=group)
    return mine, found["layer"]["down_proj"]


def test_a_checkpoint_of_plain_shares_keeps_one_rank(pool: Pool, tmp_path: Path) -> None:
    """As several-gpus.md says; shares of shard_experts are DTensors, and kept."""
    (first, one), (second, two) = results(pool.run(2, kept_by_dcp, str(tmp_path)))
    assert not torch.equal(first, second)
    assert torch.equal(one, two)
    assert torch.equal(one, first) or torch.equal(one, second)


def drawn(group: Any) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(11)
    layer = MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, group=group)
    return layer.gate_up_proj.detach(), layer.down_proj.detach(), torch.rand(3)


def test_ranks_draw_the_layer_of_one_process(pool: Pool) -> None:
    gate_up, down, after = zip(*results(pool.run(4, drawn)), strict=True)
    want = alone(pool, drawn, None)
    assert torch.equal(torch.cat(gate_up), want[0])
    assert torch.equal(torch.cat(down), want[1])
    assert all(torch.equal(state, want[2]) for state in after)


def fp8_on_a_rank(group: Any, p: Problem, counts: list[int]) -> Any:
    """Frozen FP8 experts of a whole checkpoint, beside the layer that quantizes: same bits, and the
    rank's own experts come out under their numbers among all."""
    layer = layer_of(p, group)
    whole = dict(p.experts().fp8_tensors("mlp."))
    frozen = MoEExperts.from_fp8(whole, "mlp.", num_experts=EXPERTS, group=group)
    mine = share(p, shares(counts)[rank_of(group)])
    want, got = mine.run(layer), mine.run(frozen)
    for name in ("out", "dx", "dprobs"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    written = dict(frozen.fp8_tensors("mlp."))
    for name, t in written.items():
        assert torch.equal(t.view(torch.uint8), whole[name].view(torch.uint8)), name
    fused = dict(p.experts().fp8_tensors(fused=True))
    again = MoEExperts.from_fp8(fused, num_experts=EXPERTS, group=group)
    assert torch.equal(again.down_proj.view(torch.uint8), frozen.down_proj.view(torch.uint8))
    with pytest.raises(ValueError, match="fused must be False with a group"):
        again.fp8_tensors(fused=True)
    from_whole = MoEExperts.from_fp8(whole, "mlp.", num_experts=EXPERTS)
    model = torch.nn.Sequential(from_whole, torch.nn.Linear(8, 8))
    ours = shard_experts(model, group)
    assert ours == set(from_whole.parameters())
    assert from_whole.down_proj.shape == frozen.down_proj.shape
    assert torch.equal(mine.run(from_whole).out, want.out)
    assert list(dict(from_whole.fp8_tensors("mlp."))) == list(written)
    # Neither copies a rank's codes to another, as it does with parameters:
    torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
    torch.distributed.fsdp.fully_shard(model, mesh=mesh, ignored_params=ours)
    for name, t in from_whole.fp8_tensors("mlp."):
        assert torch.equal(t.view(torch.uint8), whole[name].view(torch.uint8)), name
    sharded = p.experts()
    shard_experts(sharded, group)
    assert list(dict(sharded.fp8_tensors("mlp."))) == list(written)
    for name, t in sharded.fp8_tensors("mlp."):
        assert torch.equal(t.view(torch.uint8), whole[name].view(torch.uint8)), name
    return list(written)


def test_experts_of_an_fp8_checkpoint(pool: Pool) -> None:
    p = problem(sum(COUNTS[2]), SLOTS, EXPERTS, HIDDEN, 128)
    names = results(pool.run(2, fp8_on_a_rank, p, COUNTS[2]))
    assert sorted(names[0] + names[1]) == sorted(dict(p.experts().fp8_tensors("mlp.")))


def moe_on_a_rank(group: Any, x: Tensor, dout: Tensor, parts: list[slice]) -> list[Tensor]:
    torch.manual_seed(2)
    router = Router(HIDDEN, EXPERTS, SLOTS, group=group)
    experts = MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, group=group)
    layer = MoE(router, experts, SharedExpert(HIDDEN, 64))
    part = parts[rank_of(group) if group else 0]
    mine = x[part].clone().requires_grad_()
    out = layer(mine)
    out.backward(dout[part])
    layer.experts.check()
    twin = copy.deepcopy(layer)
    assert twin.router.group is twin.experts.group is group
    grads = [layer.router.weight.grad, layer.shared_expert.down_proj.weight.grad.float()]
    return [out.detach(), mine.grad, layer.experts.down_proj.grad, *grads]


def test_moe(pool: Pool) -> None:
    p = batch(300)
    *rows, experts, router, shared = zip(
        *results(pool.run(4, moe_on_a_rank, p.x, p.dout, shares([100, 80, 0, 120]))), strict=True
    )
    got = [*(torch.cat(t) for t in (*rows, experts)), sum(router), sum(shared)]
    want = alone(pool, moe_on_a_rank, None, p.x, p.dout, [slice(None)])
    for name, a, b in zip(("out", "dx", "experts", "router", "shared"), got, want, strict=True):
        assert relative_error(a, b) < 0.01, name  # bfloat16 roundings of partial sums


def router_on_a_rank(group: Any, x: Tensor, padding: Tensor, parts: list[slice]) -> list[Tensor]:
    """The balancing loss and its gradient of this rank's tokens, the load of all."""
    torch.manual_seed(2)
    rule = RoutingRule(
        score="sigmoid", selection_bias=True, num_groups=4, topk_groups=2, best_per_group=2
    )
    router = Router(HIDDEN, EXPERTS, SLOTS, rule, group=group)
    router.selection_bias.normal_()
    part = parts[rank_of(group) if group else 0]
    routing = router(x[part], padding=padding[part])
    loss = router.balancing_loss(routing)
    loss.backward()
    return [loss.detach(), router.weight.grad, routing.tokens_per_expert]


def test_a_routers_loss_is_that_of_one_process(pool: Pool) -> None:
    """The ranks' losses, averaged by their tokens without padding; a rank may have none."""
    x, padding = torch.randn(300, HIDDEN), torch.rand(300) < 0.3
    parts = shares([100, 80, 0, 120])
    losses, grads, loads = zip(
        *results(pool.run(4, router_on_a_rank, x, padding, parts)), strict=True
    )
    loss, grad, load = router_on_a_rank(None, x, padding, [slice(None)])
    tokens = torch.tensor([int((~padding[part]).sum()) for part in parts])
    by_tokens = tokens / tokens.sum()
    torch.testing.assert_close(sum(by_tokens * torch.stack(losses)), loss)
    torch.testing.assert_close(sum(w * g for w, g in zip(by_tokens, grads, strict=True)), grad)
    assert all(torch.equal(of_rank, load) for of_rank in loads)


def counted(group: Any, p: Problem, parts: list[slice]) -> Tensor:
    mine = share(p, parts[rank_of(group) if group else 0])
    layer = layer_of(p, group)
    with telemetry.watch(layer, every=1) as seen:
        mine.run(layer)
    counts = seen.counters[""].counts
    # Of x and dout, and of the rows of both, one per rank of a token's experts.
    counts[[0, 2, 4, 5], :2] = 0
    return counts


def test_telemetry_counts_what_one_process_counts(pool: Pool) -> None:
    p = batch(100)
    p.x *= torch.exp2(torch.linspace(-9, 9, 100))[:, None].bfloat16()  # so that something is lost
    parts = results(pool.run(4, counted, p, shares([30, 0, 50, 20])))
    whole = alone(pool, counted, None, p, [slice(None)])
    assert whole[[1, 3, 4, 5]].any(dim=1).all()
    assert torch.equal(torch.stack(parts).sum(dim=0), whole)


def received_codes(group: Any, p: Problem, parts: list[slice]) -> Tensor:
    layer = layer_of(p, group)
    with telemetry.watch(layer, every=1) as seen:
        share(p, parts[rank_of(group)]).run(layer)
    counts: Tensor = seen.counters[""].counts[[0, 2], :2]
    return counts


def test_telemetry_counts_the_rows_that_a_rank_receives(pool: Pool) -> None:
    p = batch(100)
    p.x *= torch.exp2(torch.linspace(-9, 9, 100))[:, None].bfloat16()
    got = results(pool.run(4, received_codes, p, shares([30, 0, 50, 20])))
    for rank, counts in enumerate(got):
        here = (p.topk_idx // (EXPERTS // 4) == rank).any(dim=1)
        for row, t in zip(counts, (p.x, p.dout), strict=True):
            q = ops.quantize(t[here].contiguous())
            plan = ops.route(1, topk_idx=torch.zeros(int(here.sum()), 1, dtype=torch.int64))
            want = torch.zeros(21, dtype=torch.int64)
            ops.count_codes(q, plan, want)
            assert torch.equal(row, want[:2])


# ---- memory -------------------------------------------------------------------------------------


def kept_bytes(group: Any, p: Problem, keep: dict[str, Any]) -> tuple[int, int, int]:
    """(bytes a forward keeps beside the parameters, rows and assignments received)."""
    layer = layer_of(p, group, transposed_weights="recompute", **keep)
    part = shares([40, 33, 1, 50])[rank_of(group)]
    own = {t.untyped_storage().data_ptr() for t in layer.parameters()}
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        mine = share(p, part)
        out = layer(mine.x, mine.topk_idx, mine.probs.requires_grad_())
    first, share_of = layer.local_experts.start, len(layer.local_experts)
    here = p.topk_idx // share_of == first // share_of
    total = sum(found.values())
    out.sum().backward()
    return total, int(here.any(dim=1).sum()), int(here.sum())


@pytest.mark.parametrize(
    ("keep", "z"),
    [
        ({}, 4 * INTERMEDIATE),
        ({"preactivation": "save_fp8"}, 2 * INTERMEDIATE + 4 * 2),
        ({"preactivation": "recompute"}, 0),
    ],
)
def test_what_is_kept_for_backward(pool: Pool, keep: dict[str, Any], z: int) -> None:
    """The formula of docs/reference/layer.md."""
    found = results(pool.run(4, kept_bytes, batch(124), keep))
    for total, rows, assignments in found:
        row = -(-(HIDDEN + 4 * 2 + 8 * SLOTS) // 16) * 16 + 4 * SLOTS
        want = rows * row + assignments * (12 + z)  # besides the route's plan
        assert want <= total <= want + 512, (total, want)  # the plans' few fixed words


def strides(group: Any, p: Problem, options: dict[str, Any]) -> list[int]:
    """How far apart the rows of x and of dout lie that a backward transposes."""
    layer = layer_of(p, group, **options)
    found = []
    transpose = ops.permute_transpose_fp8

    def seen(q: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(q.data.stride(0))
        return transpose(q, *args, **kwargs)

    ops.permute_transpose_fp8 = seen  # type: ignore[assignment]
    try:
        p.run(layer)
    finally:
        ops.permute_transpose_fp8 = transpose
    return found


@pytest.mark.parametrize("transport", ["nccl", "peer"])
def test_backward_reads_the_rows_as_they_came(pool: Pool, transport: str) -> None:
    """It makes no dense copy of them."""
    want = {ops.packed_row_bytes(HIDDEN, slots) for slots in (0, SLOTS)}
    for found in results(pool.run(2, strides, batch(40), {"transport": transport})):
        assert set(found) == want
