"""integrations.megatron under Megatron's schedules, gradient buffers and optimizers, on gloo.

Skipped without megatron-core; .ci/run has a step for it.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

import megatron_cpu as mc
import megatron_train as mt
import ranks

pytestmark = pytest.mark.slow

pool = ranks.pool(2, preload=("megatron_cpu",))


# For models of four layers: Megatron's trackers know one number a process.
deep_pool = ranks.pool(2, preload=("megatron_cpu",))


class Job(dict):  # type: ignore[type-arg]
    """What to train: kind, and of `_trained` what differs from its defaults."""


def on_two(pool: ranks.Pool, jobs: list[Job], **common: Any) -> list[list[mt.Trained]]:
    """By rank, what each job came to."""
    return ranks.results(pool.run(2, _trained, [{**common, **job} for job in jobs]))


def _trained(group: Any, jobs: list[dict[str, Any]]) -> list[mt.Trained]:
    from megatron.core.quantization.quant_config import RecipeConfig

    mc.on_cpu()
    found = []
    for job in jobs:
        job = dict(job)
        ep, pp, vpp = job.pop("ep", 1), job.pop("pp", 1), job.pop("vpp", None)
        mc.parallel(ep, pp, vpp)
        options = dict(job.pop("config", {}))
        if pp > 1:
            options |= {
                "pipeline_model_parallel_size": pp,
                "virtual_pipeline_model_parallel_size": vpp,
                "pipeline_dtype": torch.float32,
            }
        if job.pop("flag", False):  # Megatron sets is_first_microbatch, and nothing else changes
            options["quant_recipe"] = RecipeConfig([], {})
        config = mc.config(expert_model_parallel_size=ep, **options)
        number, microbatches = job.pop("steps", 2), job.pop("microbatches", 2)
        reuse = job.pop("reuse", False)
        setup = mt.build(job.pop("kind"), config, vpp=vpp, **job)
        found.append(mt.steps(setup, number, microbatches, reuse=reuse))
    return found


def same(a: mt.Trained, b: mt.Trained) -> bool:
    """Bit for bit."""
    pairs = [(a.first, b.first), (a.weights, b.weights)]
    return a.losses == b.losses and all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in pairs
    )


def near(found: mt.Trained, wanted: mt.Trained, tolerance: float = 6e-3) -> bool:
    return len(found.losses) == len(wanted.losses) and all(
        abs(a - b) < tolerance for a, b in zip(found.losses, wanted.losses, strict=True)
    )


@pytest.mark.parametrize("ep", [1, 2])
def test_beside_sequential(pool: ranks.Pool, ep: int) -> None:
    """Gradients, averaged over data-parallel ranks, and losses; and FP8 weights kept for a step's
    microbatches where Megatron says when it begins, or by reuse_fp8_weights: the same bits, fewer
    quantizations."""
    jobs = [Job(kind="sequential")]
    for kind in ("experts", "layer"):
        jobs += [Job(kind=kind), Job(kind=kind, flag=True), Job(kind=kind, flag=True, reuse=True)]
    for sequential, *ours in on_two(pool, jobs, ep=ep, steps=3):
        for trained in ours:
            assert near(trained, sequential)
            apart = mt.apart(mt.of_experts(trained.first), mt.of_experts(sequential.first))
            assert 0.02 < apart < 0.17
        for every, *kept in (ours[:3], ours[3:]):
            assert every.quantized == 3 * 2 * 2 * 2
            for once in kept:
                assert same(every, once)
                assert once.quantized == 3 * 2 * 2


def test_without_a_recipe(pool: ranks.Pool) -> None:
    """In bfloat16: gradient scaling over ranks is right to the last percent."""
    jobs = [Job(kind="sequential"), *(Job(kind=k, recipe=None) for k in ("experts", "layer"))]
    for sequential, *ours in on_two(pool, jobs, ep=2, steps=1, config={"num_layers": 1}):
        for trained in ours:
            assert mt.apart(mt.of_experts(trained.first), mt.of_experts(sequential.first)) < 0.02


OVERLAP = {"overlap_grad_reduce": True}
SHARDED = {"use_distributed_optimizer": True, **OVERLAP}
GATHER = {"overlap_param_gather": True, **SHARDED}


@pytest.mark.parametrize("ep", [1, 2])
def test_optimizers(pool: ranks.Pool, ep: int) -> None:
    """Overlapped gradients, Megatron's distributed optimizer, parameters gathered before each
    module's forward: the steps of the plain one but for the rounding of the gradients' norm. The
    buckets are small."""
    jobs = [
        Job(kind=kind, ddp=ddp)
        for kind in ("experts", "layer")
        for ddp in ({}, OVERLAP, SHARDED, GATHER)
    ]
    for trained in on_two(pool, jobs, ep=ep, steps=3):
        for plain, *others in (trained[:4], trained[4:]):
            for other in others:
                assert near(other, plain, 2e-4)
                assert mt.apart(other.weights, plain.weights) < 0.01


def test_biases(pool: ranks.Pool) -> None:
    """Their gradients reach main_grad by Megatron's hooks, overlapped or not, in both forms."""
    jobs = [Job(kind=kind, ddp=ddp) for kind in ("experts", "layer") for ddp in ({}, GATHER)]
    for trained in on_two(pool, jobs, ep=2, steps=3, config={"add_bias_linear": True}):
        plain, *others = trained
        of = [n for n in plain.first if re.search(r"experts\.linear_fc[12]\.bias\d$", n)]
        assert len(of) == 2 * 2 * 4  # layers, projections, experts of a rank
        assert all(plain.first[n].any() for n in of)
        for other in others:
            assert near(other, plain)
            assert all(mt.apart({n: other.first[n]}, {n: plain.first[n]}) < 0.1 for n in of)


BF16 = {"bf16": True, "params_dtype": torch.bfloat16}


def test_bf16_masters(pool: ranks.Pool) -> None:
    """bf16 parameters of fp32 masters, which Megatron writes without a version; the flag stays
    right with weights gathered at the last moment."""
    jobs = [Job(kind="sequential"), Job(kind="experts"), Job(kind="experts", flag=True)]
    jobs += [Job(kind="layer"), Job(kind="layer", flag=True)]
    for sequential, *ours in on_two(pool, jobs, ep=1, steps=3, config=BF16, ddp=GATHER):
        assert all(near(trained, sequential) for trained in ours)
        assert same(*ours[:2])
        assert same(*ours[2:])


def test_no_flag_without_megatron_setting_it(pool: ranks.Pool) -> None:
    """config.fp8 None: nobody sets is_first_microbatch again; four steps are of fresh weights."""
    for trained in on_two(pool, [Job(kind="experts"), Job(kind="experts", flag=True)], steps=4):
        assert same(*trained)
        assert trained[0].quantized == 4 * 2 * 2 * 2


def test_delayed_wgrad(pool: ranks.Pool) -> None:
    """overlap_moe_expert_parallel_comm, whose schedule runs backward_dw, with the gradients' own
    overlap: bit-equal to neither, and to FP8 weights kept."""
    overlapped = {**BF16, "overlap_moe_expert_parallel_comm": True}
    delayed = {**overlapped, "delay_wgrad_compute": True}
    late = {**OVERLAP, "delay_wgrad_compute": True}
    jobs = [
        Job(kind="sequential", config=BF16),
        Job(kind="experts", config=BF16, ddp=OVERLAP),
        Job(kind="experts", config=overlapped, ddp=OVERLAP),
        Job(kind="experts", config=delayed, ddp=late),
        Job(kind="experts", config=delayed, ddp=late, flag=True),
    ]
    for sequential, plain, *others in on_two(pool, jobs, ep=2, microbatches=4):
        assert near(plain, sequential)
        assert all(same(plain, other) for other in others)


@pytest.mark.parametrize("vpp", [None, 2])
def test_pipeline(deep_pool: ranks.Pool, vpp: int | None) -> None:
    """1F1B and interleaved, four microbatches, each form: bit-equal however weights are kept."""
    jobs = [Job(kind="sequential")]
    for kind in ("experts", "layer"):
        jobs += [
            Job(kind=kind),
            Job(kind=kind, flag=True),
            Job(kind=kind, transposed_weights="save"),
        ]
    found = on_two(deep_pool, jobs, pp=2, vpp=vpp, microbatches=4, config={"num_layers": 4})
    for sequential, *ours in found:
        assert all(near(trained, sequential) for trained in ours)
        for every, *others in (ours[:3], ours[3:]):
            assert all(same(every, other) for other in others)
    assert found[0][1].losses == []
    assert len(found[1][1].losses) == 2


MTP = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}


def test_repeated_mtp_layer(pool: ranks.Pool) -> None:
    """A layer that runs twice in a microbatch: both gradients are added."""
    jobs = [Job(kind="sequential"), Job(kind="experts"), Job(kind="experts", flag=True)]
    for sequential, every, kept in on_two(pool, jobs, config=MTP, microbatches=4):
        assert same(every, kept)
        assert mt.apart(mt.of_experts(every.first), mt.of_experts(sequential.first)) < 0.17


RECOMPUTED = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "moe_act": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act"],
        "moe_grouped_gemm": True,
    },
}


@pytest.mark.parametrize("kind", ["experts", "layer"])
def test_recomputed(pool: ranks.Pool, kind: str) -> None:
    """Recompute modes: bit-equal to none, with FP8 weights kept or not."""
    jobs = [Job(kind=kind)]
    jobs += [Job(kind=kind, config=c, flag=f) for c in RECOMPUTED.values() for f in (False, True)]
    for none, *others in on_two(pool, jobs, ep=2):
        assert all(same(none, other) for other in others)


def _saved_codes(group: Any, options: dict[str, Any], swapped: dict[str, Any]) -> int:
    mc.on_cpu()
    mc.parallel(1)
    config = mc.config(**options)
    experts = mc.layer_spec("experts", config, **swapped).submodules.mlp(config=config).experts
    sizes = {experts.gate_up_proj.numel(), experts.down_proj.numel()}
    held = 0

    def pack(t: torch.Tensor) -> torch.Tensor:
        nonlocal held
        held += t.numel() if t.element_size() == 1 and t.numel() in sizes else 0
        return t

    counts = torch.full((8,), 2)
    rows = torch.randn(16, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        experts(rows, counts, torch.rand(16))
    return held


def test_what_a_microbatch_holds(pool: ranks.Pool) -> None:
    """FP8 weights saved for the backward of one forward: one byte a parameter with one pipeline
    stage; none with several, or with moe_act."""
    parameters = 8 * 3 * 96 * 128
    staged = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    cases = (
        ({}, {}, parameters),
        (staged, {}, 0),
        (staged, {"transposed_weights": "save"}, parameters),
        (RECOMPUTED["moe_act"], {}, 0),
    )
    for options, swapped, wanted in cases:
        assert ranks.results(pool.run(2, _saved_codes, options, swapped)) == [wanted] * 2
