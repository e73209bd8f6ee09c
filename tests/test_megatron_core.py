"""integrations.megatron in a GPT of megatron-core, on gloo: beside Megatron's own SequentialMLP.

Skipped without megatron-core; .ci/run has a step for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

import megatron_cpu as mc
import ranks

pytestmark = pytest.mark.slow

# FP8's own error of a layer's gradients is 6 to 10%. One layer: in a second one tokens near a tie
# go to other experts.
FP8 = 0.11


pool = ranks.pool(2, preload=("megatron_cpu",))


def _gradients(kind: str, config: Any, state: Any, **swapped: Any) -> tuple[float, dict[str, Any]]:
    return _gradients_of(mc.gpt(kind, config, **swapped), state)


def _gradients_of(model: Any, state: Any) -> tuple[float, dict[str, Any]]:
    import megatron_train as mt

    model.load_state_dict(state)
    output = model(**mc.batch(torch.distributed.get_rank()))
    loss = output.float().mean()
    loss.backward()
    grads = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {
        "experts": mt.of_experts(grads),
        "rest": {n: g for n, g in grads.items() if ".experts." not in n},
    }


def _beside_sequential(ep: int, options: dict[str, Any], swapped: dict[str, Any]) -> Any:
    """(difference of the loss, of the experts' gradients, of all others) of both forms."""
    import megatron_train as mt

    mc.parallel(ep)
    config = mc.config(num_layers=1, **options)
    state = mc.gpt("sequential", config).state_dict()
    wanted, right = _gradients("sequential", config, state)
    found = {}
    for kind in ("experts", "layer"):
        loss, grads = _gradients(kind, config, state, **swapped)
        found[kind] = (
            abs(loss - wanted),
            mt.apart(grads["experts"], right["experts"]),
            mt.apart(grads["rest"], right["rest"]),
        )
    return found


ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sigmoid, bias, groups": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_dtype": "fp32",
    },
    "top 1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [1e-2, 1e-2],
        "moe_z_loss_coeff": 1e-3,
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    "global loss": {"moe_router_load_balancing_type": "global_aux_loss"},
    "sqrtsoftplus": {"moe_router_score_function": "sqrtsoftplus", "moe_router_dtype": "fp64"},
    "no loss, all experts": {
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_topk": 8,
    },
    "dropped by position": {
        "moe_expert_capacity_factor": 1.0,
        "moe_token_drop_policy": "position",
    },
    "dropped": {"moe_expert_capacity_factor": 1.0},
    "padded": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "shared expert": {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True},
    "overlapped": {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True},
}


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("options", ROUTERS)
def test_gradients(pool: ranks.Pool, options: str, ep: int) -> None:
    """Of every parameter, in both forms, under the router's settings."""
    for found in mc.on_two(pool, _beside_sequential, ep, ROUTERS[options], {}):
        for loss, experts, rest in found.values():
            assert loss < 3e-3
            assert 0.02 < experts < FP8
            assert rest < FP8


@pytest.mark.parametrize("options", ["plain", "padded", "shared expert"])
def test_without_a_recipe(pool: ranks.Pool, options: str) -> None:
    """In bfloat16 both forms are close: what is wrong by less than FP8's error shows here."""
    for found in mc.on_two(pool, _beside_sequential, 2, ROUTERS[options], {"recipe": None}):
        for loss, experts, rest in found.values():
            assert loss < 1e-3
            assert experts < 0.02
            assert rest < 0.02


def _hybrid(ep: int) -> Any:
    """As _beside_sequential, of a HybridModel."""
    import megatron_train as mt

    mc.parallel(ep)
    config = mc.config(num_layers=4)
    state = mc.hybrid("sequential", config).state_dict()
    wanted, right = _gradients_of(mc.hybrid("sequential", config), state)
    found = []
    for kind in ("experts", "layer"):
        loss, grads = _gradients_of(mc.hybrid(kind, config), state)
        found.append((abs(loss - wanted), *(mt.apart(grads[k], right[k]) for k in right)))
    return found


@pytest.mark.parametrize("ep", [1, 2])
def test_hybrid_model(pool: ranks.Pool, ep: int) -> None:
    """Attention and MoE layers in turn; the second MoE layer sees the first one's error."""
    for found in mc.on_two(pool, _hybrid, ep):
        for loss, experts, rest in found:
            assert loss < 3e-3
            assert 0.02 < experts < 2 * FP8
            assert rest < 2 * FP8


def _permuted(options: dict[str, Any]) -> float:
    """The largest difference that this library's permutation makes to a model of Megatron's."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    import megatron_train as mt
    from fp8moe_cutlass.integrations import megatron

    mc.parallel(2)
    config = mc.config(num_layers=1, **options)
    state = mc.gpt("sequential", config).state_dict()
    wanted, right = _gradients("sequential", config, state)
    modules = (transformer_engine, moe_utils, token_dispatcher)
    before = [dict(vars(module)) for module in modules]
    try:
        megatron.replace_permutation()
        worst = 0.0
        for fused in (False, True):
            config = mc.config(num_layers=1, moe_permute_fusion=fused, **options)
            loss, grads = _gradients("sequential", config, state)
            found = [mt.apart(grads[k], right[k]) for k in right]
            worst = max(worst, abs(loss - wanted), *found)
    finally:
        for module, names in zip(modules, before, strict=True):
            vars(module).update(names)
    return worst


@pytest.mark.parametrize("options", ["plain", "dropped", "padded"])
def test_replace_permutation(pool: ranks.Pool, options: str) -> None:
    """An unmodified model, its tokens moved by this library, with moe_permute_fusion and without;
    Megatron alone refuses the former where there is no TransformerEngine."""
    assert max(mc.on_two(pool, _permuted, ROUTERS[options])) < 1e-5
