"""GPT-OSS and OpenAI Privacy Filter in transformers: biases, weights [E, in, out] as they lie."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers")

import transformers

import ranks
from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.autograd import weights
from fp8moe_cutlass.integrations import transformers as fp8moe
from fp8moe_cutlass.nn import MoEExperts, reuse_fp8_weights
from ranks import Pool, results
from transformers_models import E, H, I, error, experts_classes, model_of, tokens

pytestmark = pytest.mark.slow
pool = ranks.pool(2, preload=("transformers_models",))

NAMES = ["GptOssExperts", "OpenAIPrivacyFilterExperts"]
PARAMETERS = ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]
# Many z are within their error of the limit, where the gradient comes or goes: the bounds of
# test_activations.py for limited gates.
BOUND = {"fp8": 0.2, "bf16": 0.07}


def experts(name: str, dtype: torch.dtype = torch.float32, hidden: int = H, inner: int = I) -> Any:
    """An experts module of that class with random parameters, run by "eager"."""
    module = copy.deepcopy(experts_classes()[name])
    torch.manual_seed(0)
    module.num_experts, module.limit = E, 2.5
    shapes = (E, hidden, 2 * inner), (E, 2 * inner), (E, inner, hidden), (E, hidden)
    for key, shape in zip(PARAMETERS, shapes, strict=True):
        scale = 0.15 if len(shape) == 3 else 1.0
        setattr(module, key, nn.Parameter((scale * torch.randn(shape)).to(dtype)))
    module.config._experts_implementation = "eager"
    return module


def run(module: Any, rows: int = 96) -> list[Any]:
    """Output, and gradients of tokens, probs and all parameters."""
    g = torch.Generator().manual_seed(1)
    dtype, hidden = module.down_proj.dtype, module.down_proj_bias.shape[1]
    x = torch.randn(rows, hidden, generator=g).to(dtype).requires_grad_()
    ids = torch.rand(rows, E, generator=g).topk(2).indices
    probs = torch.rand(rows, 2, generator=g).to(dtype).requires_grad_()
    module.zero_grad()
    out = module(x, ids, probs)
    out.backward(torch.randn(rows, hidden, generator=g).to(dtype))
    return [out.detach(), x.grad, probs.grad, *(getattr(module, p).grad for p in PARAMETERS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_both_classes_compute_what_eager_does(name: str, recipe: str, dtype: torch.dtype) -> None:
    """Registered, and swapped: the same bits, over the same Parameters."""
    module = experts(name, dtype, 208, 176)
    want = run(module)
    options: Any = {} if recipe == "fp8" else {"recipe": None}
    fp8moe.register("gpt", **options)
    module.config._experts_implementation = "gpt"
    got = run(module)
    for part, a, b in zip(["out", "x", "probs", *PARAMETERS], got, want, strict=True):
        assert a.dtype == b.dtype
        assert error(a, b) < BOUND[recipe], part
    holder = nn.ModuleDict({"layer": module})
    keys, parameters = list(holder.state_dict()), dict(module.named_parameters())
    assert fp8moe.swap(holder, **options) == ["layer"]
    swapped: Any = holder["layer"]
    assert sorted(holder.state_dict()) == sorted(keys)
    assert all(getattr(swapped, key) is p for key, p in parameters.items())
    assert all(torch.equal(a, b) for a, b in zip(run(swapped), got, strict=True))


def test_gradients_lie_as_their_weights_and_nothing_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder = nn.ModuleDict({"layer": experts("GptOssExperts", torch.bfloat16)})
    fp8moe.swap(holder)
    layer: Any = holder["layer"]
    seen = []
    quantize = weights.ops.quantize_weight
    monkeypatch.setattr(
        weights.ops, "quantize_weight", lambda w, **k: seen.append(w.data_ptr()) or quantize(w, **k)
    )
    run(layer)
    assert {layer.gate_up_proj.data_ptr(), layer.down_proj.data_ptr()} <= {*seen}
    for name in PARAMETERS:
        assert getattr(layer, name).grad.is_contiguous()


OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"preactivation": "recompute"},
    "transposes": {"transposed_weights": "recompute"},
    "both": {"preactivation": "recompute", "transposed_weights": "recompute"},
    "column": {"recipe": Fp8Recipe(columns="column")},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_and_reuse(name: str) -> None:
    """A layer of one's own with the same weights, [E, out, in], has the same bits."""
    module = experts("GptOssExperts", torch.bfloat16)
    holder = nn.ModuleDict({"layer": module})
    fp8moe.swap(holder, **OPTIONS[name])
    swapped: Any = holder["layer"]
    own = MoEExperts(E, H, I, activation=swapped.activation, bias=True, **OPTIONS[name])
    with torch.no_grad():
        for key, p in swapped.named_parameters():
            getattr(own, key).copy_(p.mT if p.ndim == 3 else p)
    got, want = run(swapped), run(own)
    for part, a, b in zip(["out", "x", "probs", *PARAMETERS], got, want, strict=True):
        turned = part in ("gate_up_proj", "down_proj")
        # wgrad's two operands have changed places: sums of the same products.
        assert error(a, b.mT if turned else b) <= (4e-3 if turned else 0.0), part
    with reuse_fp8_weights(holder):
        assert all(torch.equal(a, b) for a, b in zip(run(swapped), got, strict=True))


def test_gradients_in_e5m2() -> None:
    module = experts("GptOssExperts")
    want = run(module)
    fp8moe.register("e5m2", recipe=Fp8Recipe(grad_dtype="e5m2"))
    module.config._experts_implementation = "e5m2"
    assert all(error(a, b) < 0.25 for a, b in zip(run(module), want, strict=True))


def test_compiled() -> None:
    holder = nn.ModuleDict({"layer": experts("GptOssExperts")})
    fp8moe.swap(holder)
    want = run(holder["layer"])
    torch._dynamo.reset()
    holder["layer"].compile(backend="aot_eager")
    for a, b in zip(run(holder["layer"]), want, strict=True):
        assert error(a, b) < 1e-3


def test_a_model_trains_by_trainer_and_is_saved(tmp_path: Path) -> None:
    model = model_of("GptOss", layer_types=["full_attention"] * 2, num_experts_per_tok=2)
    given = {"input_ids": tokens(), "labels": tokens(), "use_cache": False}
    want = model(**given).loss
    fp8moe.register()
    model.set_experts_implementation("fp8moe")
    assert error(model(**given).loss, want) < 0.01
    model.set_experts_implementation("eager")
    names = fp8moe.swap(model)
    assert len(names) == 2
    first = model(**given).loss.detach()
    rows = [{"input_ids": row, "labels": row} for row in tokens(8)]
    how: Any = {"max_steps": 4, "learning_rate": 1e-3, "report_to": [], "use_cpu": True}
    arguments = transformers.TrainingArguments(tmp_path, save_strategy="no", **how)
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    last = model(**given).loss.detach()
    assert last < first
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", experts_implementation="fp8moe", dtype=torch.float32
    )
    assert torch.equal(again(**given).loss, last)


def test_lora() -> None:
    """By PEFT's configuration, beside PEFT's own over "eager": loss, gradients, and merged."""
    peft = pytest.importorskip("peft")
    ids, how = tokens(), {"layer_types": ["full_attention"] * 2}
    eager, model = model_of("GptOss", **how), model_of("GptOss", **how)
    fp8moe.swap(model)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=[], target_parameters=targets)
    theirs, ours = peft.get_peft_model(eager, config), fp8moe.get_peft_model(model, config)
    adapters = peft.get_peft_model_state_dict(theirs)
    assert {k: v.shape for k, v in adapters.items()} == {
        k: v.shape for k, v in peft.get_peft_model_state_dict(ours).items()
    }
    torch.manual_seed(2)
    adapters = {k: 0.05 * torch.randn_like(v) for k, v in adapters.items()}
    losses, grads = [], []
    for adapted in (theirs, ours):
        peft.set_peft_model_state_dict(adapted, adapters)
        loss = adapted(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        trained = {n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}
        assert len(trained) == 8
        grads.append(torch.stack([g.norm() for _, g in sorted(trained.items())]))
    torch.testing.assert_close(losses[1], losses[0], rtol=0.01, atol=0)
    torch.testing.assert_close(grads[1], grads[0], rtol=0.15, atol=0)
    merged = [adapted.merge_and_unload() for adapted in (theirs, ours)]
    for name, want in merged[0].state_dict().items():
        torch.testing.assert_close(merged[1].state_dict()[name], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["registered", "swapped"])
def test_pefts_own_adapters_are_those_of_the_model(how: str) -> None:
    """PEFT reads which way weights lie, and derives a class from the experts'."""
    peft = pytest.importorskip("peft")
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=8, target_modules=[], target_parameters=targets)
    models = [model_of("GptOss", layer_types=["full_attention"] * 2) for _ in range(2)]
    if how == "swapped":
        fp8moe.swap(models[0], recipe=None)
    else:
        fp8moe.register("fp8moe_bf16", recipe=None)
        models[0].set_experts_implementation("fp8moe_bf16")
    ours, theirs = (peft.get_peft_model(model, config) for model in models)
    torch.manual_seed(2)
    adapters = {
        k: 0.05 * torch.randn_like(v) for k, v in peft.get_peft_model_state_dict(theirs).items()
    }
    for adapted in (ours, theirs):
        peft.set_peft_model_state_dict(adapted, adapters)
    want = theirs(input_ids=tokens()).logits
    assert error(ours(input_ids=tokens()).logits, want) < 0.1
    with ours.disable_adapter():
        assert error(ours(input_ids=tokens()).logits, want) > 0.2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj", "delay_wgrad"])
def test_gradients_elsewhere_are_refused_by_name(name: str, compiled: bool) -> None:
    """Square weights, whose gradient would fit the other way round, too."""
    holder = nn.ModuleDict({"layer": experts("GptOssExperts", hidden=128, inner=128)})
    fp8moe.swap(holder, delay_wgrad=name == "delay_wgrad")
    layer: Any = holder["layer"]
    if name != "delay_wgrad":
        weight = getattr(layer, name)
        weight.main_grad = torch.zeros(weight.shape)
    if compiled:
        layer.compile(backend="eager")
    with pytest.raises(ValueError, match=r"\[MoEExperts\] weights \[E, in, out\] must have their"):
        run(layer)


# ---- several ranks ------------------------------------------------------------------------------


def step(group: Any, how: str) -> list[Tensor]:
    holder = nn.ModuleDict({"layer": experts("GptOssExperts")})
    options: Any = {"group": group} if group is not None and how == "group" else {}
    fp8moe.swap(holder, **options)
    layer: Any = holder["layer"]
    if group is not None and how == "fully_shard":
        fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu"))
    g = torch.Generator().manual_seed(1)
    x, dout = torch.randn(2, 96, H, generator=g)
    ids, probs = torch.rand(96, E, generator=g).topk(2).indices, torch.rand(96, 2, generator=g)
    given = [x, ids, probs, dout]
    if group is not None:
        given = [t.chunk(2)[dist.get_rank(group)] for t in given]
    out = layer(*given[:3])
    out.backward(given[3])
    grads = [getattr(layer, name).grad for name in PARAMETERS]
    return [out.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads)]


@pytest.mark.parametrize("how", ["group", "fully_shard"])
def test_ranks_are_one_process(pool: Pool, how: str) -> None:
    want = step(None, how)
    found = results(pool.run(2, step, how))
    assert error(torch.cat([part[0] for part in found]), want[0]) < 0.02
    for got, its in zip(found[0][1:], want[1:], strict=True):
        assert got.shape == its.shape
        assert error(2.0 * got, its) < 0.02


def pretrained(group: Any, path: str) -> list[Tensor]:
    model = fp8moe.from_pretrained(
        transformers.AutoModelForCausalLM, path, group=group, dtype=torch.float32
    )
    given = {"input_ids": tokens(), "labels": tokens(), "use_cache": False}
    return [model(**given).loss.detach()]


def test_ranks_read_their_own_experts(pool: Pool, tmp_path: Path) -> None:
    model = model_of("GptOss", layer_types=["full_attention"] * 2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("_bias"):
                p.normal_()
    model.save_pretrained(tmp_path)
    fp8moe.swap(model)
    want = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.detach()
    for (loss,) in results(pool.run(2, pretrained, str(tmp_path))):
        assert error(loss, want) < 1e-3
