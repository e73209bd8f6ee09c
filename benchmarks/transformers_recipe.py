"""The steps of a Hugging Face model as the recipe of docs/how-to/hugging-face.md makes them faster.

    python benchmarks/transformers_recipe.py --json FILE [--case NAME] [--advised] [--quick]

Each piece alone and all together, with the experts by `grouped_mm` and by "fp8moe": milliseconds,
tokens per second, peak memory, and where the time goes; with --losses STEPS, losses of steps over
fresh tokens instead. The share of the limit is that of the model's arithmetic at the dense bf16
rate of the same run, `place`. A second run with the same --json adds other cases.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers

import common
import transformers_step as steps
from common import environment
from fp8moe_cutlass.integrations import transformers as fp8moe
from fp8moe_cutlass.nn import MoEExperts
from kernel_trace import durations
from timing import Limits, capture, warm_up
from transformers_variants import (
    ADAMW,
    BACKWARD,
    BF16,
    CASES,
    DENSE,
    FULL,
    GRAPH,
    HEAD,
    LAYERS,
    LOSS,
    OPTIMIZERS,
    OURS,
    QWEN,
    Pieces,
    SgdInBackward,
    advised,
    fp8_linear,
    name_of,
    tokens,
    variants_of,
)


class Recipe(steps.Bench):
    """A model, of which `choose` switches the pieces on and off. wide: the width from which on
    linears can run in FP8."""

    def __init__(self, *given: Any, wide: int) -> None:
        self.optimizers: dict[str, Any] = {}  # by their piece, of the variants so far
        super().__init__(*given)
        self.model.config.use_cache = False
        self.frozen: dict[str, tuple[Any, MoEExperts]] = {}  # experts by name, in bf16 and FP8
        if self.case.lora:
            self.freeze()
        self.layers = [*self.model.model.layers, self.model.model.norm]
        for layer in self.layers:
            layer.compile()
        self.calls = [layer._compiled_call_impl for layer in self.layers]
        self.loss = self.model.loss_function
        self.compiled_loss = torch.compile(self.loss)
        self.plain = {
            n: m
            for n, m in self.model.named_modules()
            if isinstance(m, torch.nn.Linear) and m.out_features >= wide
        }
        self.fp8 = dict(self.plain)
        if importlib.util.find_spec("torchao") is not None:
            self.fp8 = {n: fp8_linear(m, self.device) for n, m in self.plain.items()}
            self.fp8["lm_head"].compile()
        self.wants: Pieces = ()
        self.work = self.flops(), self.bytes()

    def freeze(self) -> None:
        """LoRA on the attention. The frozen experts are parameters, and for FP8 their codes."""
        import peft

        lora = peft.LoraConfig(r=16, target_modules=r".*self_attn\.\w_proj")
        peft.inject_adapter_in_model(lora, self.model)
        found = [(n, m) for n, m in self.model.named_modules() if hasattr(m, "gate_up_proj")]
        for name, experts in found:
            count, hidden, inner = experts.down_proj.shape
            layer = MoEExperts(count, hidden, inner, device="meta")
            layer.gate_up_proj, layer.down_proj = experts.gate_up_proj, experts.down_proj
            codes = dict(layer.fp8_tensors(fused=True))
            made = MoEExperts.from_fp8(codes, num_experts=count, device=self.device)
            self.frozen[name] = experts, made

    def choose(self, variant: str) -> None:
        experts, _, rest = variant.partition(": ")
        self.wants = () if rest == "default" else tuple(rest.split(" + "))
        self.model.set_experts_implementation(BF16 if self.frozen else experts)
        for name, (plain, fp8) in self.frozen.items():
            self.model.set_submodule(name, fp8 if experts == OURS else plain)
        own = FULL if GRAPH in self.wants else self.case.attention
        self.model.set_attn_implementation(own)
        for layer, compiled in zip(self.layers, self.calls, strict=True):
            layer._compiled_call_impl = compiled if LAYERS in self.wants else None
        self.model.loss_function = self.compiled_loss if LOSS in self.wants else self.loss
        for name, module in self.plain.items():
            wanted = (HEAD if name == "lm_head" else DENSE) in self.wants
            self.model.set_submodule(name, self.fp8[name] if wanted else module)

    def ready(self) -> Callable[[], Any]:
        """The chosen variant's step, captured if it wants that."""
        if GRAPH not in self.wants or self.device.type != "cuda":
            return self.step

        def step() -> None:
            loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
            loss.backward()
            self.optimizer.step()

        warm_up(self.step, 2)
        self.tidy()
        return capture(step)

    def use(self, pieces: Pieces) -> None:
        """The optimizer of such variants. Its states stay while others run."""
        if isinstance(self.optimizer, SgdInBackward):
            self.optimizer.end()
        piece = next((p for p in pieces if p in OPTIMIZERS), "")
        if piece == BACKWARD or piece not in self.optimizers:
            made: Any = OPTIMIZERS.get(piece, self.case.optimizer)
            self.optimizers[piece] = made(list(self.model.parameters()))
        self.optimizer = self.optimizers[piece]

    def peak(self, run: Callable[[], Any]) -> float:
        """Without the states of optimizers that this step does not use."""
        others = [o for o in self.optimizers.values() if o is not self.optimizer]
        states = [t for o in others for of in getattr(o, "state", {}).values() for t in of.values()]
        held: int = sum(t.nbytes for t in states if t.device.type == self.device.type)
        return super().peak(run) - held / 2**30

    def turns(self, names: list[str]) -> None:
        """A row per variant, of four rounds after one to warm up. An interrupt ends them early."""
        times: dict[str, list[float]] = {name: [] for name in names}
        more: dict[str, dict[str, Any]] = {}
        try:
            for turn in range(5):
                self.round(turn, times, more)
        except KeyboardInterrupt:
            if turn < 2:
                raise
        for of in times.values():
            del of[0]  # warms up
        for name, taken in times.items():
            ms = statistics.median(taken)
            self.done({
                "op": "step", "model": self.case.model, "shape": self.shape, "variant": name,
                "ms": ms, "host_us": None, "bytes": 0, "flops": int(sum(self.work[0].values())),
                "flops_of": self.work[0], "bytes_of": self.work[1],
                "tokens_per_s": self.ids.numel() / ms * 1e3, "peers": {},
                "repeat": {"min": min(taken), "max": max(taken)}, **more[name],
            })  # fmt: skip

    def round(
        self, turn: int, times: dict[str, list[float]], more: dict[str, dict[str, Any]]
    ) -> None:
        """Each variant once; what fails is left out from then on."""
        for name in list(times):
            self.choose(name)
            self.use(self.wants)
            try:
                if not turn:
                    more[name] = self.first()
                times[name].append(self.timed())
            except Exception as failed:
                print(f"failed: {name}: {failed!r}"[:2000], flush=True)
                del times[name]
            self.clear()

    def first(self) -> dict[str, Any]:
        """What a first step takes, the peak of memory, and where the time goes."""
        start = time.perf_counter()
        self.step()
        self.wait()
        found: dict[str, Any] = {"first_s": time.perf_counter() - start, "kernels": {}}
        found["peak_gib"] = self.peak(self.ready if GRAPH in self.wants else self.step)
        self.clear()
        if GRAPH not in self.wants and (LAYERS in self.wants or not self.wants):
            found["kernels"] = self.kernels()
        return found

    def timed(self) -> float:
        """Milliseconds of a step, of three."""
        step = self.ready()
        step()
        self.wait()
        start = time.perf_counter()
        for _ in range(3):
            step()
        self.wait()
        return 1e3 * (time.perf_counter() - start) / 3

    def clear(self) -> None:
        """No gradients, which may lie in a graph's memory."""
        for p in self.model.parameters():
            p.grad = None
        if GRAPH in self.wants:
            self.tidy()

    def flops(self) -> dict[str, float]:
        """Of a step's products: the parameters that a token meets, and causal attention."""
        config = self.model.config
        slots, experts = self.case.config["num_experts_per_tok"], self.case.config["num_experts"]
        met = {"experts": 0.0, "other GEMMs": 0.0}
        for name, p in self.model.named_parameters():
            products = 6 if p.requires_grad else 4
            if p.ndim == 3:
                met["experts"] += products * p.numel() * slots / experts
            elif p.ndim == 2 and "embed" not in name:
                met["other GEMMs"] += products * p.numel()
        wide = config.num_attention_heads * self.case.config["head_dim"]
        met["attention"] = 6 * config.num_hidden_layers * wide * self.ids.shape[1]
        return {of: count * self.ids.numel() for of, count in met.items()}

    def bytes(self) -> dict[str, float]:
        """What a step must read and write for the weights, for a compiled loss, and for the rows of
        FP8 experts beside their products."""
        per_weight = 14 if self.case.optimizer is steps.adamw else 6  # gradient, weight, states
        weights = {p: p.numel() for p in self.model.parameters() if p.requires_grad}
        quantized = sum(n for p, n in weights.items() if p.ndim == 3)
        config, tokens = self.case.config, self.ids.numel()
        h, i = config["hidden_size"], config["moe_intermediate_size"]
        rows = tokens * config["num_experts_per_tok"]
        moved = {
            "quantize x, dout": 2 * 3 * tokens * h,
            "permute x, dout": 2 * (tokens + rows) * h,
            "SwiGLU": 5 * rows * i,
            "SwiGLU backward": 11 * rows * i,  # z, dh; dz in rows and columns, h in columns
            "transpose x, dout": 2 * (tokens + rows) * h,
            "sum out, dx": 2 * 2 * (rows + tokens) * h,
        }
        return {
            "weights to FP8": 4 * quantized,
            "optimizer": per_weight * sum(weights.values()),
            "loss": 6 * tokens * config["vocab_size"],
            "experts": config["num_hidden_layers"] * sum(moved.values()),
        }

    def kernels(self) -> dict[str, float]:
        """Milliseconds of a step's kernels by what they are for."""
        if self.device.type != "cuda":
            return {}
        found: dict[str, float] = {}

        def forward_and_backward() -> None:
            self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()

        for run in (forward_and_backward, self.optimizer.step):
            for name, us in durations(run):
                of = "optimizer" if run == self.optimizer.step else family(name)
                found[of] = found.get(of, 0.0) + us / 1e3
        self.optimizer.zero_grad()
        return found

    def losses_of(self, count: int) -> Iterator[tuple[str, list[float]]]:
        """Of `count` steps over fresh tokens from the same start."""
        data = tokens(count, self.ids.shape, self.case.config["vocab_size"])
        recipe = (LAYERS, LOSS, ADAMW)
        runs = [(BF16, ()), (BF16, recipe), (OURS, recipe), (OURS, (*recipe, HEAD))]
        for experts, pieces in runs:
            self.optimizers.clear()
            self.start()
            self.use(pieces)
            name = name_of(experts, pieces)
            self.choose(name)
            losses = []
            for ids in data:
                self.ids = ids.to(self.device)
                losses.append(self.step())
            found = [round(x, 4) for x in torch.stack(losses).float().tolist()]
            print(f"losses, {name}: {found[::20]}, {found[-1]}", flush=True)
            yield name, found


FAMILIES = {
    "weights to FP8": r"fp8moe.*quantize_tiles",
    "experts": r"fp8moe|GroupProblemShape|grouped_mm|GroupedGemm",
    "attention": r"flash|fmha|sdpa|cudnn",
    "loss": r"log_?softmax|nll_loss|cross_entropy",
    "other GEMMs": r"nvjet|gemm|cutlass|xmma|cublas",
}


def family(kernel: str) -> str:
    for name, pattern in FAMILIES.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    return "elementwise, moves"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--losses", type=int, default=0, help="of so many steps, instead")
    parser.add_argument("--advised", action="store_true", help="what the how-to has, no more")
    given = parser.parse_args()
    cases = [c for c in CASES if given.case is None or c.name in given.case]
    count = 2048 if given.losses else 8192
    if given.quick:
        case = cases[0] if given.case else QWEN
        cases, count = [replace(case, config=steps.TINY)], 256
    torch._dynamo.config.recompile_limit = 64
    device = torch.device(given.device)
    fp8moe.register()
    limits = Limits(device)
    limits.wake()
    record: dict[str, Any] = {"environment": environment(limits), "losses": {}}
    record["environment"]["transformers"] = transformers.__version__
    record["results"] = common.earlier(given.json)
    place = {"bf16_tflops": bf16_tflops(limits), "copy_tb_s": limits.copy_tb_s}
    place["tensor_tflops"] = limits.tensor_tflops
    print(record["environment"], place, flush=True)

    def done(row: dict[str, Any]) -> None:
        row |= {"limit_ms": row["flops"] / place["bf16_tflops"] / 1e9, "place": place}
        common.show(row)
        kernels = {k: round(ms, 1) for k, ms in row["kernels"].items()}
        print(f"   {row['peak_gib']:.1f} GiB, {row['tokens_per_s']:,.0f} tokens/s, "
              f"{100 * row['limit_ms'] / row['ms']:.0f}% of the limit, first step "
              f"{row['first_s']:.0f} s, {kernels}", flush=True)  # fmt: skip
        record["results"].append(row)
        given.json.write_text(json.dumps(record, indent=1) + "\n")

    for case in cases:
        bench = Recipe(case, count, device, done, wide=1 if given.quick else 1024)
        if not given.losses:
            pieces = advised(case) if given.advised else variants_of(case)
            bench.turns([name_of(e, p) for p in pieces for e in (BF16, OURS)])
        for name, losses in bench.losses_of(given.losses) if given.losses else ():
            record["losses"].setdefault(case.model, {})[name] = losses
            given.json.write_text(json.dumps(record, indent=1) + "\n")
        del bench
        gc.collect()
        torch._dynamo.reset()
    given.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {given.json}", flush=True)


def bf16_tflops(limits: Limits) -> float:
    """Dense 8192^3 in bf16; the CPU's 1024^3."""
    n = 8192 if limits.device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=limits.device, dtype=torch.bfloat16) for _ in range(2))
    run: Callable[[], Any] = partial(torch.mm, a, b)
    return 2.0 * n**3 / limits.timer.measure(run)[0].ms / 1e9


if __name__ == "__main__":
    main()
