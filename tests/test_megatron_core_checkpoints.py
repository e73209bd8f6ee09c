"""integrations.megatron in Megatron's distributed checkpoints, from and to SequentialMLP.

Skipped without megatron-core; .ci/run has a step for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from megatron.core.activations import squared_relu

import megatron_cpu as mc
import megatron_train as mt
import ranks

pytestmark = pytest.mark.slow

pool = ranks.pool(2, preload=("megatron_cpu",))


# ---- the model ----------------------------------------------------------------------------------

Weights = dict[str, Tensor]


def _save(kind: str, ep: int, metadata: dict[str, Any], folder: str) -> Weights:
    """Other weights than a new model has; those of this rank's experts."""
    from megatron.core import dist_checkpointing

    mc.parallel(ep)
    model = mc.gpt(kind, mc.config())
    torch.manual_seed(7 + (torch.distributed.get_rank() if ep > 1 else 0))
    for name, p in model.named_parameters():
        if ".experts." in name:
            torch.nn.init.normal_(p.data)
    Path(folder).mkdir(exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), folder)
    return mt.of_experts({n: p.detach() for n, p in model.named_parameters()})


def _load(kind: str, ep: int, metadata: dict[str, Any], folder: str, strict: str) -> Weights:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    mc.parallel(ep)
    model = mc.gpt(kind, mc.config())
    how = {} if strict == "default" else {"strict": StrictHandling(strict)}
    loaded = dist_checkpointing.load(model.sharded_state_dict(metadata=metadata), folder, **how)
    loaded = loaded[0] if isinstance(loaded, tuple) else loaded
    model.load_state_dict(loaded, strict=True)
    return mt.of_experts({n: p.detach() for n, p in model.named_parameters()})


def _everyone(weights: list[Weights], ep: int) -> Weights:
    """All experts."""
    if ep == 1:
        assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
        return weights[0]
    return {k: torch.cat([w[k] for w in weights]) for k in weights[0]}


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("ep", [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize(
    "kinds", [("sequential", "experts"), ("experts", "sequential"), ("layer", "experts")]
)
def test_model(
    pool: ranks.Pool, tmp_path: Path, kinds: tuple[str, str], ep: tuple[int, int], single: bool
) -> None:
    """Every expert's weights, whole, from any expert parallelism to any, under the default
    strictness and the strictest."""
    metadata = {"singleton_local_shards": single}
    saved = mc.on_two(pool, _save, kinds[0], ep[0], metadata, str(tmp_path))
    wanted = _everyone(saved, ep[0])
    for strict in ("default", "raise_all"):
        loaded = mc.on_two(pool, _load, kinds[1], ep[1], metadata, str(tmp_path), strict)
        found = _everyone(loaded, ep[1])
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[k], wanted[k]) for k in wanted)


def _keys(kind: str, metadata: dict[str, Any], options: Any = {}) -> set[tuple[Any, ...]]:  # noqa: B006
    """What a model's checkpoint holds: keys, shapes of all ranks, and this rank's part."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories

    mc.parallel(2)
    state = mc.gpt(kind, mc.config(**options)).sharded_state_dict(metadata=metadata)
    apply_factories(state)
    return {
        (s.key, s.global_shape, s.global_offset, s.replica_id)
        + (() if isinstance(s, ShardedObject) else (s.dtype, s.prepend_axis_num))
        for s in nested_values(state)
    }


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("kind", ["experts", "layer"])
def test_keys(pool: ranks.Pool, kind: str, single: bool) -> None:
    """Key by key what SequentialMLP has, which TEGroupedMLP's are, too."""
    metadata = {"singleton_local_shards": single}
    assert mc.on_two(pool, _keys, kind, metadata) == mc.on_two(pool, _keys, "sequential", metadata)
    if single:
        keys = {key for key, *_ in mc.on_two(pool, _keys, kind, metadata)[1]}
        assert "decoder.layers.1.mlp.experts.experts.7.linear_fc1.weight_v" in keys


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_keys_of_other_experts(pool: ranks.Pool, gated: bool, biases: bool) -> None:
    options: dict[str, Any] = {"add_bias_linear": biases}
    options |= {} if gated else {"activation_func": squared_relu, "gated_linear_unit": False}
    for single in (False, True):
        given = {"singleton_local_shards": single}, options
        wanted = mc.on_two(pool, _keys, "sequential", *given)
        assert mc.on_two(pool, _keys, "experts", *given) == wanted


def _state_dicts() -> None:
    mc.parallel(1)
    config = mc.config()
    spec = mc.layer_spec("experts", config)
    experts = spec.submodules.mlp(config=config).experts
    wanted = {k: v.clone() for k, v in experts.state_dict().items()}
    for form in ("local_experts.{}.{}.weight", "{1}.weight{0}"):
        state: dict[str, Any] = {
            form.format(e, linear): wanted[f"{linear}.weight{e}"]
            for linear in ("linear_fc1", "linear_fc2")
            for e in range(8)
        }
        state |= {"linear_fc1._extra_state": None, "local_experts.3.linear_fc2._extra_state": None}
        for p in experts.parameters():
            torch.nn.init.zeros_(p.data)
        assert not any(experts.load_state_dict(state))
        assert all(torch.equal(v, wanted[k]) for k, v in experts.state_dict().items())
    del state["linear_fc2.weight7"]
    with pytest.raises(RuntimeError, match=r"Missing key.*linear_fc2.weight7"):
        experts.load_state_dict(state)


def test_state_dicts(pool: ranks.Pool) -> None:
    """load_state_dict takes both of Megatron's kinds, by local expert; never a part of one."""
    mc.on_two(pool, _state_dicts)


# ---- the optimizer ------------------------------------------------------------------------------


def _resumed(
    kinds: tuple[str, str], eps: tuple[int, int], ddp: dict[str, Any], how: str, folder: str
) -> Any:
    """(what a step does to the weights, uninterrupted; the same, resumed by the other kind at the
    other expert parallelism)."""
    from megatron.core import dist_checkpointing

    metadata = {"distrib_optim_sharding_type": how} if ddp else {}

    def build(kind: str, ep: int) -> mt.Setup:
        mc.parallel(ep)
        config = mc.config(num_layers=1, expert_model_parallel_size=ep)
        return mt.build(kind, config, ddp=ddp)

    def state(setup: mt.Setup, loading: bool) -> Any:
        model = setup.chunks[0].module.sharded_state_dict()
        sharded = setup.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": sharded}

    setup = build(kinds[0], eps[0])
    before = mt.steps(setup, 3).weights
    Path(folder).mkdir(exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state(setup, False), folder)
    wanted = _moved(before, mt.steps(setup, 1, first=3).weights)

    setup = build(kinds[1], eps[1])
    mt.steps(setup, 1)  # torch's Adam has states only then, which Megatron asks for
    loaded = dist_checkpointing.load(state(setup, True), folder)
    loaded = loaded[0] if isinstance(loaded, tuple) else loaded
    setup.chunks[0].module.load_state_dict(loaded["model"])
    setup.optimizer.load_state_dict(loaded["optimizer"])
    start = {k: p.detach().float().clone() for k, p in setup.parameters().items()}
    if eps[0] == eps[1]:
        assert mt.apart(mt.of_experts(start), mt.of_experts(before)) == 0
    return wanted, _moved(start, mt.steps(setup, 1, first=3).weights)


def _moved(before: Weights, after: Weights) -> Weights:
    return mt.of_experts({k: after[k] - w for k, w in before.items()})


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize(
    ("ddp", "how"), [({}, ""), ({"use_distributed_optimizer": True}, "fully_reshardable")]
)
@pytest.mark.parametrize("kinds", [("sequential", "experts"), ("layer", "sequential")])
def test_optimizer(
    pool: ranks.Pool,
    tmp_path: Path,
    kinds: tuple[str, str],
    ddp: dict[str, Any],
    how: str,
    ep: int,
) -> None:
    """Adam and Megatron's distributed optimizer at the same expert parallelism: the next step moves
    the experts as it would have, but for FP8's error."""
    for wanted, found in mc.on_two(pool, _resumed, kinds, (ep, ep), ddp, how, str(tmp_path)):
        assert mt.apart(found, wanted) < 0.08


@pytest.mark.parametrize("eps", [(2, 4), (4, 2)])
def test_optimizer_of_another_expert_parallelism(tmp_path: Path, eps: tuple[int, int]) -> None:
    """The distributed optimizer's states, from two ranks per copy of the experts to four and back:
    the next step moves every expert as it would have, but for FP8's error."""
    pool = ranks.Pool(4, {4: [0, 1, 2, 3]}, preload=("megatron_cpu",))
    arguments = (("layer", "experts"), eps, {"use_distributed_optimizer": True})
    called = (_resumed, (*arguments, "fully_reshardable", str(tmp_path)))
    try:
        found = ranks.results(pool.run(4, mc.called, *called))
    finally:
        pool.close()
    wanted, moved = (_everyone([f[i] for f in found][: eps[i]], eps[i]) for i in (0, 1))
    assert mt.apart(moved, wanted) < 0.08
