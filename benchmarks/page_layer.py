"""Tables and phrases of the layer, the operators and the exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import geometric_mean

from page_records import Record, Rows, by, card, place, results

LAYER, BESIDE_TE = "layer.json", "layer-te.json"
MEMORY_BOUND = "memory-bound.json"
GEMM = "gemm.json"
SWEEP = "sweep.json"

QUANTIZING, REUSING = "forward+backward, quantizing weights", "forward+backward"
TORCH = "torch bf16"
TE = "TransformerEngine FP8"
TE_EACH = f"{TE}, quantized in each step"

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
    return f"V2-Lite: {each}, {reused} and {bf16} ms"


def burst_shares() -> str:
    shares = [r["ms"] / r["sustained_ms"] for r in results(LAYER) if r["variant"] == QUANTIZING]
    return f"takes {min(shares):.2f} to {max(shares):.2f} of these times"


def shown() -> list[tuple[float, float, float]]:
    """The models of README's plot: as the table of performance.md rounds them."""
    return [tuple(map(float, row[1:4])) for row in layer()]  # type: ignore[misc]


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


def bf16_layer() -> Rows:
    found = []
    for r in results("bf16.json"):
        ms = r["ms"], r["peers"][TORCH], r["ms"] / r["peers"][TORCH]
        found.append([f"{r['model']}, T {r['shape']['T']}", *(f"{of:.2f}" for of in ms)])
    return found


def software() -> str:
    of = place(LAYER)
    torch = of["torch"].partition("+")[0]
    return (
        f"On the layer's {card(LAYER)} a copy reaches {of['copy_tb_s']:.2f} TB/s; driver "
        f"{of['driver']}, CUDA {of['cuda']}, torch {torch}"
    )


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
    """DeepGEMM's time over ours, by kinds of cases."""
    found = []
    for what, of_class in CLASSES.items():
        special = what in ("fprop, one expert", "fprop, 256 experts")
        ratios = sorted(
            r["peers"]["DeepGEMM"] / r["ms"]
            for r in results(GEMM)
            if of_class(r["op"], r["variant"])
            if special or not r["variant"].startswith(("one expert", "256 experts"))
            if "DeepGEMM" in r["peers"]
        )
        figures = (geometric_mean(ratios), ratios[0], ratios[-1])
        found.append([what, str(len(ratios)), *(f"{ratio:.2f}" for ratio in figures)])
    return found


def gemm_means() -> str:
    of: dict[str, list[float]] = {"fprop": [], "dgrad": [], "wgrad": []}
    for r in results(GEMM):
        if "DeepGEMM" in r["peers"]:
            of[r["op"]].append(r["peers"]["DeepGEMM"] / r["ms"])
    fprop, dgrad, wgrad = (f"{geometric_mean(ratios):.2f}" for ratios in of.values())
    return f"the mean is {fprop} in fprop, {dgrad} in dgrad and {wgrad} in wgrad"


def ratios() -> dict[tuple[int, int, int], tuple[float, float]]:
    """torch's time over ours by experts, width and tokens per expert: quantizing, reusing."""
    found = {}
    for r in results(SWEEP):
        s, bf16 = r["shape"], r["graph_peers"][TORCH]
        size = (s["E"], s["I"], s["T"] * s["S"] // s["E"])
        found[size] = bf16 / (r["graph_ms"] + r["weights_ms"]), bf16 / r["graph_ms"]
    return found


def sweep() -> Rows:
    cells = {size: f"{each:.2f}, {reused:.2f}" for size, (each, reused) in ratios().items()}
    return [
        [f"{e}, {i}", *(cells.get((e, i, n), "") for n in (8, 128, 512, 2048, 8192))]
        for e in (8, 32, 128)
        for i in (512, 1024, 2048)
    ]


def wins_from() -> str:
    """From how many tokens per expert on the figures that quantize in each step are at least 1."""
    loses = [n for (*_, n), (each, _) in ratios().items() if round(each, 2) < 1]
    counts = sorted({n for *_, n in ratios()})
    least = next(n for n in counts if n > max(loses, default=0))
    return f"With a quantization in every step it wins from {least} tokens per expert on"


def routers() -> Rows:
    rows: dict[tuple[str, int], dict[str, Record]] = {}
    for r in results("router.json"):
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

EP_2, EP_4 = "ep-2.json", "ep-4.json"
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
    nccl, peer = ep_steps(EP_2)[0][2:4]
    return f"takes {peer} ms where NCCL's takes {nccl}"


def over_alone() -> str:
    (*_, v3, bf16_v3), _, (*_, qwen, bf16_qwen) = ep_steps(EP_2)[:3]
    where = "docs/explanation/expert-parallelism.md#what-a-step-costs"
    return (
        f"takes [{v3} times]({where}) one GPU's with as many tokens, Qwen3-30B's {qwen} times. "
        f"bf16's takes {bf16_v3} and {bf16_qwen} times FP8's"
    )


def all_to_all_over() -> str:
    """bf16's bare all-to-all over the dispatch of x, and over that of dout, by peers."""
    said = []
    for op in ("dispatch", "dispatch of a gradient"):
        of = [rows for (_, name), rows in ep_rows(EP_2).items() if name == op]
        peer = [rows[f"{EXACT}, peer"] for rows in of]
        over = [r["graph_peers"][ALL_TO_ALL] / r["graph_ms"] for r in peer]
        said.append(f"{min(over):.2f} to {max(over):.2f}")
    return (
        f"takes {said[0]} times as long as the dispatch by peers. Of the dispatch of dout it takes "
        f"{said[1]}"
    )


def combine_over() -> str:
    over = [float(row[5]) / float(row[4]) for row in ep_exchanges(EP_2)]
    return f"takes {min(over):.2f} to {max(over):.2f} of NCCL's"
