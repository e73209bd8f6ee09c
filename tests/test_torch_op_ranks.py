"""A layer shared by the ranks of a group, compiled: no graph break, eager's bits."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ranks
from fp8moe_cutlass import Fp8Recipe, SlowPathWarning
from ranks import Pool, results
from test_distributed import COUNTS, MEMBERS, batch, layer_of, rank_of, share, shares
from test_torch_op import compiled, equal, step

pool = ranks.pool(8, MEMBERS, timeout=240.0)


def both(group: Any, problems: Any, options: dict[str, Any], main_grad: bool) -> None:
    """This rank's share of each problem, whose sizes differ: eager, then by one graph."""
    torch._dynamo.reset()
    found: list[Any] = []
    for wrap in (lambda layer: layer, compiled):
        layer = layer_of(problems[0][0], group, **options)
        if main_grad:
            for w in layer.parameters():
                w.main_grad = torch.ones(w.shape)
        f = wrap(layer)
        made = []
        for n, (p, counts) in enumerate(problems):
            mine = share(p, shares(counts)[rank_of(group)])
            with torch.compiler.set_stance("default" if n < 2 else "fail_on_recompile"):
                made.append(step(f, mine, layer))
        if main_grad:
            made.append([w.main_grad for w in layer.parameters()])
        made.append([layer.dropped])
        found.append(made)
    for got, want in zip(found[1], found[0], strict=True):
        equal(got, want)


@pytest.mark.parametrize(
    ("rank_capacity", "options"),
    [
        (None, {}),
        (None, {"preactivation": "recompute", "transposed_weights": "recompute"}),
        (None, {"recipe": None}),
        (60, {}),
        (60, {"recipe": None}),
        ((20, 30), {"recipe": Fp8Recipe(scale="fp32", columns="column")}),
    ],
    ids=["exact", "recompute", "bf16", "capacity", "bf16_capacity", "dropped"],
)
@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
def test_compiled(pool: Pool, rank_capacity: Any, options: dict[str, Any], main_grad: bool) -> None:
    sizes = [COUNTS[2], [50, 60], [33, 7]]  # more sizes than graphs
    problems = [(batch(sum(counts), seed=n), counts) for n, counts in enumerate(sizes)]
    results(pool.run(2, both, problems, {**options, "rank_capacity": rank_capacity}, main_grad))


@pytest.mark.parametrize("rank_capacity", [None, 60], ids=["exact", "capacity"])
def test_layers_share_a_graph(pool: Pool, rank_capacity: int | None) -> None:
    results(pool.run(2, one_by_one, [batch(60, seed=n) for n in range(3)], rank_capacity))


def one_by_one(group: Any, problems: Any, rank_capacity: int | None) -> None:
    """Layers of one configuration, compiled as the blocks of a model are."""
    torch._dynamo.reset()
    layers = [layer_of(p, group, rank_capacity=rank_capacity) for p in problems]
    mine = share(problems[0], shares([35, 25])[rank_of(group)])
    want = [step(layer, mine, layer) for layer in layers]
    found = [step(compiled(layers[0]), mine, layers[0])]
    with torch.compiler.set_stance("fail_on_recompile"):
        found += [step(compiled(layer), mine, layer) for layer in layers[1:]]
    for got, one in zip(found, want, strict=True):
        equal(got, one)
    assert not torch.equal(want[0][0], want[1][0])


def test_a_graph_that_breaks_says_so(pool: Pool) -> None:
    results(pool.run(2, without_fullgraph, batch(60)))


def without_fullgraph(group: Any, p: Any) -> None:
    mine = share(p, shares([35, 25])[rank_of(group)])
    for rank_capacity, told in ((None, 1), (60, 0)):
        torch._dynamo.reset()
        layer = layer_of(p, group, rank_capacity=rank_capacity)
        want = step(layer, mine, layer)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", SlowPathWarning)
            equal(step(torch.compile(layer, backend="aot_eager"), mine, layer), want)
            slow = [str(w.message) for w in said if w.category is SlowPathWarning]
        assert len(slow) == told, slow
        assert all("pass fullgraph=True" in message for message in slow)


def test_equal_calls_add_to_main_grad_each(pool: Pool) -> None:
    results(pool.run(2, called_twice, batch(60)))


def called_twice(group: Any, p: Any) -> None:
    torch._dynamo.reset()
    layer, sums = layer_of(p, group), []
    mine = share(p, shares([35, 25])[rank_of(group)])
    twice = lambda *given: layer(*given) + layer(*given)  # noqa: E731
    for f in (twice, compiled(twice)):
        for w in layer.parameters():
            w.main_grad = torch.zeros(w.shape)
        step(f, mine, layer)
        sums.append([w.main_grad for w in layer.parameters()])
    equal(*sums)


def test_a_rank_receives_nothing(pool: Pool) -> None:
    """Every token goes to the first rank's experts; then one rank has no tokens at all."""
    ids = torch.zeros(60, 3, dtype=torch.int64)
    ids[:, 1], ids[:, 2] = 1, 2
    problems = [
        (batch(60, topk_idx=ids), [35, 25]),
        (batch(60, seed=1), [0, 60]),
        (batch(60, topk_idx=ids), [60, 0]),
    ]
    results(pool.run(2, some_steps, problems, []))


@pytest.mark.parametrize("frozen", [["gate_up_proj"], ["gate_up_proj", "down_proj"]], ids=str)
def test_frozen_weights(pool: Pool, frozen: list[str]) -> None:
    """No backward reads the rows that come, and none is kept."""
    problems = [(batch(60, seed=n), counts) for n, counts in enumerate(([35, 25], [20, 40]))]
    results(pool.run(2, some_steps, problems, frozen))


def some_steps(group: Any, problems: Any, frozen: list[str]) -> None:
    torch._dynamo.reset()
    layer = layer_of(problems[0][0], group)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    fast = compiled(layer)
    for p, counts in problems:
        mine = share(p, shares(counts)[rank_of(group)])
        equal(step(fast, mine, layer), step(layer, mine, layer))


class Dense(TorchDispatchMode):
    """The block's operators give tensors without gaps, as their fakes say and inductor asserts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        if "fp8moe" in str(op):
            self.seen += 1
            assert all(t.is_contiguous() for t in made), [t.stride() for t in made]
        return made


@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
def test_outputs_are_dense(pool: Pool, recipe: Fp8Recipe | None) -> None:
    """Of three slots per token, which are no multiple of 16 bytes."""
    results(pool.run(2, dense, batch(60), recipe))


def dense(group: Any, p: Any, recipe: Fp8Recipe | None) -> None:
    layer = layer_of(p, group, recipe=recipe)
    mine = share(p, shares([35, 25])[rank_of(group)])
    assert mine.topk_idx.shape[1] == 3
    with Dense() as mode:
        step(layer, mine, layer)
    assert mode.seen == 2


@pytest.mark.parametrize("save", [True, False])
def test_selective_checkpoint(pool: Pool, save: bool) -> None:
    """Where the operator's outputs are saved, tokens are sent once, otherwise again."""
    results(pool.run(2, checkpointed, batch(60), save))


def checkpointed(group: Any, p: Any, save: bool) -> None:
    layer = layer_of(p, group)
    mine = share(p, shares([35, 25])[rank_of(group)])
    want, sent = step(layer, mine, layer), []
    send = type(layer._move).send
    saved = [torch.ops.fp8moe.group_experts.default] if save else []
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    again = functools.partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer._move), "send", lambda *a: sent.append(1) or send(*a))
        got = step(again, mine, layer)
    equal(got, want)
    assert len(sent) == (1 if save else 2)
