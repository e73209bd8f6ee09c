"""Writes into README and docs what comes from records.

    python benchmarks/pages.py           # writes
    python benchmarks/pages.py --check   # says which pages are not as their records

The rows of a table that follows `<!-- table: NAME -->`, phrases with figures, and the commit behind
each link to a record. tests/test_docs.py checks them, and the tables that are built there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).parent.parent
Record = dict[str, Any]
Rows = list[list[str]]

README = "README.md"
PERFORMANCE = "docs/reference/performance.md"
LAYER_PAGE = "docs/reference/layer.md"
HELPS = "docs/explanation/when-fp8-helps.md"
GROUPS = "docs/how-to/several-gpus.md"
EP = "docs/explanation/expert-parallelism.md"
GEMM_NOTES = "docs/notes/grouped-gemm.md"
ROUTERS = "docs/reference/routers.md"

LAYER, BESIDE_TE, OLDER = "layer-h200.json", "layer-te-h200.json", "layer-peers-h200.json"
MEMORY_BOUND = "memory-bound-h200.json"
GEMM = ("gemm-h200.json", "gemm-h100.json")
SWEEP = "sweep-h200.json"

QUANTIZING, REUSING = "forward+backward, quantizing weights", "forward+backward"
TORCH = "torch bf16"
TE = "TransformerEngine FP8"
TE_EACH = f"{TE}, quantized in each step"


@cache
def record(name: str) -> Record:
    found: Record = json.loads((ROOT / "docs/benchmarks" / name).read_text())
    return found


def results(name: str) -> list[Record]:
    found: list[Record] = record(name)["results"]
    return found


def by(name: str, *keys: str) -> dict[Any, dict[str, Record]]:
    """The rows of a record by its last key, within the others."""
    found: dict[Any, dict[str, Record]] = {}
    *outer, inner = keys
    for r in results(name):
        of = tuple(r[key] for key in outer)
        found.setdefault(of[0] if len(of) == 1 else of, {})[r[inner]] = r
    return found


# ---- the layer ----------------------------------------------------------------------------------


def steps(name: str, *peers: str) -> Iterator[list[str]]:
    """Means over one second: quantizing in each step, reusing, peers, torch's best of both."""
    for model, of in by(name, "model", "variant").items():
        each, reused = of[QUANTIZING], of[REUSING]
        found = [*(reused["sustained_peers"].get(peer) for peer in peers)]
        found.append(min(r["sustained_peers"][TORCH] for r in (each, reused)))
        ms = (each["sustained_ms"], reused["sustained_ms"], *found)
        yield [model, *("refused" if of is None else f"{of:.2f}" for of in ms)]


def layer() -> Rows:
    peer = f"{TORCH}, index_select and index_add"
    return [[*row[:3], row[4], row[3]] for row in steps(LAYER, peer)]


def beside_te() -> Rows:
    return [*steps(BESIDE_TE, TE_EACH, TE, "TransformerEngine bf16")]


def te_bursts() -> str:
    peers = by(BESIDE_TE, "model", "variant")["DeepSeek-V2-Lite, 64 experts"][REUSING]["peers"]
    each, reused, bf16 = (f"{peers[name]:.2f}" for name in (TE_EACH, TE, "TransformerEngine bf16"))
    return f"takes {each}, {reused} and {bf16} ms of V2-Lite"


def burst_shares() -> str:
    shares = [r["ms"] / r["sustained_ms"] for r in results(LAYER) if r["variant"] == QUANTIZING]
    return f"takes {min(shares):.2f} to {max(shares):.2f} of these times"


def older(who: str) -> str:
    """Over torch's bf16 in the same turns."""
    rows = [r for r in results(OLDER) if r["variant"] == REUSING]
    times = [{"ours": r["ms"], **r["peers"]} for r in rows]
    over = [ms[who] / ms[TORCH] for ms in times]
    return f"{min(over):.2f} to {max(over):.2f}"


def readme_layer() -> Rows:
    rows = [row[:4] for row in layer()]
    return [rows[0], rows[2], rows[4]]


def shown() -> list[tuple[float, float, float]]:
    """README's three models: as the table rounds them."""
    return [tuple(map(float, row[1:])) for row in readme_layer()]  # type: ignore[misc]


def times_as_fast() -> str:
    times = sorted(bf16 / each for each, _, bf16 in shown())
    return f"{times[0]:.1f} to {times[-1]:.1f} times as fast as torch's bf16"


def share_of_quantizing() -> str:
    share = sorted(100 * (1 - reused / each) for each, reused, _ in shown())
    return f"{share[0]:.0f} to {share[-1]:.0f}% of a step here"


def saved() -> Rows:
    """What DeepSeek-V3's layer keeps for backward, and its peak."""
    of = next(iter(by(LAYER, "model", "variant").values()))
    ours = {
        "default": (of[REUSING], "fp8moe"),
        '`preactivation="save_fp8"`': (of[f"{REUSING}, FP8 pre-activation"], "fp8moe"),
        '`preactivation="recompute"`': (of[f"{REUSING}, recompute"], "fp8moe"),
        "torch bf16": (of[REUSING], TORCH),
    }
    found = []
    for name, (row, who) in ours.items():
        memory = row["memory"][who]
        ms = row["ms"] if who == "fp8moe" else row["peers"][who]
        if who == TORCH:  # it ran beside both
            ms = min(ms, of[QUANTIZING]["peers"][TORCH])
        kept, peak = memory["saved"] / 1024 / row["shape"]["T"], memory["peak"] / 2**30
        found.append([name, f"{kept:.1f}", f"{peak:.2f}", f"{ms:.2f}"])
    return found


def saved_by_sonic() -> str:
    r = results(OLDER)[0]
    memory = r["memory"]["SonicMoE bf16"]
    kept, peak = memory["saved"] / 1024 / r["shape"]["T"], memory["peak"] / 2**30
    return f"saved {kept:.1f} KiB, with a peak of {peak:.2f} GiB"


def four_layers() -> Rows:
    """What they hold between steps, and their peak."""
    found = []
    for model, of in by(LAYER, "model", "variant").items():
        memory = of[f"{QUANTIZING}, four layers"]["memory"]
        cells = (
            ", ".join(f"{m[k] / 2**30:.2f}" for k in ("held", "peak")) for m in memory.values()
        )
        found.append([model, *cells])
    return found


def copy_reaches() -> str:
    return f"a copy reaches {record(LAYER)['environment']['copy_tb_s']:.2f} TB/s"


def bf16_layer() -> Rows:
    found = []
    for r in results("bf16-h100.json"):
        variant = r["variant"].removesuffix(", forward and backward")
        if variant.endswith(", forward"):
            continue
        ms = r["ms"] if "ms" in r else {who: r[who]["ms"] for who in ("recipe=None", TORCH)}
        digits = 2 if "ms" in r else 1
        found.append([variant, *(f"{of:.{digits}f}" for of in ms.values()), f"{r['ratio']:.2f}"])
    return found


# ---- operators ----------------------------------------------------------------------------------

BF16_8 = {"T": 4096, "E": 256, "S": 8, "H": 7168, "align": 1}
MATRIX, LAYER_ROWS = {"M": 32768, "K": 7168}, {"T": 4096, "E": 32, "S": 8, "H": 7168, "align": 1}
TURNED, ACTIVATED = {"R": 32768, "C": 7168, "E": 8}, {"R": 32768, "C": 2048, "E": 32}
OPERATORS = [  # of a record, and in the table
    ("quantize", "row", MATRIX, "32768 x 7168, `row` scales"),
    (
        *("quantize_weight", "for fprop and dgrad", {"E": 32, "N": 4096, "K": 7168}),
        "32 x 4096 x 7168, with the transposed copy",
    ),
    ("permute_pad", "fp8", BF16_8, "FP8, align 1"),
    ("permute_pad", "bf16", BF16_8, "bf16, align 1"),
    ("permute_pad_backward", "bf16", BF16_8, "bf16, align 1"),
    ("unpermute_unpad", "bf16, probs", BF16_8, "bf16 with probs, align 1"),
    ("unpermute_unpad_backward", "bf16, probs", BF16_8, "bf16 with probs, align 1"),
    ("transpose_fp8", "block", TURNED, '32768 x 7168, `columns="block"`'),
    ("transpose_fp8", "column", TURNED, '32768 x 7168, `columns="column"`'),
    ("permute_transpose_fp8", "block", LAYER_ROWS, '32 experts, `columns="block"`'),
    ("permute_transpose_fp8", "column", LAYER_ROWS, '32 experts, `columns="column"`'),
    ("act_quantize", "rows", ACTIVATED, "32768 x 2048"),
    ("act_quantize_backward", "dz", ACTIVATED, "32768 x 2048, dz alone"),
    (
        *("act_quantize_backward", "dz, dz and h columns=block", ACTIVATED),
        "the same, dz and h also token-transposed",
    ),
]


def operators() -> Rows:
    rows = {(r["op"], r["variant"], tuple(r["shape"].items())): r for r in results(MEMORY_BOUND)}
    found = []
    for op, variant, shape, what in OPERATORS:
        r = rows[op, variant, tuple(shape.items())]
        found.append([f"`{op}`", what, f"{1e3 * r['ms']:.1f}", f"{r['ms'] / r['limit_ms']:.2f}"])
    return found


def weights() -> Rows:
    found = []
    for variant, what in (("for fprop and dgrad", "fprop and dgrad"), ("for fprop", "fprop alone")):
        rows = [r for r in results(MEMORY_BOUND) if r["op"] == "quantize_weight"]
        over = sorted(r["ms"] / r["limit_ms"] for r in rows if r["variant"] == variant)
        found.append([f"for {what}", f"{over[0]:.2f}", f"{over[-1]:.2f}"])
    return found


def counts() -> Rows:
    of = {r["variant"]: r for r in results(MEMORY_BOUND) if r["op"] == "count_codes"}
    return [
        [what, *(f"{1e3 * of[variant][ms]:.1f}" for ms in ("ms", "limit_ms"))]
        for what, variant in (("one in eight", "every row in 8"), ("all", "every row in 1"))
    ]


CLASSES: dict[str, Callable[[str, str], bool]] = {
    "fprop, equal experts": lambda op, v: op == "fprop" and "balanced" in v,
    "fprop, ragged experts": lambda op, v: op == "fprop" and "ragged" in v,
    "dgrad, equal experts": lambda op, v: op == "dgrad" and "balanced" in v,
    "dgrad, ragged experts": lambda op, v: op == "dgrad" and "ragged" in v,
    "fprop, one expert": lambda op, v: v.startswith("one expert"),
    "fprop, 256 experts": lambda op, v: v.startswith("256 experts"),
    "wgrad, 128x128-scaled, float32, added to D": lambda op, v: (
        op == "wgrad" and v.endswith("float32, columns=block, beta 1")
    ),
    "wgrad, 128x128-scaled, float32, written": lambda op, v: (
        op == "wgrad" and v.endswith("float32, columns=block, beta 0")
    ),
    "wgrad, 128x128-scaled, bf16, written": lambda op, v: (
        op == "wgrad" and v.endswith("bfloat16, columns=block, beta 0")
    ),
    "wgrad, 1x128-scaled, float32, written": lambda op, v: (
        op == "wgrad" and v.endswith("float32, columns=column, beta 0")
    ),
}


def gemms() -> Rows:
    """DeepGEMM's time over ours, by kinds of cases, on each board."""
    found = []
    for what, of_class in CLASSES.items():
        special = what in ("fprop, one expert", "fprop, 256 experts")
        figures, count = [], 0
        for name in GEMM:
            ratios = sorted(
                r["peers"]["DeepGEMM"] / r["ms"]
                for r in results(name)
                if of_class(r["op"], r["variant"])
                if special or not r["variant"].startswith(("one expert", "256 experts"))
                if "DeepGEMM" in r["peers"]
            )
            figures += [f"{ratio:.2f}" for ratio in (geometric_mean(ratios), ratios[0], ratios[-1])]
            count = len(ratios)
        found.append([what, str(count), *figures])
    return found


def gemm_means(name: str) -> str:
    of: dict[str, list[float]] = {"fprop": [], "dgrad": [], "wgrad": []}
    for r in results(name):
        if "DeepGEMM" in r["peers"]:
            of[r["op"]].append(r["peers"]["DeepGEMM"] / r["ms"])
    fprop, dgrad, wgrad = (f"{geometric_mean(ratios):.2f}" for ratios in of.values())
    return f"the mean is {fprop} in fprop, {dgrad} in dgrad and {wgrad} in wgrad"


def sweep() -> Rows:
    ratios = {}
    for r in results(SWEEP):
        s, bf16 = r["shape"], r["graph_peers"][TORCH]
        of_step = (r["graph_ms"] + r["weights_ms"], r["graph_ms"])
        per_expert = s["T"] * s["S"] // s["E"]
        ratios[s["E"], s["I"], per_expert] = ", ".join(f"{bf16 / ms:.2f}" for ms in of_step)
    return [
        [f"{e}, {i}", *(ratios.get((e, i, n), "") for n in (8, 128, 512, 2048, 8192))]
        for e in (8, 32, 128)
        for i in (512, 1024, 2048)
    ]


def routers() -> Rows:
    rows: dict[tuple[str, int], dict[str, Record]] = {}
    for r in results("router-h200.json"):
        rows.setdefault((r["model"], r["shape"]["T"]), {})[r["op"]] = r
    found = []
    for (model, tokens), of in rows.items():
        names = ("router", "router, compiled", "router, captured", "gate, captured")
        *us, experts = (1e3 * of[name]["ms"] for name in (*names, "experts, captured"))
        share = f"{100 * us[2] / (us[2] + experts):.1f}%"
        launches = str(of["router"]["launches"])
        cells = (*(f"{figure:,.0f}" for figure in us), launches, f"{experts:,.0f}", share)
        found.append([f"{model}, {tokens:,}", *cells])
    return found


# ---- expert parallelism -------------------------------------------------------------------------

EP_2, EP_4, EP_8 = "ep-2-h200.json", "ep-4-h100.json", "ep-h200.json"
STEP, EXACT, ROOM = "layer, forward+backward", "random, exact", "random, capacity 1.25"
BESIDE, ALL_TO_ALL = "bf16 torch, same exchange", "bf16 all-to-all alone"


def ep_rows(name: str) -> dict[tuple[str, str], dict[str, Record]]:
    """By model and operator, then variant."""
    return by(name, "model", "op", "variant")


def ep_steps(name: str) -> Rows:
    of_model = ep_rows(name)
    models = list(dict.fromkeys(model for model, _ in of_model))
    found = []
    for variant, ms_of, sizes in ((EXACT, "ms", "exact"), (ROOM, "graph_ms", "capacity, captured")):
        for model in models:
            of = of_model[model, STEP]
            nccl, peer, s = of[variant], of[f"{variant}, peer"], of[variant]["shape"]
            alone = nccl["alone_ms"] if ms_of == "ms" else nccl["graph_peers"]["alone"]
            what = f"{s['E'] // s['W']} of {s['H']} x {s['I']}"
            cells = [f"{ms:.2f}" for ms in (nccl[ms_of], peer[ms_of], alone, peer[ms_of] / alone)]
            if variant == EXACT:
                what += f" ({model})"
                beside = of[f"{EXACT}, beside bf16, peer"]
                cells.append(f"{beside['peers'][BESIDE] / beside['ms']:.2f}")
            else:
                cells.append("")
            found.append([what, sizes, *cells])
    return found


def ep_exchanges(name: str) -> Rows:
    found = []
    for (model, op), of in ep_rows(name).items():
        if op != "dispatch":
            continue
        back = ep_rows(name)[model, "combine"]
        bf16 = of[EXACT]["graph_peers"][ALL_TO_ALL]
        calls = (of[EXACT], of[f"{EXACT}, peer"], back[EXACT], back[f"{EXACT}, peer"])
        ms = (bf16, *(r["graph_ms"] for r in calls))
        found.append([str(of[EXACT]["shape"]["H"]), *(f"{figure:.3f}" for figure in ms)])
    return found


def scaled() -> list[Record]:
    """The record's rows, model by model."""
    rows = results(EP_8)
    models = list(dict.fromkeys(r["model"] for r in rows))
    return sorted(rows, key=lambda r: models.index(r["model"]))


def ep_dispatch() -> Rows:
    found = []
    for r in scaled():
        if (r["op"], r["variant"]) != ("dispatch", EXACT):
            continue
        gathered = r["peers"]["bf16 torch, gather and all-to-all"]
        ms = (r["ms"], r["limit_ms"], r["peers"][ALL_TO_ALL], gathered)
        megabytes = f"{r['bytes'] / 1e6:.1f}" if r["bytes"] else "0"
        cells = (*(f"{figure:.3f}" for figure in ms), f"{gathered / r['ms']:.2f}")
        found.append([r["model"], str(r["shape"]["W"]), megabytes, *cells])
    return found


def ep_efficiency() -> Rows:
    found = []
    for r in scaled():
        if (r["op"], r["variant"]) != (STEP, EXACT):
            continue
        ms = (r["ms"], r["alone_ms"], r["exchange_ms"])
        rest = r["ms"] - r["alone_ms"] - r["exchange_ms"]
        last = (f"{100 * r['alone_ms'] / r['ms']:.0f}%", f"{r['tokens_per_s']:,.0f}")
        cells = (*(f"{figure:.2f}" for figure in (*ms, rest)), *last)
        found.append([r["model"], str(r["shape"]["W"]), *cells])
    return found


def ep_capacities() -> Rows:
    """A step with exact sizes, with a rank capacity, and that captured."""
    found = []
    for (model, op), of in ep_rows(EP_4).items():
        if op == STEP:
            exact, room = of[f"{EXACT}, peer"], of[f"{ROOM}, peer"]
            ms = (exact["ms"], room["ms"], room["graph_ms"])
            found.append([model, *(f"{figure:.2f}" for figure in ms)])
    return found


def by_transport() -> str:
    nccl, peer = ep_steps(EP_4)[0][2:4]
    return f"takes {peer} ms where NCCL's takes {nccl}"


# ---- pages --------------------------------------------------------------------------------------

# The page, the marker's name, and the rows.
TABLES: list[tuple[str, str, Callable[[], Rows]]] = [
    (README, LAYER, readme_layer),
    (PERFORMANCE, LAYER, layer),
    (PERFORMANCE, BESIDE_TE, beside_te),
    (PERFORMANCE, "bf16-h100.json", bf16_layer),
    (PERFORMANCE, MEMORY_BOUND, operators),
    (PERFORMANCE, f"{MEMORY_BOUND}, weights", weights),
    (PERFORMANCE, GEMM[0], gemms),
    (LAYER_PAGE, f"{LAYER}, saved", saved),
    (LAYER_PAGE, f"{LAYER}, four layers", four_layers),
    (LAYER_PAGE, f"{MEMORY_BOUND}, counts", counts),
    (HELPS, SWEEP, sweep),
    (ROUTERS, "router-h200.json", routers),
    (GROUPS, f"{EP_4}, capacities", ep_capacities),
    *((EP, f"{name}, steps", lambda name=name: ep_steps(name)) for name in (EP_2, EP_4)),
    *((EP, f"{name}, exchanges", lambda name=name: ep_exchanges(name)) for name in (EP_2, EP_4)),
    (EP, f"{EP_8}, dispatch", ep_dispatch),
    (EP, f"{EP_8}, steps", ep_efficiency),
]
# The page, what a phrase looks like, and what it says.
PHRASES: list[tuple[str, str, Callable[[], str]]] = [
    (PERFORMANCE, r"a copy reaches [\d.]+ TB/s", copy_reaches),
    (PERFORMANCE, r"takes [\d.]+ to [\d.]+ of these times", burst_shares),
    (PERFORMANCE, r"takes [\d.]+, [\d.]+ and [\d.]+ ms of V2-Lite", te_bursts),
    (
        *(PERFORMANCE, r"in bf16 took [\d.]+ to [\d.]+ of torch"),
        lambda: f"in bf16 took {older('SonicMoE bf16')} of torch",
    ),
    (PERFORMANCE, r"took [\d.]+ to [\d.]+ of it in FP8", lambda: f"took {older(TE)} of it in FP8"),
    (PERFORMANCE, r"took [\d.]+ to [\d.]+ of it then", lambda: f"took {older('ours')} of it then"),
    (LAYER_PAGE, r"saved [\d.]+ KiB, with a peak of [\d.]+ GiB", saved_by_sonic),
    (
        *(GEMM_NOTES, r"the mean is [\d.]+ in fprop, [\d.]+ in dgrad and [\d.]+ in wgrad"),
        lambda: gemm_means(GEMM[1]),
    ),
    (GROUPS, r"takes [\d.]+ ms where NCCL's takes [\d.]+", by_transport),
    (README, r"[\d.]+ to [\d.]+ times as fast as torch's bf16", times_as_fast),
    (README, r"\d+ to \d+% of a step here", share_of_quantizing),
]


def with_table(text: str, name: str, rows: Rows) -> str:
    """The page with these rows below the head of the table that is marked with `name`."""
    before, marker, after = text.partition(f"<!-- table: {name} -->\n")
    if not marker:
        raise ValueError(f"no table is marked with {name}")
    table, gap, rest = after.partition("\n\n")
    head = table.splitlines()[:2]
    body = ["| " + " | ".join(row) + " |" for row in rows]
    return before + marker + "\n".join([*head, *body]).replace("  |", " |") + gap + rest


def commit_of(name: str) -> str | None:
    found = record(name)
    commit: str | None = found.get("environment", found).get("commit")
    return commit


def with_commits(text: str) -> str:
    """The page with the commit that each linked record names."""

    def named(found: re.Match[str]) -> str:
        return found["before"] + (commit_of(found["name"]) or found["commit"])

    return re.sub(
        r"(?P<before>benchmarks/(?P<name>[\w-]+\.json)\)[^.;|]{0,30}?\bcommit\s)(?P<commit>[0-9a-f]{7})\b",
        named,
        text,
    )


def page(path: str) -> str:
    """The page as its records have it."""
    text = (ROOT / path).read_text()
    for of, name, rows in TABLES:
        if of == path:
            text = with_table(text, name, rows())
    for of, pattern, said in PHRASES:
        if of == path:
            flexible = pattern.replace(" ", r"\s+")
            found = re.search(flexible, text)
            if found is None:
                raise ValueError(f"{path} has no {pattern!r}")
            words = said()
            if " ".join(found[0].split()) != words:
                text = text.replace(found[0], words)
    return with_commits(text)


def pages() -> list[str]:
    every = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return sorted(p.relative_to(ROOT).as_posix() for p in every)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="writes nothing")
    check = arguments.parse_args().check
    made = {path: page(path) for path in pages()}
    stale = [path for path, text in made.items() if text != (ROOT / path).read_text()]
    for path in stale:
        print(path)
        if not check:
            (ROOT / path).write_text(made[path])
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
