"""The steps of a Hugging Face model as the recipe of docs/how-to/hugging-face.md makes them faster.

    python benchmarks/transformers_recipe.py --json FILE [--case NAME] [--losses] [--quick]

Each piece alone and all together, with the experts by `grouped_mm` and by "fp8moe": milliseconds,
tokens per second, peak memory, where the time goes, and losses of steps over fresh tokens. The
share of the limit is that of the model's arithmetic at the dense bf16 rate of the same run.
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
from torch import Tensor

import common
import transformers_step as steps
from common import environment
from fp8moe_cutlass.integrations import transformers as fp8moe
from kernel_trace import durations
from timing import Limits

BF16, OURS = "grouped_mm", "fp8moe"
DEFAULT = f"{BF16}: default"
# What a variant has over Hugging Face's default. Pieces are compared alone and together.
LAYERS, LOSS, DENSE = "layers", "loss", "dense FP8"
ADAMW, STATES = "AdamW compiled", "AdamW FP8"  # optimizers
ALONE = ((), (LAYERS,), (LOSS,), (DENSE,), (ADAMW,), (STATES,))
TOGETHER = [(LAYERS, LOSS, *more) for more in ((), (DENSE,), (ADAMW,), (STATES,))]
ALL = [(LAYERS, LOSS, optimizer, DENSE) for optimizer in (ADAMW, STATES)]
QWEN, V3 = (next(c for c in steps.CASES if c.name == n) for n in ("qwen3-30b", "deepseek-v3-sizes"))
LARGE = replace(
    QWEN,
    name="qwen3-30b-vocabulary",
    model=QWEN.model + ", vocabulary 151,936",
    config=QWEN.config | {"vocab_size": 151936},
)
CASES = [QWEN, LARGE, V3]


def variants_of(case: steps.Case) -> list[tuple[str, ...]]:
    if case is V3:
        found = [(), (LAYERS, LOSS)]
    elif case is LARGE:
        found = [(), (LAYERS, LOSS), (LAYERS, LOSS, ADAMW)]
    else:
        found = [*ALONE, *TOGETHER, *ALL]
    if importlib.util.find_spec("torchao") is None:
        found = [pieces for pieces in found if not {DENSE, STATES} & {*pieces}]
    return found


def name_of(experts: str, pieces: tuple[str, ...]) -> str:
    return f"{experts}: {' + '.join(pieces) or 'default'}"


class Recipe(steps.Bench):
    """A model, of which `choose` switches the pieces on and off."""

    wide = 1024  # of the linears that run in FP8

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.model.config.use_cache = False
        self.layers = list(self.model.model.layers)
        for layer in self.layers:
            layer.compile()
        self.calls = [layer._compiled_call_impl for layer in self.layers]
        self.loss = self.model.loss_function
        self.compiled_loss = torch.compile(self.loss)
        self.plain = {
            n: m
            for n, m in self.model.named_modules()
            if isinstance(m, torch.nn.Linear) and n != "lm_head" and m.out_features >= self.wide
        }
        self.dense = dict(self.plain)
        if importlib.util.find_spec("torchao") is not None:
            self.dense = {n: fp8_linear(m, self.device) for n, m in self.plain.items()}
        self.wants: tuple[str, ...] = ()

    def choose(self, variant: str) -> None:
        experts, _, rest = variant.partition(": ")
        self.wants = () if rest == "default" else tuple(rest.split(" + "))
        self.model.set_experts_implementation(experts)
        for layer, compiled in zip(self.layers, self.calls, strict=True):
            layer._compiled_call_impl = compiled if LAYERS in self.wants else None
        self.model.loss_function = self.compiled_loss if LOSS in self.wants else self.loss
        for name, module in (self.dense if DENSE in self.wants else self.plain).items():
            self.model.set_submodule(name, module)

    def use(self, pieces: tuple[str, ...]) -> None:
        """The optimizer of such variants, new."""
        self.optimizer = None
        self.tidy()
        made = next((OPTIMIZERS[p] for p in pieces if p in OPTIMIZERS), self.case.optimizer)
        self.optimizer = made(list(self.model.parameters()))

    def steps(self) -> None:
        """A row per variant: those with one optimizer take turns."""
        pieces = variants_of(self.case)
        for optimizer in (None, *OPTIMIZERS):
            group = [
                p for p in pieces if next((o for o in p if o in OPTIMIZERS), None) == optimizer
            ]
            if group:
                self.use(group[0])
                self.turns([name_of(e, p) for p in group for e in (BF16, OURS)])

    def turns(self, names: list[str]) -> None:
        times: dict[str, list[float]] = {name: [] for name in names}
        more: dict[str, dict[str, Any]] = {name: {} for name in names}
        for turn in range(6):
            for name in list(times):
                self.choose(name)
                try:
                    if not turn:
                        start = time.perf_counter()
                        self.step()
                        self.wait()
                        more[name] = {"first_s": time.perf_counter() - start}
                        more[name] |= {"peak_gib": self.peak(self.step), "kernels": {}}
                        if not self.wants or LAYERS in self.wants:
                            more[name]["kernels"] = self.kernels()
                    self.wait()
                    start = time.perf_counter()
                    for _ in range(2):
                        self.step()
                    self.wait()
                except Exception as failed:
                    print(f"failed: {name}: {failed!r}"[:2000], flush=True)
                    del times[name]
                    continue
                if turn:
                    times[name].append(1e3 * (time.perf_counter() - start) / 2)
        for name, taken in times.items():
            ms = statistics.median(taken)
            self.done({
                "op": "step", "model": self.case.model, "shape": self.shape, "variant": name,
                "ms": ms, "host_us": None, "bytes": 0, "flops": self.flops(),
                "tokens_per_s": self.ids.numel() / ms * 1e3, "peers": {},
                "repeat": {"min": min(taken), "max": max(taken)}, **more[name],
            })  # fmt: skip

    def flops(self) -> int:
        """Of a step's products: the parameters that a token meets, and causal attention."""
        config = self.model.config
        slots, experts = self.case.config["num_experts_per_tok"], self.case.config["num_experts"]
        met = 0.0
        for name, p in self.model.named_parameters():
            if p.ndim >= 2 and "embed" not in name:
                met += p.numel() * (slots / experts if p.ndim == 3 else 1)
        length = self.ids.shape[1]
        wide = config.num_attention_heads * self.case.config["head_dim"]
        scores = 2 * config.num_hidden_layers * wide * length / 2
        return int(6 * (met + scores) * self.ids.numel())

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
        compiled = (LAYERS, LOSS)
        first: tuple[tuple[str, tuple[str, ...]], ...] = ((BF16, ()), (BF16, compiled))
        for experts, pieces in (*first, (OURS, (*compiled, ADAMW)), (BF16, (*compiled, ADAMW))):
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
    "experts": r"fp8moe|GroupProblemShape|grouped_mm|GroupedGemm",
    "attention": r"flash|fmha|sdpa|flex_attention",
    "loss": r"log_?softmax|nll_loss|cross_entropy",
    "other GEMMs": r"nvjet|gemm|cutlass|xmma|cublas",
}


def family(kernel: str) -> str:
    for name, pattern in FAMILIES.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    return "elementwise, moves"


def tokens(count: int, shape: torch.Size, vocabulary: int) -> Tensor:
    """[count, *shape]: each token follows from the one before it, or in one of four is random."""
    chosen = torch.Generator().manual_seed(1)
    following = torch.randperm(vocabulary, generator=chosen)
    # Of few tokens, so that some hundred steps learn what follows.
    random = torch.randint(vocabulary // 16, (count, *shape), generator=chosen)
    free = torch.rand(count, *shape, generator=chosen) < 0.25
    made = random.clone()
    for at in range(1, shape[1]):
        follows = following[made[..., at - 1]] % (vocabulary // 16)
        made[..., at] = torch.where(free[..., at], random[..., at], follows)
    return made


def fp8_linear(module: torch.nn.Linear, device: torch.device) -> torch.nn.Module:
    """torchao's, over the same weight."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name("rowwise")
    if device.type == "cpu":
        config = replace(config, emulate=True)
    made: torch.nn.Module = Float8Linear.from_float(module, config)
    return made


class CompiledAdamW(torch.optim.AdamW):
    @torch.compile
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def compiled_adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    device = parameters[0].device
    lr = torch.tensor(1e-4, device=device)
    return CompiledAdamW(parameters, lr=lr, capturable=device.type == "cuda")


def fp8_states(parameters: list[Any]) -> torch.optim.Optimizer:
    from torchao.optim import AdamWFp8

    made: torch.optim.Optimizer = AdamWFp8(parameters, lr=1e-4)
    return made


OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    ADAMW: compiled_adamw,
    STATES: fp8_states,
}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--losses", type=int, default=0, help="of so many steps, instead")
    given = parser.parse_args()
    cases = [c for c in CASES if given.case is None or c.name in given.case]
    count = 8192
    if given.quick:
        cases, count = [replace(QWEN, config=steps.QUICK[0].config)], 256
        Recipe.wide = 1
    torch._dynamo.config.recompile_limit = 64
    device = torch.device(given.device)
    fp8moe.register()
    limits = Limits(device)
    limits.wake()
    record: dict[str, Any] = {"environment": environment(limits), "results": [], "losses": {}}
    record["environment"] |= {
        "transformers": transformers.__version__,
        "bf16_tflops": bf16_tflops(limits),
    }
    print(record["environment"], flush=True)

    def done(row: dict[str, Any]) -> None:
        row["limit_ms"] = row["flops"] / record["environment"]["bf16_tflops"] / 1e9
        common.show(row)
        kernels = {k: round(ms, 1) for k, ms in row["kernels"].items()}
        print(f"   {row['peak_gib']:.1f} GiB, {row['tokens_per_s']:,.0f} tokens/s, "
              f"{100 * row['limit_ms'] / row['ms']:.0f}% of the limit, first step "
              f"{row['first_s']:.0f} s, {kernels}", flush=True)  # fmt: skip
        record["results"].append(row)
        given.json.write_text(json.dumps(record, indent=1) + "\n")

    for case in cases:
        bench = Recipe(case, count, device, done)
        if not given.losses:
            bench.steps()
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
