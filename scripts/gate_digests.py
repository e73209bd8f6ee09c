#!/usr/bin/env python3
"""Says whether two builds give the same bits: digests of what every operator and the layer return.

    scripts/gate_digests.py OUT.json [--device cuda] [--shapes N]
    scripts/gate_digests.py compare BASE.json NEW.json [--gone PATTERN]...

The first runs over the package that `import fp8moe_cutlass` finds: run it once per build, on the
same machine, with PYTHONPATH or the build's own interpreter. Inputs are random with fixed seeds:
200 small shapes, on a GPU some large ones too. Each shape takes a share of every operator's
options; together they take all. Only what docs/reference/layouts.md specifies is digested.
--shapes takes the first N and leaves the layer out, for a quick look.

A key is operator/options#shape, in today's words; NAMES has the words that older builds use. A case
that raises has its error in place of a digest. `compare` fails (1) where digests differ, where BASE
has a digest and NEW has none unless the key matches a PATTERN (fnmatch; may be repeated), and where
neither has one.
"""

# ruff: noqa: B023 (cases run where they are made)

from __future__ import annotations

import argparse
import collections
import fnmatch
import hashlib
import inspect
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHAPES = 200  # small ones

# Today's name: what it was called before. The first that exists is taken.
NAMES = {
    "act_quantize": ("swiglu_quantize",),
    "act_quantize_backward": ("swiglu_quantize_backward",),
    "limit": ("clamp",),
}
# Options that some builds lack: left out there if they have this value, or any value if None.
WITHOUT = {"block": None, "fp8_dtype": "e4m3"}

FORMATS = ("e4m3", "e5m2")
SCALES = ("pow2", "fp32")
DTYPES = ("float32", "float16", "bfloat16")
COLUMNS = ("block", "column")
LAYOUTS = ("row", "gemm")
ALIGNS = (1, 16, 32, 128)
BOTH = (False, True)


def call(function: Any, *args: Any, **options: Any) -> Any:
    """function(*args, **options), the options under the names that it has."""
    known = inspect.signature(function).parameters
    if "limit" in options and "activation" in known:
        from fp8moe_cutlass import Activation

        options["activation"] = Activation(limit=options.pop("limit"))
    named = {}
    for name, value in options.items():
        mine = next((n for n in (name, *NAMES.get(name, ())) if n in known), None)
        if mine or name not in WITHOUT or WITHOUT[name] not in (None, value):
            named[mine or name] = value  # an unknown one raises
    return function(*args, **named)


def op(name: str, *args: Any, **options: Any) -> Any:
    """The operator of that name, called."""
    mine = next((n for n in (name, *NAMES.get(name, ())) if hasattr(ops, n)), name)
    return call(getattr(ops, mine), *args, **options)


# ---- digests ------------------------------------------------------------------------------------


def flat(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from flat(part)
    elif value is not None:
        raise TypeError(f"no tensor: {type(value)}")


def digest(value: Any) -> str:
    """Of dtypes, shapes and bits; NaNs and zeros of either sign differ."""
    sha = hashlib.sha256()
    for t in flat(value):
        t = t.detach().cpu().contiguous()
        sha.update(f"{t.dtype}{tuple(t.shape)}".encode())
        sha.update(t.flatten().view(torch.uint8).numpy())
    return sha.hexdigest()[:16]


class Digests:
    """What is written: a digest, or an error, per key."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.shape = ""

    def add(self, name: str, options: Iterable[Any], case: Callable[[], Any]) -> None:
        key = f"{'/'.join([name, *map(str, options)])}#{self.shape}"
        assert key not in self.found, key
        try:
            self.found[key] = digest(case())
        except Exception as error:
            self.found[key] = f"error: {type(error).__name__}: {error}"


class Shares:
    """Deals the options of each operator out to the shapes, all of them in turn."""

    def __init__(self) -> None:
        self.decks: dict[str, Any] = {}

    def of(self, name: str, count: int, *choices: Iterable[Any]) -> list[tuple[Any, ...]]:
        if name not in self.decks:
            deck = list(itertools.product(*choices))
            random.Random(name).shuffle(deck)
            self.decks[name] = (len(deck), itertools.cycle(deck))
        size, deck = self.decks[name]
        return [next(deck) for _ in range(min(count, size))]


# ---- shapes and inputs --------------------------------------------------------------------------


@dataclass
class Shape:
    """Sizes, a routing, and random inputs on the device."""

    device: str
    seed: int
    tokens: int
    slots: int
    experts: int
    hidden: int
    intermediate: int
    align: int
    topk_idx: torch.Tensor

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        self.topk_idx = self.topk_idx.to(self.device)
        self.plan = ops.route(self.experts, topk_idx=self.topk_idx, align=self.align)
        self.rows = int(self.plan.row_offsets[-1])
        self.columns = int(self.plan.col_offsets[-1])
        self.is_token = self.plan.token_of_row[: self.rows] >= 0
        block = torch.arange(self.plan.columns, device=self.device) // 128
        tokens = self.plan.col_blocks[:, 1][block]
        first = torch.arange(self.plan.columns, device=self.device) % 128
        self.is_column = first < tokens  # holds a token

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def normal(self, *shape: int, dtype: str = "bfloat16") -> torch.Tensor:
        """Rows of magnitudes of their own, one in ten all zero."""
        x = torch.randn(shape, generator=self.generator, device=self.device)
        size = torch.exp2(self.integers(-9, 5, *shape[:-1], 1).float())
        x = x * size * (self.uniform(*shape[:-1], 1) > 0.1)
        return x.to(getattr(torch, dtype))

    def plain(self, *shape: int, dtype: str = "bfloat16") -> torch.Tensor:
        x = torch.randn(shape, generator=self.generator, device=self.device)
        return x.to(getattr(torch, dtype))

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def probs(self, *shape: int) -> torch.Tensor:
        """In [0, 1), one in six zero."""
        return self.uniform(*shape) * (self.uniform(*shape) > 1 / 6)

    def fp8(self, *shape: int, fp8: str, layout: str, pow2: bool) -> Fp8Tensor:
        """Random finite codes and scales."""
        largest = 0x7F if fp8 == "e4m3" else 0x7C
        codes = self.integers(0, largest, *shape) + 128 * self.integers(0, 2, *shape)
        scale = torch.exp2(self.integers(-12, -2, *scale_shape(shape, layout)).float())
        if not pow2:
            scale = scale * (1 + self.uniform(*scale.shape))
        block = (128, 128) if layout == "block" else (1, 128)
        dtype = torch.float8_e4m3fn if fp8 == "e4m3" else torch.float8_e5m2
        data = codes.to(torch.uint8).view(dtype)
        return call(Fp8Tensor, data, scale, block=block, scale_layout=layout, pow2=pow2)

    def grouped(self, fp8: str, width: int, pow2: bool) -> Fp8Tensor:
        """Rows for a GEMM: padding rows are zero, what follows them is anything."""
        t = self.fp8(self.plan.rows, width, fp8=fp8, layout="gemm", pow2=pow2)
        t.data[: self.rows].view(torch.uint8)[~self.is_token] = 0
        return t

    def transposed(self, fp8: str, channels: int, columns: str, pow2: bool) -> Fp8Tensor:
        """An operand contracted over tokens: past an expert's tokens it is zero."""
        layout = "block" if columns == "block" else "gemm"
        t = self.fp8(channels, self.plan.columns, fp8=fp8, layout=layout, pow2=pow2)
        t.data.view(torch.uint8)[:, : self.columns] *= self.is_column[: self.columns]
        return t

    # What is specified of an output.

    def of_rows(self, t: Any, rows: int | None = None) -> list[torch.Tensor]:
        """Rows of experts, or the first `rows` ones."""
        rows = self.rows if rows is None else rows
        if not isinstance(t, Fp8Tensor):
            return [t[:rows]] if t is not None else []
        scale = t.scale_inv
        if t.scale_layout != "block":
            scale = scale[:rows] if t.scale_layout == "row" else scale[:, :rows]
        return [t.data[:rows], scale]

    def of_columns(self, t: Fp8Tensor) -> list[torch.Tensor]:
        """A transposed operand."""
        blocks = self.columns // 128
        by_block = t.scale_layout == "block"
        scale = t.scale_inv[:, :blocks] if by_block else t.scale_inv[:blocks, : t.shape[0]]
        return [t.data[:, : self.columns], scale]


def of_plan(plan: Any) -> list[torch.Tensor]:
    rows = int(plan.row_offsets[-1])
    return [
        *(plan.status, plan.tokens_per_expert, plan.row_offsets, plan.col_offsets),
        *(plan.token_of_row[:rows], plan.slot_of_row[:rows], plan.row_of, plan.col_blocks),
    ]


def all_of(*tensors: Fp8Tensor) -> list[torch.Tensor]:
    return [part for t in tensors for part in (t.data, t.scale_inv)]


def routing(r: random.Random, tokens: int, slots: int, experts: int, kind: str) -> torch.Tensor:
    """topk_idx [tokens, slots]."""
    g = torch.Generator().manual_seed(r.randrange(2**31))
    shape = (tokens, slots)
    if kind == "one takes all":
        idx = torch.full(shape, r.randrange(experts))
    elif kind == "empty experts":
        idx = torch.randint(0, (experts + 1) // 2, shape, generator=g) + experts // 2
        idx = idx.clamp(max=experts - 1)
    else:
        idx = torch.randint(0, experts, shape, generator=g)
    if kind == "dropped":
        idx[torch.rand(shape, generator=g) < 0.3] = -1
    return idx.to(r.choice([torch.int32, torch.int64]))


def shapes(device: str) -> Iterator[tuple[str, Shape]]:
    kinds = ("any", "dropped", "empty experts", "one takes all")
    for n in range(SHAPES):
        r = random.Random(n)
        tokens = 0 if n % 20 == 7 else r.choice([r.randint(1, 9), r.randint(10, 140), 257])
        slots, experts = r.randint(1, 4), r.choice([1, 2, 3, 5, 8, 13])
        wide, narrow = r.choice([128, 256, 384]), 16 * r.randint(1, 26)
        hidden, intermediate = (wide, narrow) if n % 2 else (narrow, 16 * r.randint(1, 18))
        if n % 40 == 11:  # enough for every thread
            tokens, slots, experts, hidden, intermediate = 3000, 3, 13, 144, 48
        idx = routing(r, tokens, slots, experts, kinds[n % 4])
        sizes = (tokens, slots, experts, hidden, intermediate, ALIGNS[n // 4 % 4])
        yield f"{n:03}", Shape(device, n, *sizes, idx)
    if device == "cpu":
        return
    large = [
        (16384, 2, 8, 1024, 512, 1),
        (4096, 2, 8, 2048, 1040, 16),
        (2048, 8, 64, 528, 384, 1),
        (900, 4, 64, 1024, 256, 1),
        (300, 8, 128, 256, 384, 1),
        (3000, 1, 1, 2048, 2048, 128),
    ]
    for n, (tokens, slots, experts, *rest) in enumerate(large, SHAPES):
        idx = routing(random.Random(n), tokens, slots, experts, kinds[n % 2])
        yield f"{n:03}", Shape(device, n, tokens, slots, experts, *rest, idx)


# ---- operators ----------------------------------------------------------------------------------


def quantization(s: Shape, deal: Any, out: Digests) -> None:
    m, k, e, n = s.tokens, s.hidden, s.experts, s.intermediate
    for o in deal("quantize", 3, DTYPES, FORMATS, LAYOUTS, SCALES, (1e-10, 1e-2)):
        x = s.normal(m, k, dtype=o[0])
        how = {"fp8_dtype": o[1], "scale_layout": o[2], "scale": o[3], "eps": o[4]}
        out.add("quantize", o, lambda: s.of_rows(op("quantize", x, **how), m))
    for o in deal("quantize_weight", 2, DTYPES, SCALES, (None, "rows", "transpose")):
        which = {None: True, "rows": False, "transpose": "only"}[o[2]]
        w, how = s.normal(e, n, k, dtype=o[0]), {"scale": o[1], "transposed": which}

        def weight() -> Any:
            q = op("quantize_weight", w, **how)
            return all_of(*(q if which is True else (q,)))

        out.add("quantize_weight", o, weight)
    for o in deal("dequantize", 2, FORMATS, (*LAYOUTS, "block"), DTYPES, BOTH):
        shape = (e, n, k) if o[1] == "block" else (m, k)
        t = s.fp8(*shape, fp8=o[0], layout=o[1], pow2=o[3])
        out.add("dequantize", o, lambda: op("dequantize", t, dtype=o[2]))
    for o in deal("to_layout", 1, FORMATS, (LAYOUTS, LAYOUTS[::-1])):
        t = s.fp8(m, k, fp8=o[0], layout=o[1][0], pow2=True)
        out.add("to_layout", (o[0], o[1][1]), lambda: s.of_rows(t.to_layout(o[1][1]), m))


def plans(s: Shape, deal: Any, out: Digests) -> None:
    ints = ("int32", "int64")
    for o in deal("route", 2, ("topk_idx",), ints, ALIGNS, BOTH):
        idx = s.topk_idx.to(getattr(torch, o[1]))
        how = {"align": o[2], "capacity": idx.numel() // 2 if o[3] else None}
        out.add("route", o, lambda: of_plan(op("route", s.experts, topk_idx=idx, **how)))
    for o in deal("route mask", 1, ("mask",), ("bool", "uint8", *ints), ALIGNS, BOTH):
        mask = (s.uniform(s.tokens, s.experts) < 0.3).to(getattr(torch, o[1]))
        count = int(mask.sum())
        how = {"align": o[2], "capacity": count // 2 if o[3] else count + 3}
        out.add("route", o, lambda: of_plan(op("route", s.experts, routing_map=mask, **how)))
    if s.device == "cuda":  # which the CPU refuses
        idx = s.integers(-3, s.experts + 2, s.tokens, s.slots)
        out.add("route", ("bad ids",), lambda: of_plan(op("route", s.experts, topk_idx=idx)))
    for o in deal("plan_from_counts", 1, ints, ALIGNS):
        counts = s.integers(0, 40, s.experts).to(getattr(torch, o[0]))
        how = {"capacity": int(counts.sum()) + 5, "align": o[1]}
        out.add("plan_from_counts", o, lambda: of_plan(op("plan_from_counts", counts, **how)))
    segments = {"exact": 0, "tight": s.tokens // 3 + 1, "loose": s.tokens + 3}
    experts = 4 * s.experts
    for o in deal("dispatch_plan", 1, (1, 2, 4), segments, ints):
        idx = s.integers(-1, experts, s.tokens, s.slots).to(getattr(torch, o[2]))

        def planned() -> Any:
            plan, counts = op("dispatch_plan", idx, experts, o[0], segment=segments[o[1]])
            return of_plan(plan), counts

        out.add("dispatch_plan", o, planned)
    for o in deal("quantize_pack", 2, segments, ints, DTYPES, FORMATS, SCALES, ("ids", "no ids")):
        idx = s.integers(-1, experts, s.tokens, s.slots).to(getattr(torch, o[1]))
        x, probs = s.normal(s.tokens, s.hidden, dtype=o[2]), s.probs(s.tokens, s.slots)
        how, slots = {"fp8_dtype": o[3], "scale": o[4]}, s.slots if o[5] == "ids" else 0

        def travelled() -> Any:
            plan, _ = op("dispatch_plan", idx, experts, 2, segment=segments[o[0]])
            given = {"topk_idx": idx, "probs": probs, "num_experts": experts} if slots else {}
            packed = op("quantize_pack", x, plan, **given, **how)
            reads = {"fp8_dtype": o[3], "pow2": o[4] == "pow2"}
            got, ids, weights = op("unpack", packed, s.hidden, slots, **reads)
            used = int(plan.row_offsets[-1])
            rows = plan.row_of[plan.row_of >= 0].long().sort().values  # those with a token
            parts = [packed, got.data.view(torch.uint8), got.scale_inv]
            return [p[rows] for p in parts], s.of_rows(ids, used), s.of_rows(weights, used)

        out.add("quantize_pack", o, travelled)


def movement(s: Shape, deal: Any, out: Digests) -> None:
    t, r, c = s.tokens, s.plan.rows, s.hidden
    for o in deal("permute_pad", 3, (*DTYPES, *FORMATS), BOTH, BOTH, LAYOUTS, LAYOUTS):
        if o[0] in FORMATS:
            x = s.fp8(t, c, fp8=o[0], layout=o[4], pow2=True)
        else:
            x = s.normal(t, c, dtype=o[0])
        probs = s.probs(t, s.slots) if o[1] or o[2] else None
        how = {"scale_layout": o[3], "zero_unweighted": o[2]}

        def permuted() -> Any:
            y, row_probs = op("permute_pad", x, s.plan, probs, **how)
            return s.of_rows(y), s.of_rows(row_probs)

        out.add("permute_pad", o, permuted)
    for o in deal("permute_pad_backward", 1, DTYPES, BOTH):
        dy, dprobs = s.normal(r, c, dtype=o[0]), s.uniform(r) if o[1] else None
        out.add("permute_pad_backward", o, lambda: op("permute_pad_backward", dy, s.plan, dprobs))
    for o in deal("unpermute_unpad", 1, DTYPES, BOTH):
        y, probs = s.normal(r, c, dtype=o[0]), s.probs(t, s.slots) if o[1] else None
        out.add("unpermute_unpad", o, lambda: op("unpermute_unpad", y, s.plan, probs))
    for o in deal("unpermute_unpad_backward", 2, DTYPES, BOTH):
        given: tuple[Any, ...] = (s.normal(t, c, dtype=o[0]), s.plan)
        if o[1]:
            given += (s.normal(r, c, dtype=o[0]), s.probs(t, s.slots))

        def back() -> Any:
            dy, dprobs = op("unpermute_unpad_backward", *given)
            return s.of_rows(dy), dprobs

        out.add("unpermute_unpad_backward", o, back)
    ways = (("shift", "pow2"), ("requantize", "pow2"), ("requantize", "fp32"))
    for o in deal("transpose_fp8", 2, FORMATS, COLUMNS, ways, LAYOUTS):
        q = s.fp8(t, c, fp8=o[0], layout="row", pow2=o[2] != ways[2])
        how = {"columns": o[1], "scale": o[2][1]}
        if o[2][0] == "requantize":
            how["requantize"] = True

        def transposed() -> Any:
            rows = op("permute_pad", q, s.plan, scale_layout=o[3])[0]
            return s.of_columns(op("transpose_fp8", rows, s.plan, **how)), s.plan.status

        out.add("transpose_fp8", (*o[:2], *o[2], o[3]), transposed)
    for o in deal("permute_transpose_fp8", 2, FORMATS, COLUMNS, LAYOUTS):
        q = s.fp8(t, c, fp8=o[0], layout=o[2], pow2=True)
        name = "permute_transpose_fp8"
        out.add(name, o, lambda: s.of_columns(op(name, q, s.plan, columns=o[1])))
    for o in deal("count_codes", 1, FORMATS, ("none", *COLUMNS), (1, 3)):
        q = s.fp8(t, c, fp8=o[0], layout="row", pow2=True)

        def counted() -> Any:
            counts = torch.zeros(21, dtype=torch.int64, device=s.device)
            columns = None
            if o[1] != "none":
                columns = op("permute_transpose_fp8", q, s.plan, columns=o[1])
            op("count_codes", q, s.plan, counts, columns=columns, stride=o[2])
            return counts

        out.add("count_codes", o, counted)


def activation(s: Shape, deal: Any, out: Digests) -> None:
    r, i = s.plan.rows, s.intermediate
    limits, planned = (None, 0.75), ("no plan", "plan")
    options: tuple[Any, ...] = (planned, BOTH, limits, BOTH, DTYPES, SCALES, LAYOUTS)
    for o in deal("act_quantize", 4, *options):
        z, probs = s.plain(r, 2 * i, dtype=o[4]), s.uniform(r) if o[1] else None
        plan, rows = (s.plan, s.rows) if o[0] == "plan" else (None, r)
        how = {"limit": o[2], "save_z": o[3], "scale": o[5], "scale_layout": o[6]}

        def forward() -> Any:
            got = op("act_quantize", z, plan, probs, **how)
            return [s.of_rows(t, rows) for t in (got if how["save_z"] else (got,))]

        out.add("act_quantize", o, forward)
    options = (BOTH, limits, DTYPES, FORMATS, SCALES, LAYOUTS)
    for o in deal("act_quantize_backward", 2, planned, *options):
        how = {"limit": o[2], "fp8_dtype": o[4], "scale": o[5], "scale_layout": o[6]}
        given = backward_inputs(s, o[1], o[3])
        plan, rows = (s.plan, s.rows) if o[0] == "plan" else (None, r)

        def backward() -> Any:
            dh, z, probs = given
            dz, *_, dprobs = op("act_quantize_backward", dh, z, plan, probs, **how)
            return s.of_rows(dz, rows), s.of_rows(dprobs, rows)

        out.add("act_quantize_backward", o, backward)
    for o in deal("act_quantize_backward columns", 4, COLUMNS, *options):
        how = {"columns": o[0], "limit": o[2], "fp8_dtype": o[4], "scale": o[5]}
        how["scale_layout"] = o[6]
        given = backward_inputs(s, o[1], o[3])

        def with_both() -> Any:
            dh, z, probs = given
            dz, dz_t, h_t, dprobs = op("act_quantize_backward", dh, z, s.plan, probs, **how)
            columns = s.of_columns(dz_t), s.of_columns(h_t)
            return s.of_rows(dz), columns, s.of_rows(dprobs)

        out.add("act_quantize_backward/columns", o, with_both)


def backward_inputs(s: Shape, weighted: bool, dtype: str) -> tuple[Any, ...]:
    r, i = s.plan.rows, s.intermediate
    dh, z = s.plain(r, i, dtype=dtype), s.plain(r, 2 * i, dtype=dtype)
    return dh, z, s.uniform(r) if weighted else None


def gemms(s: Shape, deal: Any, out: Digests) -> None:
    n, k, e = 2 * s.intermediate, s.hidden, s.experts
    large = s.seed >= SHAPES
    outputs = ("bfloat16", "float32")
    for fa, dtype, pow2 in deal("grouped_gemm", 16 if large else 3, FORMATS, outputs, BOTH):
        a = s.grouped(fa, k, pow2)
        w = s.fp8(e, n, k, fp8="e4m3", layout="block", pow2=pow2)
        options = (f"{fa} by e4m3", dtype, "pow2" if pow2 else "fp32")
        how = {"out_dtype": dtype}
        out.add("grouped_gemm", options, lambda: s.of_rows(op("grouped_gemm", a, w, s.plan, **how)))
    choices = (FORMATS, COLUMNS, outputs, BOTH, BOTH)
    for fy, columns, dtype, adds, pow2 in deal("wgrad", 16 if large else 4, *choices):
        dy, x = (s.transposed(f, c, columns, pow2) for f, c in ((fy, n), ("e4m3", k)))
        before = s.plain(e, n, k, dtype=dtype) if adds else None
        how = {"out": before, "accumulate": True} if adds else {"out_dtype": dtype}
        options = (f"{fy} by e4m3", columns, dtype, "adds" if adds else "writes")
        options += ("pow2" if pow2 else "fp32",)
        out.add(
            "grouped_gemm_wgrad", options, lambda: op("grouped_gemm_wgrad", dy, x, s.plan, **how)
        )
    # Last: an operator that older builds lack, whose inputs shift no other's.
    for (pow2,) in deal("turn_weight", 1, BOTH):
        q = s.fp8(e, n, k, fp8="e4m3", layout="block", pow2=pow2)
        out.add("turn_weight", ("pow2" if pow2 else "fp32",), lambda: all_of(op("turn_weight", q)))


# ---- the layer ----------------------------------------------------------------------------------

RECIPES: dict[str, dict[str, Any] | None] = {
    "default": {},
    "column": {"columns": "column"},
    "fp32": {"scale": "fp32", "columns": "column"},
    "e5m2 gradients": {"grad_dtype": "e5m2"},
    "e5m2 gradients, column": {"grad_dtype": "e5m2", "columns": "column"},
    "eps": {"eps": 1e-3},
    "bf16": None,
}
MEMORY: dict[str, dict[str, Any]] = {
    "none": {},
    "recompute": {"preactivation": "recompute"},
    "fp8 z": {"preactivation": "save_fp8"},
    "recomputed codes": {"transposed_weights": "recompute"},
    "delayed": {"delay_wgrad": True},
}


def layer(s: Shape, name: str, memory: str, dtype: str, main_grad: str | None) -> Any:
    """Output and gradients of two microbatches."""
    recipe = RECIPES[name]
    torch.manual_seed(s.seed)
    experts = call(
        nn.MoEExperts,
        *(s.experts, s.hidden, s.intermediate),
        recipe=None if recipe is None else call(Fp8Recipe, **recipe),
        dtype=getattr(torch, dtype),
        device=s.device,
        **MEMORY[memory],
    )
    weights = list(experts.parameters())
    for w in weights:
        if main_grad:
            w.main_grad = torch.zeros(w.shape, dtype=getattr(torch, main_grad), device=s.device)
    found = []
    for _ in range(2):
        x = s.plain(s.tokens, s.hidden, dtype=dtype).requires_grad_()
        probs = s.uniform(s.tokens, s.slots).requires_grad_()
        y = experts(x, s.topk_idx, probs)
        y.backward(s.plain(s.tokens, s.hidden, dtype=dtype))
        if memory == "delayed":
            experts.backward_dw()
        found += [y, x.grad, probs.grad]
    return found, [w.main_grad if main_grad else w.grad for w in weights]


def moe(s: Shape, rule: nn.RoutingRule, shared: int | None) -> Any:
    """Output, loss and gradients of a layer with its router."""
    torch.manual_seed(s.seed)
    router = nn.Router(s.hidden, s.experts, 2, rule, device=s.device)
    experts = nn.MoEExperts(s.experts, s.hidden, s.intermediate, device=s.device)
    other = nn.SharedExpert(s.hidden, shared, device=s.device) if shared else None
    whole = nn.MoE(router, experts, other)
    x = s.plain(s.tokens, s.hidden).requires_grad_()
    y, routing = whole(x, return_routing=True)
    loss = router.balancing_loss(routing)
    (y.float().square().mean() + loss).backward()
    return [
        y,
        loss,
        routing.tokens_per_expert,
        x.grad,
        *(w.grad for w in whole.parameters()),
    ]


def layers(device: str, out: Digests) -> None:
    sizes = {
        "off the tile": (150, 3, 5, 208, 144),
        "on the tile": (257, 2, 4, 256, 128),
        "no token": (0, 2, 3, 128, 128),
        "one token": (1, 2, 8, 128, 128),
    }
    if device == "cuda":
        sizes["large"] = (4096, 4, 16, 1024, 512)
    for n, (out.shape, size) in enumerate(sizes.items()):
        idx = routing(random.Random(n), *size[:3], "dropped" if n == 0 else "any")

        def shape() -> Shape:
            return Shape(device, n, *size, 1, idx)

        for name, recipe in RECIPES.items():
            for memory, options in MEMORY.items():
                if recipe is None and (memory == "fp8 z" or "transposed_weights" in options):
                    continue
                case = (name, memory, "bfloat16", None)
                out.add("layer", case, lambda: layer(shape(), *case))
        for name, dtype, main in itertools.product(
            ("default", "column", "bf16"), DTYPES, (None, "float32", "bfloat16")
        ):
            case = (name, "none", dtype, main)
            if case != (name, "none", "bfloat16", None):
                out.add("layer", case, lambda: layer(shape(), *case))
        for score, bias, shared in itertools.product(("softmax", "sigmoid"), BOTH, (None, 64)):
            rule = nn.RoutingRule(score=score, selection_bias=bias)
            out.add("moe", (score, bias, shared), lambda: moe(shape(), rule, shared))


# ---- commands -----------------------------------------------------------------------------------


def write(path: Path, device: str, only: int | None) -> int:
    start = time.monotonic()
    out, shares = Digests(), Shares()
    for out.shape, s in itertools.islice(shapes(device), only):
        for part in (quantization, plans, movement, activation, gemms):
            part(s, shares.of, out)
    ops_done = time.monotonic()
    if only is None:
        layers(device, out)
    path.write_text(json.dumps(out.found, indent=0, sort_keys=True) + "\n")
    errors = [key for key, value in out.found.items() if value.startswith("error")]
    show("", errors, out.found)
    print(
        f"{len(out.found)} cases, {len(errors)} errors, on {device}: operators "
        f"{ops_done - start:.0f} s, layers {time.monotonic() - ops_done:.0f} s"
    )
    return 0


def show(what: str, keys: list[str], found: dict[str, str]) -> None:
    """The keys, by operator and error."""
    alike: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for key in keys:
        error = found.get(key, "")
        error = error.splitlines()[0][:160] if error.startswith("error") else ""
        alike[key.split("/")[0].split("#")[0], error].append(key)
    for (name, error), some in alike.items():
        print(f"{what}{len(some)} cases of {name}{error and ': '}{error}")
        for key in random.Random(0).sample(some, min(3 if error else 10, len(some))):
            print(f"    {key}")


def compare(base: Path, new: Path, gone: list[str]) -> int:
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    a, b = (json.loads(path.read_text()) for path in (base, new))
    for key in sorted({*a, *b}):
        has_a, has_b = (not d.get(key, "error").startswith("error") for d in (a, b))
        if has_a and has_b:
            kinds["equal" if a[key] == b[key] else "different"].append(key)
        elif has_a:
            expected = any(fnmatch.fnmatch(key, pattern) for pattern in gone)
            kinds["gone as expected" if expected else "only in BASE"].append(key)
        else:
            kinds["only in NEW" if has_b else "in neither"].append(key)
    for kind in ("only in NEW", "only in BASE", "in neither", "different"):
        show(f"{kind}: ", kinds[kind], b)
    print(", ".join(f"{len(keys)} {kind}" for kind, keys in kinds.items() if keys))
    return 1 if kinds["different"] or kinds["only in BASE"] or kinds["in neither"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    if sys.argv[1:2] == ["compare"]:
        parser.add_argument("compare")
        parser.add_argument("base", type=Path)
        parser.add_argument("new", type=Path)
        parser.add_argument("--gone", action="append", default=[], metavar="PATTERN")
        args = parser.parse_args()
        return compare(args.base, args.new, args.gone)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shapes", type=int, metavar="N")
    args = parser.parse_args()
    global torch, Fp8Recipe, Fp8Tensor, nn, ops, scale_shape  # `compare` needs none of them
    import torch

    import fp8moe_cutlass
    from fp8moe_cutlass import Fp8Recipe, Fp8Tensor, nn, ops
    from fp8moe_cutlass.tensor import scale_shape

    print(f"fp8moe_cutlass in {Path(fp8moe_cutlass.__file__).parent}", flush=True)
    return write(args.out, args.device, args.shapes)


if __name__ == "__main__":
    sys.exit(main())
