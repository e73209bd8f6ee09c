"""integrations.transformers over the installed transformers: which classes run, and that their
experts compute what "eager" does, within bounds that gate and up exchanged exceed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import parametrize

pytest.importorskip("transformers")

import transformers

from fp8moe_cutlass import Activation, Fp8Recipe, telemetry
from fp8moe_cutlass.integrations import transformers as fp8moe
from fp8moe_cutlass.nn import MoEExperts, reuse_fp8_weights
from transformers_models import (
    KINDS,
    E,
    H,
    I,
    count_quantizations,
    error,
    exchange_gate_and_up,
    experts_classes,
    experts_of,
    gradients,
    model_of,
    tokens,
)

pytestmark = pytest.mark.slow

# Of weights from N(0, 0.02) and Gaussian tokens: FP8 gives 0.04 to 0.07, bf16 0.01, and gate and up
# exchanged at least 0.26.
BOUND = 0.1
# Of weights [E, in, out] and biases: tests/test_transformers_gpt_oss.py.
TURNED = {"GptOssExperts", "OpenAIPrivacyFilterExperts"}


@pytest.fixture(autouse=True)
def _registered() -> None:
    fp8moe.register()


@pytest.fixture(scope="module")
def classes() -> dict[str, Any]:
    return experts_classes()


def test_every_class_runs_or_is_refused_by_name(classes: dict[str, Any]) -> None:
    found = {name: fp8moe.check(nn.ModuleList([m]))[0] for name, m in classes.items()}
    refused = {name: e.reason for name, e in found.items() if e.reason is not None}
    for odd in ("DeepseekOcr2TextExperts", "DeepseekV2Experts", "NemotronHExperts"):  # by default
        assert refused.pop(odd, "sizes must be multiples of 16").endswith("multiples of 16")
    assert not refused
    assert len(classes) >= 55


def run(
    m: Any, name: str, dtype: torch.dtype, exchanged: bool = False, scale: float = 0.02
) -> list[Tensor]:
    """Output, and gradients of tokens, probs and both weights, of an experts module."""
    g = torch.Generator().manual_seed(0)

    def gaussian(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g) * scale).to(dtype)

    gated = m.has_gate
    first = "gate_up_proj" if gated else "up_proj"
    gate_up, down = gaussian(E, (1 + gated) * I, H, scale=scale), gaussian(E, H, I, scale=0.02)
    if exchanged:
        gate_up = gate_up.roll(I, dims=1) if gated else -gate_up
    setattr(m, first, nn.Parameter(gate_up))
    m.down_proj = nn.Parameter(down)
    m.num_experts, m.config._experts_implementation = E, name
    x = gaussian(96, H).requires_grad_()
    ids = torch.rand(96, E, generator=g).topk(2).indices
    probs = torch.rand(96, 2, generator=g).to(dtype).requires_grad_()
    out = m(x, ids, probs)
    out.backward(gaussian(96, H))
    dgate_up = getattr(m, first).grad
    if exchanged:
        dgate_up = dgate_up.roll(I, dims=1) if gated else -dgate_up
    return [out.detach(), x.grad, probs.grad, dgate_up, m.down_proj.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_class_computes_what_eager_does(classes: dict[str, Any], dtype: torch.dtype) -> None:
    for name in classes.keys() - TURNED:
        module = copy.deepcopy(classes[name])
        want = run(module, "eager", dtype)
        for got, its in zip(run(module, "fp8moe", dtype), want, strict=True):
            assert got.dtype == its.dtype, name
            assert error(got, its) < BOUND, name
        for got, its in zip(run(module, "fp8moe", dtype, exchanged=True), want, strict=True):
            assert error(got, its) > 2 * BOUND, name


OTHERS = {
    "DeepseekV4Experts": "swiglu",
    "DiffusionGemmaTextExperts": "gelu_tanh",
    "Gemma4TextExperts": "gelu_tanh",
    "Glm5NextTextExperts": "swiglu",
    "HYV4Experts": "swiglu",
    "MiniMaxM3VLExperts": "swiglu",
    "NemotronHExperts": "relu2",
}


@pytest.mark.parametrize("name", OTHERS)
def test_classes_of_other_activations(classes: dict[str, Any], name: str) -> None:
    """At sizes of z that meet the limits: what eager does, registered and swapped, where SwiGLU
    would not do. The state_dict keeps its keys."""
    if name not in classes:
        pytest.skip("not in this transformers")
    module = copy.deepcopy(classes[name])
    for limit in ("limit", "swiglu_limit"):
        if hasattr(module, limit):
            setattr(module, limit, 2.5)
    want = run(module, "eager", torch.float32, scale=0.15)
    got = run(module, "fp8moe", torch.float32, scale=0.15)
    for part, its in zip(got, want, strict=True):
        assert error(part, its) < 2 * BOUND, name  # some z are within their error of a limit
    holder = nn.ModuleDict({"layer": module})
    keys, weights = list(holder.state_dict()), list(module.parameters())
    with pytest.raises(TypeError, match="activation"):  # the model's own
        fp8moe.swap(holder, activation=Activation())
    assert fp8moe.swap(holder) == ["layer"]
    swapped: Any = holder["layer"]
    assert list(holder.state_dict()) == keys
    assert all(a is b for a, b in zip(swapped.parameters(), weights, strict=True))
    assert swapped.activation.kind == OTHERS[name]
    assert swapped.activation != Activation()
    swapped.zero_grad()
    g = torch.Generator().manual_seed(5)
    x, ids = torch.randn(96, H, generator=g), torch.rand(96, E, generator=g).topk(2).indices
    probs = torch.rand(96, 2, generator=g)
    module.config._experts_implementation = "fp8moe"
    registered = module(x, ids, probs)
    layer = MoEExperts(E, H, I, activation=swapped.activation, dtype=torch.float32)
    layer.load_state_dict(swapped.state_dict())
    assert torch.equal(layer(x, ids, probs), registered)
    for m in (module, swapped):  # as PEFT's target_parameters do, which derives a class
        first = "gate_up_proj" if layer.activation.gated else "up_proj"
        parametrize.register_parametrization(m, first, nn.Identity())
        assert torch.equal(m(x, ids, probs), registered)


def test_a_model_without_gates_trains_and_takes_lora(tmp_path: Any) -> None:
    """Nemotron-H: an attention layer and one of experts, by Trainer, and LoRA on up_proj."""
    peft = pytest.importorskip("peft")
    if not hasattr(transformers, "NemotronHConfig"):
        pytest.skip("not in this transformers")
    sizes = {"hybrid_override_pattern": "*E", "moe_shared_expert_intermediate_size": I}
    model = model_of("NemotronH", **sizes)
    given = {"input_ids": tokens(), "labels": tokens(), "use_cache": False}
    model(**given).loss.backward()
    [experts] = [m for m in model.modules() if type(m).__name__ == "NemotronHExperts"]
    want = experts.up_proj.grad, experts.down_proj.grad
    model.zero_grad()
    keys = list(model.state_dict())
    [name] = fp8moe.swap(model)
    assert list(model.state_dict()) == keys
    first = model(**given).loss
    first.backward()
    swapped = model.get_submodule(name)
    for got, its in zip((swapped.up_proj.grad, swapped.down_proj.grad), want, strict=True):
        assert error(got, its) < BOUND
    model.zero_grad()
    rows = [{"input_ids": row, "labels": row} for row in tokens(8)]
    how: Any = {"max_steps": 4, "learning_rate": 1e-3, "report_to": [], "use_cpu": True}
    arguments = transformers.TrainingArguments(tmp_path, save_strategy="no", **how)
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    assert float(model(**given).loss.detach()) < float(first.detach())
    targets = [f"experts.{w}" for w in swapped.weight_names]
    config = peft.LoraConfig(r=8, lora_alpha=8, target_modules=[], target_parameters=targets)
    adapted = fp8moe.get_peft_model(model, config)
    adapted(**given).loss.backward()
    assert swapped.lora_rank == 8
    trained = {
        n.rpartition(".experts.")[2]
        for n, p in adapted.named_parameters()
        if p.grad is not None and "lora" in n
    }
    assert len(trained) == 4


def test_a_refused_class_raises_in_its_first_forward(classes: dict[str, Any]) -> None:
    module = copy.deepcopy(classes["MixtralExperts"])
    module.config._experts_implementation = "fp8moe"
    for name, value, reason in (
        ("has_post_expert_norm", True, "a norm after each expert"),
        (
            "is_concatenated",
            False,
            "its gate takes gate and up in another order than its flag says",
        ),
    ):
        before = getattr(module, name, False)
        setattr(module, name, value)
        with pytest.raises(NotImplementedError) as raised:
            module(torch.zeros(4, H), torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4, 1))
        said = f"[transformers] MixtralExperts cannot run in FP8: {reason}"
        assert str(raised.value) == said
        with pytest.raises(NotImplementedError, match="MixtralExperts"):
            fp8moe.swap(nn.ModuleDict({"layer": module}))
        setattr(module, name, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_whole_models(kind: str, dtype: torch.dtype) -> None:
    """One layer: behind two, routing flips. `swap` is the registered function bit for bit."""
    model = model_of(kind, dtype, num_hidden_layers=1)
    want = gradients(model)
    model.set_experts_implementation("fp8moe")
    got = gradients(model)
    swapped = copy.deepcopy(model)
    keys, pointers = list(swapped.state_dict()), [p.data_ptr() for p in swapped.parameters()]
    [name] = fp8moe.swap(swapped)
    assert list(swapped.state_dict()) == keys
    assert [p.data_ptr() for p in swapped.parameters()] == pointers
    assert isinstance(swapped.get_submodule(name), MoEExperts)
    same = gradients(swapped)
    exchange_gate_and_up(model)
    wrong = gradients(model)
    for name, its in want.items():
        assert error(got[name], its) < BOUND
        assert torch.equal(same[name], got[name])
        back = wrong[name].roll(I, dims=1) if "gate_up" in name else wrong[name]
        assert error(back, its) > 2 * BOUND


# ---- register, swap, check -----------------------------------------------------------------------


def test_from_config_by_name_alone() -> None:
    from transformers import AutoModelForCausalLM

    config = model_of("Qwen3Moe").config
    model = AutoModelForCausalLM.from_config(config, experts_implementation="fp8moe")
    assert {e.runs for e in fp8moe.check(model)} == {"fp8moe"}
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()


def test_register_takes_options_and_names() -> None:
    fp8moe.register("fp8moe_bf16", recipe=None)
    fp8moe.register("fp8moe_recompute", preactivation="recompute", transposed_weights="recompute")
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    want = gradients(model)
    found = {}
    for name in ("fp8moe", "fp8moe_recompute", "fp8moe_bf16"):
        model.set_experts_implementation(name)
        found[name] = gradients(model)
    for name, its in want.items():
        assert torch.equal(found["fp8moe_recompute"][name], found["fp8moe"][name])
        assert error(found["fp8moe_bf16"][name], its) < 0.02
    with pytest.raises(ValueError, match="preactivation must be"):
        fp8moe.register(preactivation="forget")
    for name in ("grouped_mm", "eager"):
        with pytest.raises(
            ValueError, match=rf"name must be none of transformers' own; got '{name}'"
        ):
            fp8moe.register(name)


def test_check_says_what_runs() -> None:
    model = model_of("DeepseekV3", first_k_dense_replace=1)
    name = "model.layers.1.mlp.experts"
    kind = "DeepseekV3Experts"
    assert fp8moe.check(model) == [fp8moe.ExpertsFound(name, kind, "eager", None)]
    model.set_experts_implementation("fp8moe")
    assert fp8moe.check(model) == [fp8moe.ExpertsFound(name, kind, "fp8moe", None)]
    fp8moe.swap(model)
    assert fp8moe.check(model) == [fp8moe.ExpertsFound(name, "SwappedExperts", "MoEExperts", None)]
    assert fp8moe.swap(model) == []
    with pytest.raises(NotImplementedError, match="must have experts modules; got Linear"):
        fp8moe.swap(nn.Linear(2, 2))


class Mine(nn.Module):
    """Experts by a forward that nothing here knows."""

    def __init__(self, *weight: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(weight))


def test_check_lists_what_it_cannot_judge() -> None:
    """By its name, its class's, or a weight of several matrices, but no dense one."""
    model = model_of("Qwen3Moe")
    model.model.layers[0].mlp.experts = Mine(E, H, H)
    names = {e.name: e.runs for e in fp8moe.check(model)}
    assert names == {
        "model.layers.0.mlp.experts": "its own forward",
        "model.layers.1.mlp.experts": "eager",
    }
    dense = {"token": Mine(1, H, H), "matrix": Mine(H, H), "conv": nn.Conv1d(4, 4, 2)}
    several = {
        "stacked": Mine(E, H, H),
        "experts": nn.ModuleList([nn.Linear(2, 2)]),
        "jet": transformers.models.jetmoe.modeling_jetmoe.JetMoeParallelExperts(2, 4, 4),
    }
    found = fp8moe.check(nn.ModuleDict({**dense, **several}))
    assert {e.name: e.runs for e in found} == dict.fromkeys(several, "its own forward")
    with pytest.raises(NotImplementedError, match=r"stacked \(Mine\): its class takes no experts"):
        fp8moe.swap(nn.ModuleDict(several))


def llama4(slots: int) -> Any:
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        vocab_size=256, hidden_size=H, intermediate_size=I, intermediate_size_mlp=I,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
        num_local_experts=E, num_experts_per_tok=slots, interleave_moe_layer_step=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.Llama4ForCausalLM(config).train()


def test_check_of_llama4_which_takes_the_name() -> None:
    model = llama4(1)
    model.set_experts_implementation("fp8moe")
    found = fp8moe.check(model)[0]
    assert (found.name, found.runs) == ("model.layers.0.feed_forward.experts", "its own forward")
    assert str(found.reason).endswith(": swap alone takes it")


@pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
@pytest.mark.parametrize("slots", [1, 2])
def test_llama4_by_swap(slots: int, recipe: Fp8Recipe | None) -> None:
    """Loss, logits and all gradients beside transformers' own; keys, parameters and hooks stay."""
    want, model = llama4(slots), llama4(slots)
    seen: list[Any] = []
    model.model.layers[0].feed_forward.register_forward_hook(lambda *_: seen.append(1))
    keys, kept = list(model.state_dict()), dict(model.named_parameters())
    assert fp8moe.swap(model, recipe=recipe) == [e.name for e in fp8moe.check(model)]
    assert list(model.state_dict()) == keys
    assert all(p is kept[name] for name, p in model.named_parameters())
    outs = []
    for m in (want, copy.deepcopy(model), model):
        out = m(input_ids=tokens(), labels=tokens(), use_cache=False)
        out.loss.backward()
        outs.append(out)
    assert seen == [1, 1]
    assert torch.equal(outs[1].logits, outs[2].logits)
    bound = BOUND if recipe is not None else 0.03
    assert error(outs[2].logits, outs[0].logits) < bound
    for (name, p), its in zip(model.named_parameters(), want.parameters(), strict=True):
        assert error(p.grad, its.grad) < bound, name


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "pickle"],
)
def test_copies_of_a_swapped_llama4(copied: Any) -> None:
    model = llama4(1)
    fp8moe.swap(model)
    copies = copied(model)
    want = model(input_ids=tokens()).logits
    for p in model.parameters():
        p.detach().zero_()
    torch._dynamo.reset()
    for layer in copies.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert torch.equal(copies(input_ids=tokens()).logits, want)


def test_llama4_in_a_block_of_another_class_is_refused() -> None:
    model = llama4(1)
    holder = nn.ModuleDict({"mine": model.model.layers[0].feed_forward.experts})
    with pytest.raises(NotImplementedError, match="the block around it is not transformers'"):
        fp8moe.swap(holder)


def test_codes_without_scales_are_refused() -> None:
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    model.set_experts_implementation("fp8moe")
    module = model.model.layers[0].mlp.experts
    module.down_proj = nn.Parameter(module.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(NotImplementedError, match=r"FP8: down_proj is torch\.float8_e4m3fn"):
        model(input_ids=tokens())


def test_odd_sizes_are_refused_by_the_modules_name() -> None:
    model = model_of("Qwen3Moe", num_hidden_layers=1, moe_intermediate_size=24)
    model.set_experts_implementation("fp8moe")
    message = r"Qwen3MoeExperts cannot run in FP8: down_proj is .*24\): sizes must be multiples"
    assert "down_proj" in str(fp8moe.check(model)[0].reason)
    with pytest.raises(NotImplementedError, match=message):
        model(input_ids=tokens())
    with pytest.raises(NotImplementedError, match=message), reuse_fp8_weights(model):
        pass
    fp8moe.register("fp8moe_bf16", recipe=None)
    model.set_experts_implementation("fp8moe_bf16")
    assert [e.reason for e in fp8moe.check(model)] == [None]
    model(input_ids=tokens())
    model.set_experts_implementation("eager")
    assert len(fp8moe.swap(model, recipe=None)) == 1


def test_a_class_outside_transformers_ignores_the_name() -> None:
    """transformers looks for its decorator in the source of the class's file; `check` shows it."""
    from transformers import Qwen3MoeForCausalLM

    class Mine(Qwen3MoeForCausalLM):  # type: ignore[misc]
        _can_set_experts_implementation_cached_value = None  # that of its base

    model = Mine(model_of("Qwen3Moe").config)
    model.set_experts_implementation("fp8moe")
    assert {e.runs for e in fp8moe.check(model)} == {"eager"}
    assert len(fp8moe.swap(model)) == 2


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_swap_refuses_sharded_experts_and_changes_nothing(mesh: Any) -> None:
    model = model_of("Qwen3Moe")
    last = model.model.layers[1].mlp.experts
    last.gate_up_proj = nn.Parameter(distribute_tensor(last.gate_up_proj.data, mesh, [Shard(0)]))
    with pytest.raises(NotImplementedError, match=r"layers.1.mlp.experts .*DTensor"):
        fp8moe.swap(model)
    for name in ("eager", "fp8moe"):  # which a registered one computes under fully_shard
        model.set_experts_implementation(name)
        assert [(e.runs, e.reason) for e in fp8moe.check(model)] == [(name, None)] * 2


def test_swap_refuses() -> None:
    model = model_of("Qwen3Moe")
    model.hf_quantizer = object()
    with pytest.raises(NotImplementedError, match="the model is quantized"):
        fp8moe.swap(model)
    for change, message in (
        (lambda m: m.double(), "gate_up_proj is torch.float64"),
        (lambda m: m.to("meta"), "gate_up_proj is on the meta device"),
        (lambda m: m.register_parameter("gain", nn.Parameter(torch.ones(2))), "own: gain"),
    ):
        model = model_of("Qwen3Moe")
        change(model.model.layers[0].mlp.experts)
        with pytest.raises(NotImplementedError, match=message):
            fp8moe.swap(model)
    with pytest.raises(NotImplementedError, match="multiples of 16"):
        fp8moe.swap(model_of("Qwen3Moe", moe_intermediate_size=24))


def test_another_implementation_after_swap_is_refused() -> None:
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    fp8moe.swap(model)
    copied = copy.deepcopy(model)
    model.set_experts_implementation("batched_mm")
    with pytest.raises(RuntimeError, match=r"load the model again; got 'batched_mm' instead of 'e"):
        model(input_ids=tokens())
    copied(input_ids=tokens())
    model.set_experts_implementation("eager")
    model(input_ids=tokens())
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    model.set_experts_implementation("grouped_mm")
    fp8moe.swap(model)
    model.set_experts_implementation("batched_mm")  # as generate() does on a GPU
    model(input_ids=tokens())


def test_options_of_a_second_swap_are_refused() -> None:
    model = model_of("Qwen3Moe")
    fp8moe.swap(model.model.layers[0], preactivation="recompute")
    assert fp8moe.swap(model, recipe=None) == ["model.layers.1.mlp.experts"]
    with pytest.raises(ValueError, match=r"those of the first swap; got recipe for experts"):
        fp8moe.swap(model, recipe=None)


def test_swap_keeps_hooks() -> None:
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    module = model.model.layers[0].mlp.experts
    seen: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda m, args: seen.append("before")),
        module.register_forward_hook(lambda m, args, out: 2 * out),
        module.register_full_backward_hook(lambda m, dx, dout: seen.append("backward")),
    ]
    fp8moe.swap(model)
    swapped = model.model.layers[0].mlp.experts
    x, ids, probs = torch.randn(8, H), torch.zeros(8, 1, dtype=torch.int64), torch.ones(8, 1)
    doubled = swapped(x.requires_grad_(), ids, probs)
    doubled.sum().backward()
    assert seen == ["before", "backward"]
    for handle in handles:
        handle.remove()
    assert torch.equal(2 * swapped(x, ids, probs), doubled)
    assert seen == ["before", "backward"]


def test_swap_refuses_a_replaced_forward() -> None:
    """As accelerate's hooks make them: the new module would leave out what they do."""
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    module = model.model.layers[0].mlp.experts
    module.forward = module.forward
    with pytest.raises(NotImplementedError, match="its forward is replaced"):
        fp8moe.swap(model)


def test_swap_of_experts_that_two_layers_share() -> None:
    model = model_of("Qwen3Moe", num_hidden_layers=2)
    one, other = (layer.mlp for layer in model.model.layers)
    other.experts = one.experts
    assert fp8moe.swap(model) == ["model.layers.0.mlp.experts"]
    assert isinstance(one.experts, MoEExperts)
    assert other.experts is one.experts


def test_swapped_options() -> None:
    model = model_of("Mixtral")
    model.eval()
    fp8moe.swap(model, recipe=Fp8Recipe(columns="column"), preactivation="recompute")
    for layer in experts_of(model).values():
        assert layer.recipe == Fp8Recipe(columns="column")
        assert layer.preactivation == "recompute"
        assert not layer.training


def test_the_id_of_no_expert() -> None:
    """Expert parallelism of transformers marks other ranks' slots by num_experts."""
    model = model_of("Qwen3Moe")
    model.set_experts_implementation("fp8moe")
    module = model.model.layers[0].mlp.experts
    x, probs = torch.randn(8, H), torch.rand(8, 2)
    ids = torch.rand(8, E).topk(2).indices
    ids[:, 1] = E
    want = module(x, ids[:, :1], probs[:, :1])
    assert torch.equal(module(x, ids, probs), want)


# ---- reuse and telemetry -------------------------------------------------------------------------


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_quantizations(monkeypatch)


@pytest.mark.parametrize("how", ["register", "swap"])
def test_reuse(how: str, quantized: list[int]) -> None:
    model = model_of("Qwen3Moe")
    if how == "swap":
        fp8moe.swap(model)
    else:
        model.set_experts_implementation("fp8moe")
    want = gradients(model)
    assert quantized == [2]
    with reuse_fp8_weights(model, check=False):
        assert quantized == [4]
        for _ in range(3):
            got = gradients(model)
        assert quantized == [4]
        copied = gradients(copy.deepcopy(model))
        assert quantized == [6]
    for name, its in want.items():
        assert torch.equal(got[name], its)
        assert torch.equal(copied[name], its)
    with (
        pytest.raises(RuntimeError, match=r"experts.gate_up_proj, which has been written"),
        reuse_fp8_weights(model),
        torch.no_grad(),
    ):
        next(iter(experts_of(model).values())).gate_up_proj.zero_()


def test_scopes_after_a_compiled_forward(quantized: list[int]) -> None:
    """What was compiled before the model's first scope reuses and counts inside of it."""
    torch._dynamo.reset()
    model = model_of("Qwen3Moe")
    model.set_experts_implementation("fp8moe")
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    want = gradients(model)
    assert quantized == [2]
    with reuse_fp8_weights(model), telemetry.watch(model, every=1) as seen:
        got = [gradients(model) for _ in range(2)]
    assert quantized == [4]
    for report in seen.report().values():
        assert sum(report["transposes"]["x columns"]["shifts"]) > 0
    got.append(gradients(model))
    assert quantized == [6]
    for its in got:
        assert all(torch.equal(its[name], grad) for name, grad in want.items())


def test_main_grad_of_a_registered_model_that_is_compiled() -> None:
    """The graph breaks at the experts, which keep no module that a compiled backward could ask."""
    torch._dynamo.reset()
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    model.set_experts_implementation("fp8moe")
    want = gradients(model)
    name, experts = next(iter(experts_of(model).items()))
    weights = {f"{name}.{w}": p for w, p in experts.named_parameters()}
    for w in weights.values():
        w.main_grad = torch.zeros_like(w)
    model.model.layers[0].compile(backend="aot_eager")
    assert set(gradients(model).values()) == {None}
    assert all(torch.equal(weights[name].main_grad, grad) for name, grad in want.items())


@pytest.mark.parametrize("what", ["reuse", "telemetry"])
@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: m._replicate_for_data_parallel(),
    ],
)
def test_copies_compute_with_their_own_weights(what: str, copied: Any) -> None:
    """During the scope and after it; a deep copy and a pickle have nothing of it."""
    model = model_of("Qwen3Moe", num_hidden_layers=1)
    model.set_experts_implementation("fp8moe")
    module = model.model.layers[0].mlp.experts
    x, ids, probs = torch.randn(8, H), torch.zeros(8, 1, dtype=torch.int64), torch.ones(8, 1)
    scaled = nn.Parameter(2 * module.down_proj.detach())
    want = 2 * module(x, ids, probs)

    def check(one: Any) -> None:
        one._parameters = {"gate_up_proj": module.gate_up_proj, "down_proj": scaled}
        assert torch.equal(one(x, ids, probs), want)

    with reuse_fp8_weights(model) if what == "reuse" else telemetry.watch(model):
        inside = copied(module)
        check(inside)
    check(inside)
    check(copied(module))


def test_reuse_of_a_model_that_runs_another_implementation() -> None:
    model = model_of("Qwen3Moe")
    with pytest.raises(ValueError, match="must contain a MoEExperts"), reuse_fp8_weights(model):
        pass


def test_telemetry_by_layer_name() -> None:
    model = model_of("Qwen3Moe")
    model.set_experts_implementation("fp8moe")
    with telemetry.watch(model) as seen:
        gradients(model)
    report = seen.report()
    assert list(report) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert all(sum(sum(t["shifts"]) for t in r["transposes"].values()) > 0 for r in report.values())
    gradients(model)
    assert seen.report() == report
