"""The pieces of a transformers step by themselves: attention, the head with its loss, projections.

    python benchmarks/transformers_pieces.py --json FILE [--quick]

Forward and backward of 8,192 tokens in bf16: milliseconds, the peak of memory, and how far the
gradient of x is from the first row's. What a library lacks or refuses is printed and left out.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss

import common
from timing import Limits
from transformers_variants import fp8_linear

Step = Callable[[], Any]


class Bench:
    def __init__(self, device: torch.device, quick: bool, done: Callable[[Any], None]) -> None:
        self.device, self.quick, self.done = device, quick, done
        self.tokens = 64 if quick else 8192

    def random(self, *shape: int) -> Tensor:
        made = torch.randn(*shape, device=self.device, dtype=torch.bfloat16)
        return made.mul_(0.02 if len(shape) == 2 else 1.0).requires_grad_()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def compare(self, op: str, shape: dict[str, int], x: Tensor, runs: Mapping[str, Step]) -> None:
        """A row per run, which leaves x a gradient."""
        first: Tensor | None = None
        for name, run in runs.items():
            try:
                row = self.measure(run)
            except Exception as failed:
                print(f"failed: {op}, {name}: {failed!r}"[:500], flush=True)
                continue
            assert x.grad is not None
            grad = x.grad.float()
            first = grad if first is None else first
            row["error"] = float((grad - first).norm() / first.norm())
            self.done({"op": op, "shape": shape, "variant": name, **row})

    def measure(self, run: Step) -> dict[str, Any]:
        gc.collect()
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.empty_cache()
        start = time.perf_counter()
        for _ in range(2):
            run()
        self.wait()
        first_s = time.perf_counter() - start
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(3):
                run()
            self.wait()
            times.append(1e3 * (time.perf_counter() - start) / 3)
        return {
            **{"ms": statistics.median(times), "host_us": None, "bytes": 0, "flops": 0},
            **{"limit_ms": None, "peers": {}, "first_s": first_s},
            "repeat": {"min": min(times), "max": max(times)},
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        }

    # ---- the pieces -----------------------------------------------------------------------------

    def attention(self) -> None:
        """32 heads over 4 of keys and values: Qwen3-30B's."""
        length = self.tokens // 4
        q, k, v = (self.random(4, heads, length, 128) for heads in (32, 4, 4))
        dout = torch.randn_like(q)
        mask = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
        repeat = partial(torch.repeat_interleave, repeats=8, dim=1)
        causal: Any = {"is_causal": True, "enable_gqa": True}
        flex: Any = torch.compile(flex_attention, dynamic=False)
        blocks = create_block_mask(
            lambda b, h, i, j: i >= j, 4, None, length, length, device=str(self.device)
        )

        def backward(of: Callable[[], Tensor], kernel: SDPBackend | None = None) -> None:
            q.grad = k.grad = v.grad = None
            with sdpa_kernel(kernel) if kernel else contextlib.nullcontext():
                of().backward(dout)  # type: ignore[no-untyped-call]

        def with_mask() -> Tensor:
            return F.scaled_dot_product_attention(q, repeat(k), repeat(v), attn_mask=mask)

        def by_causal() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, **causal)

        runs: dict[str, Step] = {
            "SDPA with a mask": partial(backward, with_mask),
            "SDPA, causal": partial(backward, by_causal),
        }
        if self.device.type == "cuda":
            for name, kernel in (
                ("FlashAttention-2 of torch", SDPBackend.FLASH_ATTENTION),
                ("cuDNN", SDPBackend.CUDNN_ATTENTION),
            ):
                runs[f"SDPA, causal, {name}"] = partial(backward, by_causal, kernel)
            runs["flex attention, causal block mask"] = partial(
                backward, lambda: flex(q, k, v, block_mask=blocks, enable_gqa=True)
            )
        self.compare("attention", {"T": self.tokens, "L": length}, q, runs)

    def head(self, vocabulary: int) -> None:
        """The head and the loss."""
        hidden = 64 if self.quick else 2048
        x = self.random(4, self.tokens // 4, hidden)
        linear = torch.nn.Linear(hidden, vocabulary, False, self.device, torch.bfloat16)
        w = linear.weight
        labels = torch.randint(vocabulary, (4, self.tokens // 4), device=self.device)
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)

        def theirs(of: Callable[[Tensor], Tensor], loss: Any) -> Tensor:
            made: Tensor = loss(of(x), labels, vocabulary)
            return made

        def of_chunk(rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(rows, weight).float(), labels, reduction="sum")

        compiled_chunk = torch.compile(of_chunk)

        def chunked() -> Tensor:
            parts = zip(x.view(-1, hidden).chunk(8), shifted.chunk(8), strict=True)
            sums = [
                checkpoint(compiled_chunk, rows, w, of, use_reentrant=False) for rows, of in parts
            ]
            return torch.stack(sums).sum() / (shifted != -100).sum()

        def backward(of: Callable[[], Tensor]) -> None:
            x.grad = w.grad = None
            of().backward()  # type: ignore[no-untyped-call]

        loss: Any = torch.compile(ForCausalLMLoss)
        both: Any = torch.compile(partial(theirs, linear, ForCausalLMLoss))
        runs: dict[str, Callable[[], Tensor]] = {
            "transformers, eager": partial(theirs, linear, ForCausalLMLoss),
            "the loss compiled": partial(theirs, linear, loss),
        }
        for recipe in ("tensorwise", "rowwise"):
            with contextlib.suppress(ImportError):
                fp8 = torch.compile(fp8_linear(linear, self.device, recipe))
                runs[f"the loss compiled, torchao's {recipe} head"] = partial(theirs, fp8, loss)
        runs |= {"head and loss compiled": both, "8 chunks, compiled, checkpointed": chunked}
        if self.device.type == "cuda":
            if importlib.util.find_spec("cut_cross_entropy"):
                from cut_cross_entropy import linear_cross_entropy

                runs["cut-cross-entropy"] = lambda: linear_cross_entropy(x, w, labels, shift=1)
            if importlib.util.find_spec("liger_kernel"):
                from liger_kernel.transformers import functional as liger

                runs["liger-kernel"] = lambda: liger.liger_fused_linear_cross_entropy(
                    x.view(-1, hidden), w, shifted
                )
        steps = {name: partial(backward, run) for name, run in runs.items()}
        shape = {"T": self.tokens, "H": hidden, "V": vocabulary}
        self.compare("head and loss", shape, x, steps)

    def projections(self, hidden: int) -> None:
        """q, k, v and o of one layer, compiled."""
        heads, narrow = (64, 16) if self.quick else (4096, 512)
        outputs = [(hidden, heads), (hidden, narrow), (hidden, narrow), (heads, hidden)]
        plain = [torch.nn.Linear(a, b, False, self.device, torch.bfloat16) for a, b in outputs]
        x = self.random(1, self.tokens, hidden)

        def forward(layers: list[Any], x: Tensor) -> tuple[Tensor, ...]:
            x = F.silu(x)
            q, k, v = (layer(x) for layer in layers[:3])
            return layers[3](F.silu(q)), k, v

        douts = [torch.randn_like(out) for out in forward(plain, x)]

        def backward(run: Any) -> None:
            for t in (x, *(layer.weight for layer in plain)):
                t.grad = None
            torch.autograd.backward(run(x), douts)

        runs = {"bf16": partial(backward, torch.compile(partial(forward, plain)))}
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
            with contextlib.suppress(ImportError):
                wide = [
                    fp8_linear(m, self.device, recipe) if m.out_features >= heads else m
                    for m in plain
                ]
                runs[recipe] = partial(backward, torch.compile(partial(forward, wide)))
        self.compare("projections", {"T": self.tokens, "H": hidden}, x, runs)


def main() -> None:
    given = common.parser(__doc__).parse_args()
    device = torch.device(given.device)
    limits = Limits(device)
    limits.wake()
    record: dict[str, Any] = {"environment": common.environment(limits), "results": []}

    def done(row: dict[str, Any]) -> None:
        common.show(row)
        print(
            f"   {row['peak_gib']:.1f} GiB, error {row['error']:.1e}, first {row['first_s']:.0f} s"
        )
        record["results"].append(row)
        given.json.write_text(json.dumps(record, indent=1) + "\n")

    bench = Bench(device, given.quick, done)
    bench.attention()
    bench.head(512 if given.quick else 151936)
    for hidden in (64,) if given.quick else (2048, 7168):
        bench.projections(hidden)
    print(f"wrote {given.json}", flush=True)


if __name__ == "__main__":
    main()
