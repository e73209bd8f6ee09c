"""integrations.megatron: options refused and honoured, specs, and the module by itself.

Skipped without megatron-core; .ci/run has a step for it.
"""

from __future__ import annotations

import copy
import enum
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core")

from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu

import megatron_cpu as mc
import ranks
from activations import formula
from fp8moe_cutlass.integrations import megatron

pytestmark = pytest.mark.slow

pool = ranks.pool(2, preload=("megatron_cpu",))


def _moe(kind: str, config: Any, **swapped: Any) -> Any:
    """One MoE layer."""
    return mc.layer_spec(kind, config, **swapped).submodules.mlp(config=config, name="mlp")


class _Graph(enum.Enum):
    attn = 1
    moe_router = 4


EXPERTS: dict[str, dict[str, Any]] = {
    "activation_func=silu with gated_linear_unit=False": {"gated_linear_unit": False},
    "activation_func=gelu with gated_linear_unit=True": {"activation_func": F.gelu},
    "activation_func=squared_relu with gated_linear_unit=True": {"activation_func": squared_relu},
    "activation_func_clamp_value=7.0 without quick_gelu": {"activation_func_clamp_value": 7.0},
    "moe_mlp_glu_interleave_size": {"moe_mlp_glu_interleave_size": 32},
    "use_te_activation_func": {"use_te_activation_func": True},
    "expert_tensor_parallel_size": {"expert_tensor_parallel_size": 2},
    "gtp_weight_remat_size": {"gtp_weight_remat_size": 2},
    "expert_gtp_weight_remat_size": {"expert_gtp_weight_remat_size": 2},
    "fp8_param": {"fp8_param": True},
    "fp4": {"fp4": "e2m1"},
    "first_last_layers_bf16": {"first_last_layers_bf16": True},
    "moe_single_grouped_weight": {"moe_single_grouped_weight": True},
    "moe_single_grouped_bias": {"moe_single_grouped_bias": True},
    "use_transformer_engine_op_fuser": {"use_transformer_engine_op_fuser": True},
    "offload_modules with expert_fc1": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn", "expert_fc1"],
    },
    "offload_modules with moe_act": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["moe_act"],
    },
    "moe_paged_stash": {"moe_paged_stash": True},
    "moe_ncclep_zero_copy": {"moe_ncclep_zero_copy": True},
    "transformer_impl": {"transformer_impl": "inference_optimized"},
}
LAYER: dict[str, dict[str, Any]] = {
    "moe_token_dispatcher_type='allgather'": {"moe_token_dispatcher_type": "allgather"},
    "moe_token_dispatcher_type='flex'": {"moe_token_dispatcher_type": "flex"},
    "overlap_moe_expert_parallel_comm": {"overlap_moe_expert_parallel_comm": True},
    "overlap_dispatch_backward_with_experts_wgrad": {
        "overlap_dispatch_backward_with_experts_wgrad": True
    },
    "cuda_graph_impl='local'": {"cuda_graph_impl": "local", "cuda_graph_modules": []},
    "cuda_graph_impl='transformer_engine'": {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": [_Graph.attn, _Graph.moe_router],
    },
    "moe_latent_size": {"moe_latent_size": 64},
    "moe_apply_probs_on_input": {"moe_apply_probs_on_input": True},
    "without sequence_parallel": {"tensor_model_parallel_size": 2},
}


def _refusal(kind: str, changed: dict[str, Any]) -> str:
    config = mc.config()
    for name, value in changed.items():  # after its own checks, some of which want other packages
        setattr(config, name, value)
    with pytest.raises(NotImplementedError) as refused:
        _moe(kind, config)
    return str(refused.value)


@pytest.mark.parametrize("option", EXPERTS)
def test_refused(pool: ranks.Pool, option: str) -> None:
    """By name, in both forms, before anything is built."""
    for kind, what in (("experts", "Experts"), ("layer", "MoELayer")):
        for message in mc.on_two(pool, _refusal, kind, EXPERTS[option]):
            assert message.startswith(f"[megatron.{what}] cannot honour: ")
            assert option in message
            assert ";" not in message


@pytest.mark.parametrize("option", LAYER)
def test_refused_by_the_layer(pool: ranks.Pool, option: str) -> None:
    for message in mc.on_two(pool, _refusal, "layer", LAYER[option]):
        assert option in message
        assert ";" not in message


def _recipe_of_experts() -> str:
    from megatron.core.quantization.quant_config import GlobMatcher, RecipeConfig

    config = mc.config()
    config.quant_recipe = RecipeConfig([GlobMatcher("*mlp.experts.linear_fc1", "a")], {"a": {}})
    with pytest.raises(NotImplementedError) as refused:
        _moe("experts", config)
    config.quant_recipe = RecipeConfig([GlobMatcher("*self_attention*", "a")], {"a": {}})
    _moe("experts", config)
    return str(refused.value)


def test_quant_recipe(pool: ranks.Pool) -> None:
    """A recipe per module is refused where it names these experts."""
    assert "quant_recipe" in mc.on_two(pool, _recipe_of_experts)[0]


def _options(changed: dict[str, Any], swapped: dict[str, Any]) -> Any:
    config = mc.config()
    for name, value in changed.items():
        setattr(config, name, value)
    experts = _moe("experts", config, **swapped).experts
    skipped = {p.skip_backward_post_hook for p in experts.parameters()}
    assert skipped == {experts.delay_wgrad}
    return experts.preactivation, experts.transposed_weights, experts.delay_wgrad


ACT = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
FULL, STAGED = {**ACT, "recompute_granularity": "full"}, {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("changed", "swapped", "wanted"),
    [
        ({}, {}, ("save", "save", False)),
        (ACT, {}, ("recompute", "recompute", False)),
        (FULL, {}, ("save", "save", False)),
        ({"activation_func_fp8_input_store": True}, {}, ("save_fp8", "save", False)),
        (STAGED, {}, ("save", "recompute", False)),
        (STAGED, {"transposed_weights": "save"}, ("save", "save", False)),
        ({"overlap_moe_expert_parallel_comm": True}, {}, ("save", "recompute", False)),
        ({"delay_wgrad_compute": True}, {}, ("save", "save", True)),
        ({"overlap_dispatch_backward_with_experts_wgrad": True}, {}, ("save", "save", True)),
        (ACT, {"preactivation": "save"}, ("save", "recompute", False)),
    ],
)  # fmt: skip
def test_honoured(
    pool: ranks.Pool, changed: dict[str, Any], swapped: dict[str, Any], wanted: Any
) -> None:
    """Options that decide what is saved and when weight gradients run."""
    assert mc.on_two(pool, _options, changed, swapped) == [wanted, wanted]


def _sequential(config: Any, experts: Any) -> Any:
    """Megatron's own experts, with the weights of ours."""
    theirs = _moe("sequential", config).experts
    theirs.load_state_dict(
        {
            f"local_experts.{e}.linear_fc{n}.weight": weight[e]
            for n, weight in ((1, experts.gate_up_proj), (2, experts.down_proj))
            for e in range(4)
        },
        strict=False,
    )
    return theirs


def _probs_on_input() -> float:
    config = mc.config(
        moe_router_topk=1, moe_router_pre_softmax=True, moe_apply_probs_on_input=True
    )
    experts = _moe("experts", config, recipe=None).experts
    rows, probs = torch.randn(12, 128), torch.rand(12, requires_grad=True)
    counts = torch.tensor([3, 0, 4, 5])
    out, bias = experts(rows, counts, probs)
    assert bias is None
    out.sum().backward()
    theirs = _sequential(config, experts)
    again = probs.detach().requires_grad_()
    wanted = theirs(rows, counts, again)[0]
    wanted.sum().backward()
    return max(
        float((a - b).norm() / b.norm()) for a, b in ((out, wanted), (probs.grad, again.grad))
    )


def test_probs_on_input(pool: ranks.Pool) -> None:
    """moe_apply_probs_on_input: the experts scale rows."""
    assert max(mc.on_two(pool, _probs_on_input)) < 0.01


def _shared_expert(kind: str, overlap: bool) -> list[torch.Tensor]:
    """Output and gradients of a layer, a shared expert's halves on two ranks."""
    mc.parallel(1, tp=2)
    config = mc.config(
        tensor_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
        moe_shared_expert_intermediate_size=64,
        moe_shared_expert_gate=True,
        moe_shared_expert_overlap=overlap,
    )
    layer = _moe(kind, config)
    layer.set_layer_number(1)
    torch.manual_seed(1)
    rest = [p for n, p in layer.named_parameters() if not n.startswith("experts.")]
    for p in rest:
        p.data.normal_(std=0.1)
    for p in layer.experts.parameters():  # the shared expert is alone
        p.data.zero_()
    x = torch.randn(6, 2, 128, requires_grad=True)
    out = layer(x)[0]
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in rest)]  # type: ignore[list-item]


def test_shared_expert_of_tensor_parallelism(pool: ranks.Pool) -> None:
    """An overlapped shared expert communicates in the layer, too."""
    right = mc.on_two(pool, _shared_expert, "sequential", False)
    for kind in ("sequential", "experts", "layer"):
        for found, wanted in zip(mc.on_two(pool, _shared_expert, kind, True), right, strict=True):
            for mine, theirs in zip(found, wanted, strict=True):
                assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-4)


ACTIVATIONS: dict[str, dict[str, Any]] = {
    "glu_linear_offset": {"glu_linear_offset": 0.5},
    "quick_gelu": {"activation_func": quick_gelu},
    "GPT-OSS": {
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 0.5,
    },
    "squared_relu": {"activation_func": squared_relu, "gated_linear_unit": False},
}


def _activation(name: str) -> float:
    """The largest relative error beside Megatron's own experts."""
    config = mc.config(**ACTIVATIONS[name])
    torch.manual_seed(1)
    experts = _moe("experts", config, recipe=None).experts
    for linear in (experts.linear_fc1, experts.linear_fc2):
        for p in linear.parameters():
            p.data.normal_(std=0.1)
    rows, probs = torch.randn(12, 128, requires_grad=True), torch.rand(12, requires_grad=True)
    counts = torch.tensor([3, 0, 4, 5])
    theirs = _sequential(config, experts)
    made = []
    for module in (experts, theirs):
        rows.grad = probs.grad = None
        out = module(rows, counts, probs)[0]
        out.square().sum().backward()
        made.append((out.detach(), rows.grad, probs.grad))
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(pool: ranks.Pool, name: str) -> None:
    assert max(mc.on_two(pool, _activation, name)) < 0.07


def _biases(name: str, delay: bool) -> float:
    """The largest relative error beside the formula: of its own experts Megatron's TEGroupedMLP
    needs a GPU, and to SequentialMLP autograd forbids how it adds a bias."""
    config = mc.config(**ACTIVATIONS[name], add_bias_linear=True)
    config.delay_wgrad_compute = delay
    if config.activation_func_clamp_value is not None:
        config.activation_func_clamp_value = 7.0  # few values meet it
    torch.manual_seed(1)
    experts = _moe("experts", config, recipe=None).experts
    linears = experts.linear_fc1, experts.linear_fc2
    assert not any(bias.any() for linear in linears for bias in linear.biases)
    for p in experts.parameters():
        p.data.normal_(std=0.1)
    counts = torch.tensor([3, 0, 4, 5])
    leaves = [torch.randn(12, 128), torch.rand(12), *experts.parameters()]
    twins = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    rows, probs = (leaf.requires_grad_() for leaf in leaves[:2])
    experts(rows, counts, probs)[0].square().sum().backward()
    experts.backward_dw()
    names = [n for n, _ in experts.named_parameters()]
    of = dict(zip(names, twins[2:], strict=True))
    made = []
    for e, (x, p) in enumerate(zip(*(t.split(counts.tolist()) for t in twins[:2]), strict=True)):
        z = x @ of[f"linear_fc1.weight{e}"].T + of[f"linear_fc1.bias{e}"]
        y = formula(z, experts.activation) @ of[f"linear_fc2.weight{e}"].T
        made.append(p[:, None] * (y + of[f"linear_fc2.bias{e}"]))
    torch.cat(made).square().sum().backward()
    pairs = zip(leaves, twins, strict=True)
    return max(float((a.grad - b.grad).norm() / (b.grad.norm() + 1e-9)) for a, b in pairs)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("name", ["GPT-OSS", "squared_relu"])
def test_biases(pool: ranks.Pool, name: str, delay: bool) -> None:
    assert max(mc.on_two(pool, _biases, name, delay)) < 0.02


def _frozen(frozen: list[str], delay: bool) -> None:
    config = mc.config()
    config.delay_wgrad_compute = delay
    experts = _moe("experts", config).experts
    given = (torch.randn(12, 128, requires_grad=True), torch.tensor([3, 0, 4, 5]), torch.rand(12))

    def run() -> set[str]:
        experts(*given)[0].square().sum().backward()
        experts.backward_dw()
        return {n for n, p in experts.named_parameters() if p.grad is not None}

    everything = {n for n, _ in experts.named_parameters()}
    assert run() == everything
    experts.zero_grad()
    for name in frozen:
        for p in getattr(experts, name).parameters():
            p.requires_grad_(False)
    assert run() == {n for n in everything if n.split(".")[0] not in frozen}
    experts.requires_grad_(True)
    experts.zero_grad()
    experts.linear_fc1.weight0.requires_grad_(False)
    if not delay:
        assert run() == everything - {"linear_fc1.weight0"}
        for p in experts.parameters():
            if p.requires_grad:
                p.main_grad = torch.zeros_like(p)
    with pytest.raises(NotImplementedError, match="trained or none; got 3 of 4"):
        experts(*given)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("frozen", [["linear_fc1"], ["linear_fc2"], ["linear_fc1", "linear_fc2"]])
def test_frozen(pool: ranks.Pool, frozen: list[str], delay: bool) -> None:
    """Frozen projections get no gradient; a part of one is refused where it would lose some."""
    mc.on_two(pool, _frozen, frozen, delay)


def _parameters() -> Any:
    mc.forks.clear()
    config = mc.config()
    experts = _moe("experts", config).experts
    torch.manual_seed(3)
    experts.reset_parameters()
    mine = experts.gate_up_proj.detach().clone(), experts.down_proj.detach().clone()
    mc.parallel(1)
    torch.manual_seed(3)
    everything = _moe("sequential", mc.config()).experts.local_experts
    first = 4 * torch.distributed.get_rank()
    # After the router's weight, which this layer draws before.
    torch.manual_seed(3)
    for expert in everything:
        config.init_method(expert.linear_fc1.weight.data)
        config.output_layer_init_method(expert.linear_fc2.weight.data)
    for e in range(4):
        assert torch.equal(mine[0][e], everything[first + e].linear_fc1.weight)
        assert torch.equal(mine[1][e], everything[first + e].linear_fc2.weight)
    attributes = [
        (p.allreduce, p.tensor_model_parallel, p.partition_dim) for p in experts.parameters()
    ]
    assert not mc.forks
    # Megatron's CPU initialization draws from the default state; on a GPU its tracker decides.
    config.use_cpu_initialization = False
    experts.reset_parameters()
    return attributes, list(mc.forks)


def test_parameters(pool: ranks.Pool) -> None:
    """Every rank draws its own experts of one sequence, or from the experts' random state; Megatron
    sees parameters of experts."""
    for attributes, forks in mc.on_two(pool, _parameters):
        assert attributes == [(False, True, 0)] * 4 + [(False, True, 1)] * 4
        assert forks == ["expert-parallel-rng"]


def _rows(counts: list[int], more: int) -> Any:
    experts = _moe("experts", mc.config()).experts
    rows = torch.randn(sum(counts) + more, 128, requires_grad=True)
    probs = torch.rand(len(rows))
    with torch.no_grad():
        rows[sum(counts) :] = float("nan")
    found = []
    for dtype in (torch.int64, torch.int32):
        rows.grad = None
        experts.zero_grad()
        out = experts(rows, torch.tensor(counts, dtype=dtype), probs)[0]
        out[: sum(counts)].sum().backward()
        found.append((out[: sum(counts)].detach(), *(p.grad for p in experts.parameters())))
    assert all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(*found, strict=True))
    with pytest.raises(ValueError, match="sum at most"):
        experts(rows, torch.tensor([*counts[:-1], len(rows) + 1]), probs)
    return [bool(g.any()) for g in found[0][1:]]


@pytest.mark.parametrize("counts", [[5, 0, 7, 33], [0, 0, 0, 0], [0, 41, 0, 0]])
@pytest.mark.parametrize("more", [0, 6])
def test_rows(pool: ranks.Pool, counts: list[int], more: int) -> None:
    """As dispatchers call it: empty experts, no rows at all, rows past the counts, either dtype;
    two runs are bit-equal; counts beyond the rows are refused."""
    for used in mc.on_two(pool, _rows, counts, more):
        assert used == [n > 0 for n in reversed(counts)] * 2


def _kept() -> None:
    from megatron.core.quantization.quant_config import RecipeConfig

    config = mc.config(quant_recipe=RecipeConfig([], {}))
    experts = _moe("experts", config).experts
    given = (torch.randn(8, 128), torch.tensor([2, 2, 2, 2]), torch.rand(8))

    def run(of: Any = experts) -> torch.Tensor:
        return of(*given)[0].detach()  # type: ignore[no-any-return]

    def write(value: float) -> None:
        experts.down_proj.data.mul_(value)  # as an optimizer of Megatron's, which counts no version

    assert experts.is_first_microbatch is True
    before = run()
    assert experts.is_first_microbatch is False
    assert any(m is experts for m in _listed(experts))
    write(2.0)
    assert torch.equal(run(), before)  # a later microbatch of the same step
    assert not torch.equal(run(copy.deepcopy(experts)), before)
    experts.load_state_dict(experts.state_dict())
    assert not torch.equal(run(), before)
    write(2.0)
    experts.to(torch.float32)
    assert torch.equal(run(), 4 * before)
    write(0.25)
    experts.is_first_microbatch = True
    assert torch.equal(run(), before)
    write(2.0)
    config.disable_parameter_transpose_cache = True
    assert torch.equal(run(), 2 * before)
    config.disable_parameter_transpose_cache, config.quant_recipe = False, None
    write(2.0)
    assert torch.equal(run(), 4 * before)


def _listed(experts: Any) -> list[Any]:
    from megatron.core.transformer.module import MegatronModule

    outer = MegatronModule(experts.config)
    outer.experts = experts
    outer.set_is_first_microbatch()
    experts.is_first_microbatch = False
    return outer.modules_with_is_first_microbatch


def test_kept(pool: ranks.Pool) -> None:
    """FP8 weights serve a whole step where Megatron sets is_first_microbatch, and there alone;
    deepcopy, loading and `.to` drop them."""
    mc.on_two(pool, _kept)


def _specs() -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    mc.parallel(1)
    config = mc.config(num_layers=3, moe_layer_freq=[0, 1, 1], mtp_num_layers=1)
    theirs = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    spec = megatron.swap(theirs)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = GPTModel(config, spec, mc.VOCABULARY, mc.SEQUENCE, mtp_block_spec=mtp)
    model(**mc.batch(0)).mean().backward()
    found = [type(m).__name__ for m in model.modules() if hasattr(m, "is_first_microbatch")]
    assert all(p.grad is not None for p in model.parameters())
    # The spec that was given makes what it made before.
    assert isinstance(theirs.layer_specs[1].submodules.mlp(config=config).experts, SequentialMLP)
    dense = get_gpt_layer_local_spec()
    with pytest.raises(ValueError, match="must have a MoE layer"):
        megatron.swap(dense)
    with pytest.raises(ValueError, match="got a model, GPTModel: swap the spec, and build"):
        megatron.swap(model)
    layer = get_gpt_layer_local_spec(num_experts=8)
    for forms, form in (((False, True), "TokenExperts"), ((True, False), "Experts")):
        once, twice = forms
        spec = megatron.swap(megatron.swap(layer, layer=once), layer=twice)
        assert type(spec.submodules.mlp(config=config).experts).__name__ == form
    # A block of layers that name their MoE layer in both ways: none is left out.
    block = get_gpt_decoder_block_spec(mc.config(), use_transformer_engine=False)
    other: Any = copy.deepcopy(block.layer_specs[1])
    parts = other.submodules.mlp
    other.submodules.mlp = ModuleSpec(parts.func, submodules=parts.keywords["submodules"])
    block.layer_specs[0] = other
    model = GPTModel(mc.config(), megatron.swap(block), mc.VOCABULARY, mc.SEQUENCE)
    assert {type(layer.mlp.experts).__name__ for layer in model.decoder.layers} == {"Experts"}
    return found


def test_specs(pool: ranks.Pool) -> None:
    """A block with a dense layer, and multi-token prediction after it; no spec is changed."""
    assert mc.on_two(pool, _specs)[0] == ["Experts"] * 3
