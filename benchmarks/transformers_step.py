"""Training steps of Hugging Face transformers models: experts by grouped_mm and by "fp8moe".

    python benchmarks/transformers_step.py --json FILE [--case NAME] [--budget SECONDS] [--quick]

One model per case; all implementations run over its parameters and take turns. A case measures the
step (eager, compiled, four microbatches), its peak memory, the experts alone, and losses from the
same start. "fp8moe" quantizes its weights in every forward, except where the variant says "reused";
"remade" is transposed_weights="recompute".
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

import common
from common import environment
from fp8moe_cutlass.integrations import transformers as fp8moe
from fp8moe_cutlass.nn import reuse_fp8_weights
from timing import Limits

BASE, OURS, REMADE = "grouped_mm", "fp8moe", "fp8moe, remade"
STEPS = 20  # of losses
ATTENTION: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
LATENT: dict[str, Any] = {"num_attention_heads": 128, "num_key_value_heads": 128}


@dataclass(frozen=True)
class Case:
    """A model's configuration, its optimizer, and what is measured of it."""

    name: str
    model: str
    kind: str
    config: dict[str, Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    losses: bool = False
    microbatches: bool = False
    lora: bool = False  # on the attention, everything else frozen


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def sizes(layers: int, hidden: int, intermediate: int, experts: int) -> dict[str, Any]:
    """Names that the two configurations share, or ignore."""
    return {
        "vocab_size": 32000,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "moe_intermediate_size": intermediate,
        "num_experts": experts,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
    }


CASES = [
    Case(
        "qwen3-30b",
        "six layers of Qwen3-30B",
        "Qwen3Moe",
        sizes(6, 2048, 768, 128) | ATTENTION | {"norm_topk_prob": True},
        adamw,
        losses=True,
        microbatches=True,
    ),
    Case(
        "deepseek-v3-sizes",
        "two layers of DeepSeek-V3's sizes, 64 experts, in Qwen3-MoE",
        "Qwen3Moe",
        sizes(2, 7168, 2048, 64) | ATTENTION | {"norm_topk_prob": True},
        sgd,
    ),
    Case(  # its router weights stay float32, in Qwen3-MoE they become bfloat16
        "deepseek-v3-sizes-mixtral",
        "two layers of DeepSeek-V3's sizes, 64 experts, in Mixtral",
        "Mixtral",
        sizes(2, 7168, 2048, 64) | ATTENTION | {"num_local_experts": 64},
        sgd,
    ),
    Case(
        "deepseek-v3",
        "two layers of DeepSeek-V3 with 64 experts",
        "DeepseekV3",
        sizes(2, 7168, 2048, 64) | LATENT | {"first_k_dense_replace": 0},
        sgd,
    ),
]
TINY = sizes(2, 128, 64, 8) | {"vocab_size": 256, "num_experts_per_tok": 2}
QUICK = [
    Case(
        "tiny",
        "tiny",
        "Qwen3Moe",
        TINY | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32},
        adamw,
        losses=True,
        microbatches=True,
    )
]


class Bench:
    """A model with its optimizer and tokens [4, T / 4], and what has been measured."""

    def __init__(
        self, case: Case, tokens: int, device: torch.device, done: Callable[[Any], None]
    ) -> None:
        self.case, self.device, self.done = case, device, done
        config = getattr(transformers, f"{case.kind}Config")(**case.config)
        self.shape = {"T": tokens, "H": config.hidden_size, "layers": config.num_hidden_layers}
        with torch.device(device):
            model = getattr(transformers, f"{case.kind}ForCausalLM")._from_config(
                config, dtype=torch.bfloat16
            )
        self.model: Any = model.train()
        self.ids = torch.randint(config.vocab_size, (4, tokens // 4), device=device)
        self.start()

    def start(self) -> None:
        """The same parameters and a new optimizer each time."""
        self.optimizer: Any = None
        self.tidy()
        torch.manual_seed(0)
        with torch.no_grad():
            for p in self.model.parameters():
                p.grad = None
                p.fill_(1.0) if p.ndim == 1 else p.normal_(0.0, 0.02)
        self.optimizer = self.case.optimizer(self.model.parameters())

    def choose(self, variant: str) -> None:
        name = variant.replace(", ", "_")
        self.model.set_experts_implementation(name)

    def step(self, model: Any = None) -> Tensor:
        model = self.model if model is None else model
        loss = model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        detached: Tensor = loss.detach()
        return detached

    def four(self, reuse: bool) -> None:
        """A step of four microbatches."""
        with reuse_fp8_weights(self.model) if reuse else contextlib.nullcontext():
            for ids in self.ids.chunk(4):
                (self.model(input_ids=ids, labels=ids, use_cache=False).loss / 4).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    # ---- measuring ------------------------------------------------------------------------------

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def tidy(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def measure(
        self, what: str, runs: dict[str, tuple[str, Callable[[], Any]]], count: int
    ) -> None:
        """A row of `what`, of every variant's (implementation, run): the median of five rounds of
        `count` calls, in turn, after a round to warm up, and the peak of a call."""
        times: dict[str, list[float]] = {variant: [] for variant in runs}
        gib = {}
        for turn in range(6):
            for variant, (name, run) in runs.items():
                self.choose(name)
                if not turn:
                    run()
                    gib[variant] = self.peak(run)
                self.wait()
                start = time.perf_counter()
                for _ in range(count):
                    run()
                self.wait()
                if turn:
                    times[variant].append(1e3 * (time.perf_counter() - start) / count)
        base, *ours = runs
        ms = {variant: statistics.median(taken) for variant, taken in times.items()}
        for variant in ours:
            row = {
                "op": what,
                "model": self.case.model,
                "shape": self.shape,
                "variant": variant,
                "ms": ms[variant],
                "host_us": None,
                "bytes": 0,
                "flops": 0,
                "limit_ms": None,
                "peers": {base: ms[base]},
                "ratio": ms[base] / ms[variant],
                "peak_gib": {base: gib[base], variant: gib[variant]},
                "repeat": {"min": min(times[variant]), "max": max(times[variant])},
            }
            self.done(row)

    def peak(self, run: Callable[[], Any]) -> float:
        """GiB at the most during a call, parameters and optimizer included."""
        if self.device.type != "cuda":
            return 0.0
        self.tidy()
        torch.cuda.reset_peak_memory_stats()
        run()
        self.wait()
        return torch.cuda.max_memory_allocated() / 2**30

    def eager(self) -> None:
        self.measure("step", {n: (n, self.step) for n in (BASE, OURS, REMADE)}, 3)

    def compiled(self, *names: str) -> None:
        """One graph per implementation: torch guards on its name."""
        start = time.monotonic()
        torch._dynamo.reset()
        models = {n: torch.compile(self.model, dynamic=False) for n in names}
        runs: dict[str, tuple[str, Callable[[], Any]]] = {
            f"{n}, compiled": (n, partial(self.step, m)) for n, m in models.items()
        }
        self.measure("step", runs, 3)
        print(f"compiled and measured in {time.monotonic() - start:.0f} s", flush=True)

    def microbatches(self) -> None:
        runs: dict[str, tuple[str, Callable[[], Any]]] = {
            BASE: (BASE, lambda: self.four(False)),
            OURS: (OURS, lambda: self.four(False)),
            f"{OURS}, reused": (OURS, lambda: self.four(True)),
        }
        self.measure("step of four microbatches", runs, 2)

    def experts(self) -> None:
        """One layer's experts alone, forward and backward, over uniform random routing."""
        module = self.model.model.layers[-1].mlp.experts
        config = self.case.config
        slots, experts = config["num_experts_per_tok"], config["num_experts"]
        t = self.ids.numel()
        options: Any = {"device": self.device, "dtype": torch.bfloat16}
        x = torch.randn(t, config["hidden_size"], **options).requires_grad_()
        dout = torch.randn(t, config["hidden_size"], **options)
        ids = torch.rand(t, experts, device=self.device).topk(slots).indices
        probs = torch.rand(t, slots, device=self.device).softmax(-1).to(torch.bfloat16)
        probs.requires_grad_()

        def run() -> None:
            for leaf in (x, probs, *module.parameters()):
                leaf.grad = None
            module(x, ids, probs).backward(dout)

        self.measure("experts alone", {n: (n, run) for n in (BASE, OURS, REMADE)}, 8)
        for p in module.parameters():
            p.grad = None

    def losses(self) -> dict[str, list[float]]:
        """Of the first steps from the same start, by each implementation."""
        found = {}
        for name in (BASE, "eager", OURS):
            self.start()
            self.choose(name)
            found[name] = [float(x) for x in torch.stack([self.step() for _ in range(STEPS)])]
            off = max(abs(a - b) for a, b in zip(found[name], found[BASE], strict=True))
            print(f"losses, {name}: {found[name][0]:.4f} to {found[name][-1]:.4f}; "
                  f"at most {off:.5f} from {BASE}'s", flush=True)  # fmt: skip
        return found


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--budget", type=float, default=290.0, help="seconds for all")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="this one alone")
    given = parser.parse_args()
    cases = QUICK if given.quick else [c for c in CASES if given.case in (None, c.name)]
    began = time.monotonic()
    device = torch.device(given.device)
    fp8moe.register()
    fp8moe.register("fp8moe_remade", transposed_weights="recompute")
    limits = Limits(device)
    limits.wake()
    record: dict[str, Any] = {"environment": environment(limits), "results": [], "losses": {}}
    record["environment"]["transformers"] = transformers.__version__

    def done(row: dict[str, Any]) -> None:
        common.show(row)
        peak = ", ".join(f"{gib:.2f}" for gib in row["peak_gib"].values())
        left = given.budget - time.monotonic() + began
        print(
            f"   {row['ratio']:.3f} times {row['peers']}, GiB {peak}; {left:.0f} s left", flush=True
        )
        record["results"].append(row)
        given.json.write_text(json.dumps(record, indent=1) + "\n")

    for case in cases:
        bench = Bench(case, 256 if given.quick else 8192, device, done)
        bench.eager()
        bench.experts()
        if case.microbatches:
            bench.microbatches()
        if case.losses:
            record["losses"][case.model] = bench.losses()
        for names in ((BASE, OURS), (BASE, REMADE)):
            # What compiling takes is not known before: the last one is left out first.
            share = 0.5 if case is not cases[-1] else 0.2
            if names[1] == REMADE and time.monotonic() - began > (1 - share) * given.budget:
                print(f"left out: {case.model}, {REMADE}, compiled", flush=True)
                continue
            bench.compiled(*names)
        del bench
        gc.collect()
    given.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {given.json} in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
