"""integrations.megatron: a parameter per expert by Megatron's names, over one tensor.

Skipped without megatron-core; .ci/run has a step for it.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

import megatron_cpu as mc
import megatron_train as mt
import ranks
from fp8moe_cutlass import SlowPathWarning, slow_path
from fp8moe_cutlass.integrations.megatron import keep_together
from fp8moe_cutlass.integrations.megatron.linears import ExpertLinear

pytestmark = pytest.mark.slow

pool = ranks.pool(2, preload=("megatron_cpu",))


def experts_of(**options: Any) -> Any:
    mc.parallel(1)
    config = mc.config(**options)
    return mc.layer_spec("experts", config).submodules.mlp(config=config).experts


def lies_together(linear: Any) -> bool:
    first, size = linear.weight0.data_ptr(), linear.weight0.nbytes
    return all(w.data_ptr() == first + e * size for e, w in enumerate(linear.weights))


def _names() -> None:
    experts = experts_of()
    names = [f"linear_fc{n}.weight{e}" for n in (1, 2) for e in range(8)]
    assert sorted(k for k, _ in experts.named_parameters()) == names
    assert sorted(experts.state_dict()) == names
    for linear, whole in (
        (experts.linear_fc1, experts.gate_up_proj),
        (experts.linear_fc2, experts.down_proj),
    ):
        assert lies_together(linear)
        assert whole.data_ptr() == linear.weight0.data_ptr()
        for e in range(8):
            assert torch.equal(whole[e], linear.get_parameter(f"weight{e}"))
    assert (experts.linear_fc1.partition_dim, experts.linear_fc2.partition_dim) == (0, 1)
    with pytest.raises((AttributeError, KeyError)):
        experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj)


def test_names(pool: ranks.Pool) -> None:
    mc.on_two(pool, _names)


def _converted() -> None:
    """What gives each parameter memory of its own, or loses Megatron's attributes."""
    made = experts_of()
    want = [t.clone() for t in (made.gate_up_proj, made.down_proj)]
    meta = experts_of(init_model_with_meta_device=True)
    assert meta.linear_fc1.weight0.is_meta
    meta.to_empty(device="cpu")
    meta.load_state_dict(made.state_dict())
    for other in (copy.deepcopy(made), meta, made.half().float(), made.to(torch.float64).float()):
        for linear, whole in ((other.linear_fc1, want[0]), (other.linear_fc2, want[1])):
            assert lies_together(linear)
            assert (linear.whole() - whole).abs().max() < 1e-3
            for w in linear.weights:
                assert (w.allreduce, w.tensor_model_parallel) == (True, True)
                assert w.partition_dim == linear.partition_dim
    assert torch.equal(meta.gate_up_proj, want[0])


def test_conversions(pool: ranks.Pool) -> None:
    mc.on_two(pool, _converted)


def _unread() -> None:
    """What a hook of Megatron finds in .grad beside main_grad."""
    experts = experts_of(params_dtype=torch.bfloat16, bf16=True)
    weights = list(experts.parameters())
    for w in weights:
        w.main_grad, w.grad_added_to_main_grad = torch.zeros(w.shape), False
    rows = torch.randn(32, 128, dtype=torch.bfloat16, requires_grad=True)
    counts = torch.full((8,), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPathWarning)  # these main_grads lie apart
        experts(rows, counts, torch.ones(32))[0].float().sum().backward()
    assert all(w.main_grad.abs().sum() > 0 and w.grad_added_to_main_grad for w in weights)
    for linear in (experts.linear_fc1, experts.linear_fc2):
        assert {w.grad.untyped_storage().nbytes() for w in linear.weights} == {
            linear.weight0.nbytes
        }


def test_gradients_that_nobody_reads_take_the_memory_of_one_expert(pool: ranks.Pool) -> None:
    mc.on_two(pool, _unread)


PADDED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "pad_buckets_for_high_nccl_busbw": True,
    "bucket_size": 60_000,  # three experts
}


def _trained(
    group: Any, ddp: dict[str, Any], together: bool
) -> tuple[list[float], dict[str, Tensor], set[str], bool]:
    """Five steps; what SlowPathWarnings say, and whether memory is one tensor everywhere."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Optimizer

    mc.on_cpu()
    mc.parallel(1)
    own = Optimizer.__dict__["_compute_per_buffer_param_layout"]
    slow_path._said.clear()
    try:
        if together:
            keep_together()
            keep_together()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", SlowPathWarning)
            # No clipping: the norm's sum depends on where buckets end, and so its last bit.
            setup = mt.build("experts", mc.config(), ddp=ddp, optimizer={"clip_grad": 0.0})
            trained = mt.steps(setup, 5)
    finally:
        Optimizer._compute_per_buffer_param_layout = own
    linears = [m for m in setup.chunks[0].modules() if isinstance(m, ExpertLinear)]
    kinds = {str(w.message).split(";")[0] for w in said if w.category is SlowPathWarning}
    return trained.losses, trained.weights, kinds, all(map(lies_together, linears))


def test_experts_that_lie_apart_are_copied(pool: ranks.Pool) -> None:
    """Bit for bit as those that lie together, and said so; keep_together ends it."""
    plain = ranks.results(pool.run(2, _trained, {}, False))
    apart = ranks.results(pool.run(2, _trained, PADDED, False))
    kept = ranks.results(pool.run(2, _trained, PADDED, True))
    for (losses, weights, said, whole), *others in zip(plain, apart, kept, strict=True):
        assert not said
        assert whole
        for other in others:
            assert other[0] == losses
            assert all(torch.equal(other[1][k], w) for k, w in weights.items())
        (_, _, said_apart, apart_whole), (_, _, said_kept, kept_whole) = others
        assert len(said_apart) == 2
        assert not apart_whole
        assert not said_kept
        assert kept_whole
