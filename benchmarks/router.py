"""What nn.Router costs, forward and backward: eager, compiled and captured, beside the experts.

"gate" is the router's matrix product alone, forward and backward: a router whose every other step
cost nothing would take that long. "choice" is all else, forward and backward: autograd.router_topk.
"topk" is torch's own, which promises no order of equal scores. "experts" is a step of the experts
after it: of 32 of DeepSeek-V3's 256, of all of the other models'. launches: kernels of an eager
step.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from common import OnResult, Record, environment, main, parser, row
from fp8moe_cutlass.autograd import router_logits, router_topk
from fp8moe_cutlass.nn import MoEExperts, Router, RoutingRule
from timing import Limits, Run, burst, captured

V3 = RoutingRule(
    score="sigmoid",
    selection_bias=True,
    num_groups=8,
    topk_groups=4,
    best_per_group=2,
    routed_scaling_factor=2.5,
)
GPT_OSS = RoutingRule(softmax_after_topk=True, select_by="logits", gate_bias=True)


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    rule: RoutingRule
    here: int  # experts of the timed layer


MODELS = (
    Model("DeepSeek-V3", 7168, 2048, 256, 8, V3, 32),
    Model("Qwen3-30B", 2048, 768, 128, 8, RoutingRule(), 128),
    Model("GPT-OSS-120B", 2880, 2880, 128, 4, GPT_OSS, 128),
)
QUICK = (Model("quick", 128, 64, 16, 4, RoutingRule(), 8),)


def launches(step: Run) -> int:
    """The kernels, copies and memsets of one call."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        step()
        torch.cuda.synchronize()
    return sum("CUDA" in str(e.device_type) for e in seen.events() or [])


def steps_of(model: Model, x: Tensor) -> dict[str, Run]:
    """What is timed, by name."""
    router = Router(model.hidden, model.experts, model.top_k, model.rule, device=x.device)
    dweights = torch.randn(len(x), model.top_k, device=x.device)
    dlogits = torch.randn(len(x), model.experts, device=x.device)
    logits = torch.randn(len(x), model.experts, device=x.device, requires_grad=True)
    given = {"selection_bias": router.selection_bias, **model.rule.options()}
    compiled: Any = torch.compile(router, fullgraph=True)
    leaves = [x, router.weight]

    def by(module: Any) -> Run:
        return lambda: torch.autograd.grad(module(x).topk_weights, leaves, dweights)

    steps: dict[str, Run] = {
        "router": by(router),
        "router, compiled": by(compiled),
        "gate": lambda: torch.autograd.grad(router_logits(x, router.weight), leaves, dlogits),
        "choice": lambda: torch.autograd.grad(
            router_topk(logits, model.top_k, **given).topk_weights, logits, dweights
        ),
        "topk": lambda: logits.detach().topk(model.top_k),
    }
    experts = MoEExperts(model.here, model.hidden, model.intermediate, device=x.device)
    routing = router(x)
    idx = (routing.topk_idx % model.here).contiguous()
    weights = routing.topk_weights.detach().requires_grad_()
    dout = torch.randn_like(x)

    def layer() -> None:
        wanted = [x, weights, *experts.parameters()]
        torch.autograd.grad(experts(x, idx, weights), wanted, dout)

    steps["experts"] = layer
    return steps


def run(device: torch.device, given: argparse.Namespace, on_result: OnResult) -> Record:
    cuda = device.type == "cuda"
    limits = Limits(device)
    limits.wake()
    record: Record = {"environment": environment(limits), "results": []}
    for model in QUICK if given.quick else MODELS:
        for tokens in (64,) if given.quick else (4096, 32768):
            x = torch.randn(tokens, model.hidden, device=device).bfloat16().requires_grad_()
            steps = steps_of(model, x)
            runs = dict(steps)
            if cuda:
                runs |= {f"{name}, captured": captured(step) for name, step in steps.items()}
            for name, sample in burst(runs, device).items():
                count = launches(steps[name]) if cuda and name in steps else None
                shape = {"T": tokens, "H": model.hidden, "E": model.experts, "S": model.top_k}
                result = row(name, shape, "", sample, peers={}, limit_ms=None, launches=count)
                result["model"] = model.name
                record["results"].append(result)
                on_result(result)
            del steps, runs
    return record


if __name__ == "__main__":
    main(parser(__doc__), run)
