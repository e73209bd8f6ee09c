"""Router.from_config: every model's router against that of transformers, or by its own rule."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8moe_cutlass.integrations.megatron import topk_routing_with_score_function
from fp8moe_cutlass.nn import Router
from fp8moe_cutlass.nn.published import _RULES
from reference import relative_error

pytestmark = pytest.mark.slow


def dense(idx: Tensor, weights: Tensor, experts: int) -> Tensor:
    return weights.new_zeros(len(idx), experts).scatter(1, idx, weights)


# ---- transformers -------------------------------------------------------------------------------

ROUTER = re.compile(r"^class (\w+(?:Router|TopKGating|MoEV1Gate))\(", re.MULTILINE)
REFUSED = {  # its config's model_type
    "DbrxRouter": "dbrx",
    "InklingTopkRouter": "inkling_text",
    "NllbMoeTop2Router": "nllb-moe",
    "PhimoeTopKRouter": "phimoe",
    "SwitchTransformersTop1Router": "switch_transformers",
    "ZayaRouter": "zaya",
}
NO_RULE = {
    "DeepseekV4HashRouter",  # the token's id chooses
    "Qwen3OmniMoeTextTopKRouter",  # no model uses it
}
CONFIGS = {  # where the name does not follow from the router's
    "Ernie4_5_VLMoeMoeTopKRouter": "Ernie4_5_VLMoeTextConfig",
    "Qwen3OmniMoeThinkerTextTopKRouter": "Qwen3OmniMoeTextConfig",
}
SMALL = {
    "hidden_size": 32,
    **dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts"), 16),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), 4),
    **dict.fromkeys(("n_group", "num_expert_group"), 4),
    "topk_group": 2,
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor", "route_scale"), 2.5),
    **dict.fromkeys(("moe_router_scaling_factor", "moe_routed_scaling_factor"), 1.5),
    "enable_moe_block": True,
    "zero_expert_num": 0,
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"norm_topk_prob": True},
    {"norm_topk_prob": False},
    {"moe_renormalize": False},
    {"topk_method": "group_limited_greedy"},
    {"expert_selection_fn": "sigmoid"},
    {"use_expert_bias": False},
    {"num_experts_per_tok": 1},
)
# What the block multiplies the experts' sum by, after the router.
AFTERWARDS = {
    "minimax_m3_vl": lambda c: c.routed_scaling_factor,
    "step3p7": lambda c: c.moe_router_scaling_factor,
    "laguna": lambda c: c.moe_routed_scaling_factor,
    "openai_privacy_filter": lambda c: c.num_experts_per_tok,
}
# Our tensor: its names there.
NAMES = {
    "weight": ("weight", *(f"{n}.weight" for n in ("proj", "gate", "wg", "layer", "classifier"))),
    "bias": ("bias",),
    "input_scale": ("scale",),
    "expert_scale": ("per_expert_scale",),
    "selection_bias": ("e_score_correction_bias", "moe_statics.e_score_correction_bias"),
}


def published_routers() -> dict[str, str]:
    """Every router class of the installed transformers, by its text: the module it is in."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return {}
    files = Path(found.origin).parent.glob("models/*/modeling_*.py")
    return {
        name: path.parent.name
        for path in sorted(files)
        for name in ROUTER.findall(path.read_text(encoding="utf-8"))
        if name not in NO_RULE
    }


ROUTERS = published_routers()


def config_of(name: str, module: str) -> Any:
    """A small config of the model whose router is `name`."""
    there = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    stem = re.sub(r"(TokenChoice|Top[kK12]+)?(Router|Gating|Gate)$", "", name)
    names = (CONFIGS.get(name), f"{stem}TextConfig", f"{stem}Config")
    config = next(getattr(there, n) for n in names if n and hasattr(there, n))()
    for field, value in SMALL.items():
        if hasattr(config, field):
            setattr(config, field, value)
    return config


def variants(name: str, module: str) -> list[Any]:
    """Configs that differ in what changes a rule."""
    found = []
    for options in VARIANTS:
        config = config_of(name, module)
        if all(hasattr(config, field) for field in options):
            for field, value in options.items():
                setattr(config, field, value)
            found.append(config)
    return found


def routed(router: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(dense weights [T, E], experts [T, k] or None) of a router of transformers."""
    takes = list(inspect.signature(router.forward).parameters)
    if "Llama4" in type(router).__name__:
        return router(x)[0], None
    if "JetMoe" in type(router).__name__:
        order, tokens, gates, sizes, _ = router(x)
        experts = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        assert len(order) == len(experts)
        return x.new_zeros(len(x), 16).index_put((tokens, experts), gates), None
    given = [x[None] if "Afmoe" in type(router).__name__ else x]
    outputs = router(*given, *([bias] if any("bias" in name for name in takes[1:]) else []))
    (idx,) = [t for t in outputs if t.dtype == torch.int64]
    (weights,) = [t for t in outputs if t.is_floating_point() and t.shape == idx.shape]
    return dense(idx, weights, 16), idx


@pytest.mark.skipif(not ROUTERS, reason="transformers is not installed")
@pytest.mark.parametrize("name", sorted(ROUTERS.keys() - REFUSED.keys()))
def test_equal_to_transformers(name: str) -> None:
    """The same experts; weights and gradients within 1e-6 of each other, relative to their norm."""
    module = ROUTERS[name]
    theirs_of = getattr(
        importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name
    )
    ran, refused = 0, []
    for config in variants(name, module):
        try:
            mine = Router.from_config(config)
        except ValueError as error:
            refused.append(str(error))
            continue
        sizes = (32, 16, 4) if "JetMoe" in name else None
        theirs = theirs_of(32, 16, config.num_experts_per_tok) if sizes else theirs_of(config)
        compare(mine, theirs, AFTERWARDS.get(module, lambda _: 1.0)(config))
        ran += 1
    assert ran
    assert all(re.search("the gate no gradient|norm_topk_prob must be", error) for error in refused)


def compare(mine: Router, theirs: Any, factor: float) -> None:
    tensors = dict(mine.named_parameters()) | dict(mine.named_buffers())
    others = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    pairs = {}
    for ours, names in NAMES.items():
        (other,) = [others.pop(n) for n in names if n in others] or [None]
        if other is None and ours == "selection_bias" and ours in tensors:
            other = torch.zeros(16)  # an argument there
        assert (ours in tensors) == (other is not None), ours
        if other is not None:
            pairs[ours] = tensors[ours], other
    assert not others
    with torch.no_grad():
        for ours, (a, b) in pairs.items():
            a.normal_(std=0.3 if ours.endswith("bias") else 1 / math.sqrt(8))
            b.copy_(a.view_as(b))
    x = torch.randn(200, 32)
    y = x.clone().requires_grad_()
    x.requires_grad_()
    routing = mine(x)
    got = dense(routing.topk_idx, routing.topk_weights, 16)
    want, chosen = routed(
        theirs, y, pairs["selection_bias"][1] if "selection_bias" in pairs else None
    )
    if chosen is None:
        chosen = want.detach().topk(routing.topk_idx.shape[1]).indices
    assert torch.equal(routing.topk_idx.sort().values, chosen.sort().values)
    want = want * factor
    assert relative_error(got.detach(), want.detach()) < 1e-6
    by = torch.randn(200, 16)
    trained = [n for n, (a, _) in pairs.items() if a.requires_grad]
    ours = torch.autograd.grad((got * by).sum(), [x, *(pairs[n][0] for n in trained)])
    other = torch.autograd.grad((want * by).sum(), [y, *(pairs[n][1] for n in trained)])
    for n, a, b in zip(["x", *trained], ours, other, strict=True):
        assert relative_error(a, b.view_as(a)) < 1e-6, n


@pytest.mark.skipif(not ROUTERS, reason="transformers is not installed")
def test_every_model_is_read_or_refused_by_name() -> None:
    for name in REFUSED.keys() & ROUTERS.keys():
        config = SimpleNamespace(model_type=REFUSED[name], hidden_size=32)
        with pytest.raises(ValueError, match=f"another model than {REFUSED[name]}: "):
            Router.from_config(config)
    read = {config_of(name, ROUTERS[name]).model_type for name in ROUTERS.keys() - REFUSED.keys()}
    assert read | {"kimi_k2"} == _RULES.keys()
    page = (Path(__file__).parents[1] / "docs/reference/routers.md").read_text()
    assert [model for model in _RULES if f"`{model}`" not in page] == []


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    fields = {"norm_topk_prob": True, "routed_scaling_factor": 2.827, "n_group": 1, "topk_group": 1}
    sizes = {"hidden_size": 32, "n_routed_experts": 16, "num_experts_per_tok": 4}
    a, b = (
        Router.from_config(SimpleNamespace(model_type=model, **sizes, **fields))
        for model in ("kimi_k2", "deepseek_v3")
    )
    assert a.rule == b.rule


# ---- Megatron -----------------------------------------------------------------------------------


def megatron_rule(
    logits: Tensor,
    bias: Tensor | None,
    score: str,
    pre_softmax: bool,
    top_k: int,
    groups: tuple[int, int] | None,
    factor: float | None,
) -> Tensor:
    """Megatron's dense probs [T, E] of float64 logits, a token at a time."""
    probs = torch.zeros_like(logits)
    for t, row in enumerate(logits):
        if score == "softmax":
            scores = torch.softmax(row, 0) if pre_softmax else row
        elif score == "sigmoid":
            scores = torch.sigmoid(row)
        else:
            scores = torch.sqrt(torch.nn.functional.softplus(row))
        compared = (scores if bias is None else scores + bias).tolist()
        if groups is not None:
            count, best = groups
            size = len(compared) // count
            parts = [compared[g * size : (g + 1) * size] for g in range(count)]
            value = [sum(sorted(part)[-(top_k // best) :]) for part in parts]
            kept = sorted(range(count), key=lambda g: value[g])[-best:]
            compared = [c if e // size in kept else float("-inf") for e, c in enumerate(compared)]
        chosen = sorted(range(len(compared)), key=lambda e: compared[e])[-top_k:]
        weights = scores[chosen]
        if score == "softmax":
            weights = weights if pre_softmax else torch.softmax(weights, 0)
        elif top_k > 1:
            weights = weights / weights.sum()
        probs[t, chosen] = weights * (factor or 1.0)
    return probs


def megatron_config(**options: Any) -> SimpleNamespace:
    given: dict[str, Any] = {
        "hidden_size": 32,
        "num_moe_experts": 16,
        "moe_router_topk": 4,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None,
        "moe_router_enable_expert_bias": False,
        "moe_router_load_balancing_type": "aux_loss",
        "add_bias_linear": False,
    }
    return SimpleNamespace(**given | options)


SETTINGS = [
    (score, pre, top_k, groups, factor, bias)
    for score, pre, top_k, groups, factor, bias in itertools.product(
        ("softmax", "sigmoid", "sqrtsoftplus"),
        (False, True),
        (1, 2, 4, 8),
        (None, (4, 1), (4, 2), (2, 1), (8, 4)),
        (None, 2.5),
        (False, True),
    )
    if (score == "softmax" or not pre)
    and not (score == "softmax" and bias)
    and not (score == "softmax" and top_k == 1 and not pre)  # refused, as by Megatron
    and (groups is None or (top_k >= groups[1] and top_k <= 16 // groups[0] * groups[1]))
]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_megatron(score: str) -> None:
    x = torch.randn(20, 32)
    mine = [s for s in SETTINGS if s[0] == score]
    assert len(mine) > 20
    for _, pre, top_k, groups, factor, bias in mine:
        router = Router.from_config(
            megatron_config(
                moe_router_topk=top_k,
                moe_router_score_function=score,
                moe_router_pre_softmax=pre,
                moe_router_num_groups=groups and groups[0],
                moe_router_group_topk=groups and groups[1],
                moe_router_topk_scaling_factor=factor,
                moe_router_enable_expert_bias=bias,
            )
        )
        if router.selection_bias is not None:
            router.selection_bias.normal_(std=0.2)
        routing = router(x)
        logits = x.double() @ router.weight.double().T
        selection = None if router.selection_bias is None else router.selection_bias.double()
        want = megatron_rule(logits, selection, score, pre, top_k, groups, factor)
        got = dense(routing.topk_idx, routing.topk_weights, 16)
        assert torch.equal(got != 0, want != 0)
        assert relative_error(got.detach(), want.detach()) < 1e-6
        by = torch.randn(20, 16)
        a, b = (torch.autograd.grad((p * by).sum(), router.weight)[0] for p in (got, want))
        assert relative_error(a, b) < 1e-6
        given = (routing.logits, top_k, pre, *(groups or (None, None)), factor, score)
        for fused in (False, True):
            probs, routing_map = topk_routing_with_score_function(
                *given, router.selection_bias, fused
            )
            assert torch.equal(routing_map, want != 0)
            assert torch.equal(probs, got)
            probs, idx = topk_routing_with_score_function(
                *given, router.selection_bias, fused, dense_output=True
            )
            assert torch.equal(idx, routing.topk_idx)
            assert torch.equal(probs, routing.topk_weights)


class Replay:
    """Megatron's RouterReplay, of one recorded choice."""

    def __init__(self, idx: Tensor) -> None:
        self.idx = idx

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, default: Any
    ) -> tuple[Tensor, Tensor]:
        assert default(scores, topk, num_groups, group_topk)[1].shape == self.idx.shape
        return scores.gather(1, self.idx), self.idx


@pytest.mark.parametrize("how", ["precomputed_indices", "router_replay"])
def test_megatrons_replay(how: str) -> None:
    logits = torch.randn(20, 16, dtype=torch.bfloat16)
    idx = torch.stack([torch.randperm(16)[:4] for _ in range(20)])
    given = idx if how == "precomputed_indices" else Replay(idx)
    probs, routing_map = topk_routing_with_score_function(
        logits, 4, score_function="sigmoid", expert_bias=torch.randn(16), **{how: given}
    )
    assert torch.equal(routing_map, dense(idx, torch.ones(20, 4), 16) != 0)
    scores = logits.double().sigmoid().gather(1, idx)
    want = (scores / scores.sum(dim=1, keepdim=True)).bfloat16()
    assert torch.equal(probs, dense(idx, want, 16))


def test_what_topk_routing_refuses() -> None:
    for given, message in (
        ({"logits": torch.randn(16)}, r"logits must be \[T, E\]; got \(16,\)"),
        ({"score_function": "tanh"}, "score_function must be one of softmax, .*'tanh'"),
        ({"expert_bias": torch.zeros(16)}, "with moe_router_enable_expert_bias; got 'softmax'"),
    ):
        with pytest.raises(ValueError, match=message):
            topk_routing_with_score_function(**{"logits": torch.randn(5, 16), "topk": 2, **given})


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_the_loss_of_transformer_engines_fused_router(score: str) -> None:
    """fused_compute_score_for_moe_aux_loss, then fused_moe_aux_loss, in float64: the map is the top
    k of the scores, whatever bias and groups choose; the loss E / (k T^2) sum_e n_e sum_t p_te."""
    tokens, experts, k = 50, 16, 4
    router = Router.from_config(
        megatron_config(
            moe_router_score_function=score,
            moe_router_num_groups=4,
            moe_router_group_topk=2,
            moe_router_enable_expert_bias=score != "softmax",
        )
    )
    if router.selection_bias is not None:
        router.selection_bias.normal_()
    routing = router(torch.randn(tokens, 32))
    logits = routing.logits.detach().double().requires_grad_()
    if score == "softmax":
        scores = logits.softmax(dim=1)
    else:
        scores = logits.sigmoid() if score == "sigmoid" else torch.log1p(logits.exp()).sqrt()
        scores = scores / scores.sum(dim=1, keepdim=True)
    n = torch.zeros(experts, dtype=torch.float64)
    for row in scores.tolist():
        n[sorted(range(experts), key=lambda e: row[e])[-k:]] += 1
    assert not torch.equal(n.long(), routing.tokens_per_expert)
    want = experts / (k * tokens**2) * (n * scores.sum(dim=0)).sum()
    got = router.balancing_loss(routing)
    assert abs(got.item() - want.item()) < 1e-6
    a = torch.autograd.grad(got, routing.logits)[0]
    assert relative_error(a, torch.autograd.grad(want, logits)[0]) < 1e-6


def test_megatrons_bias_of_the_gate() -> None:
    assert Router.from_config(megatron_config(add_bias_linear=True)).bias is not None


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SimpleNamespace(model_type="bert"), "config must be of one of afmoe, .*'bert'"),
        (SimpleNamespace(), "config must be of one of .* got 'SimpleNamespace'"),
        (
            megatron_config(moe_router_load_balancing_type=["aux_loss", "sinkhorn"]),
            "moe_router_load_balancing_type must be .* got 'sinkhorn'",
        ),
        (megatron_config(moe_router_score_function="tanh"), "score_function must be one .*'tanh'"),
        (megatron_config(moe_router_enable_expert_bias=True), "with .*expert_bias; got 'softmax'"),
        (megatron_config(moe_expert_capacity_factor=1.0), "capacity_factor must be None; got 1.0"),
        (
            megatron_config(moe_router_force_load_balancing=True),
            "force_load_balancing must be False; got True",
        ),
        (megatron_config(moe_input_jitter_eps=0.1), "moe_input_jitter_eps must be None; got 0.1"),
        (megatron_config(moe_router_topk=1), "top_k must be at least 2"),
        (
            SimpleNamespace(model_type="mixtral", router_jitter_noise=0.1),
            "router_jitter_noise must be 0.0; got 0.1",
        ),
        (
            SimpleNamespace(model_type="deepseek_v2", norm_topk_prob=True),
            "norm_topk_prob must be False; got True",
        ),
        *(
            (SimpleNamespace(model_type=model, norm_topk_prob=False), "must be True; got False")
            for model in (
                "mixtral",
                "qwen3_5_moe_text",
                "qwen3_vl_moe_text",
                "ernie4_5_moe",
                "hy_v3",
            )
        ),
        (
            SimpleNamespace(model_type="afmoe", route_norm=False),
            "route_norm must be True; got False",
        ),
        (
            SimpleNamespace(model_type="gemma4_text", enable_moe_block=False),
            "enable_moe_block must be True; got False",
        ),
    ],
)
def test_what_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router.from_config(config)
