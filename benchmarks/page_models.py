"""Tables and phrases of whole models, of other frameworks and of losses."""

from __future__ import annotations

import statistics

from page_records import Record, Rows, record, results
from quality import seconds_to

RECIPE, SEVERAL = "transformers-recipe.json", "several-gpus.json"
LORA, LORA_MODEL = "lora.json", "lora-model.json"
ROLLOUT_LOSSES, QUALITY = "rollout-losses.json", "quality.json"
COARSE, LONG = "quality-coarse.json", "quality-long.json"
ACTIVATIONS = "activations.json"

# ---- transformers -------------------------------------------------------------------------------


def by_pieces() -> dict[tuple[str, str], list[Record]]:
    """Steps of a model with pieces of the recipe: grouped_mm's, then ours."""
    rows: dict[tuple[str, str], list[Record]] = {}
    for r in results(RECIPE):
        rows.setdefault((r["model"], r["variant"].partition(": ")[2]), []).append(r)
    return rows


def models() -> list[str]:
    return list(dict.fromkeys(r["model"] for r in results(RECIPE)))


def compiled(model: str) -> list[Record]:
    """By what the how-to advises, but for loops of one's own."""
    pieces = [p for m, p in by_pieces() if m == model and "graph" not in p and "backward" not in p]
    return by_pieces()[model, pieces[-1]]


def readme_steps() -> Rows:
    names = [
        *("six layers of Qwen3-30B", "the same, vocabulary 151,936"),
        *("two layers of DeepSeek-V3's sizes", "six layers of Qwen3-30B, LoRA on the attention"),
    ]
    found = []
    for name, model in zip(names, models(), strict=False):  # and others, which README has not
        (bf16, fp8), fast = by_pieces()[model, "default"], compiled(model)
        ms = [f"{r['ms']:.1f}" for r in (bf16, fp8, *fast)]
        gib = ", ".join(f"{r['peak_gib']:.1f}" for r in (bf16, fast[1]))
        found.append([name, *ms, f"{bf16['ms'] / fast[1]['ms']:.2f}", gib])
    return found


def compiled_step() -> str:
    """FP8 experts beside bf16's, both compiled."""
    both = [compiled(model) for model in models()[:4]]  # of README's table
    times = sorted(bf16["ms"] / fp8["ms"] for bf16, fp8 in both)
    return f"make a step {times[0]:.2f} to {times[-1]:.2f} times as fast"


def recipe() -> Rows:
    found = []
    for (model, pieces), of in by_pieces().items():
        base = by_pieces()[model, "default"][0]["ms"]
        figures = [
            (
                *(f"{r['ms']:.1f}", f"{base / r['ms']:.2f}", f"{r['peak_gib']:.1f}"),
                *(f"{r['tokens_per_s'] / 1e3:.1f}", f"{100 * r['limit_ms'] / r['ms']:.0f}%"),
            )
            for r in of
        ]
        cells = [", ".join(two) for two in zip(*figures, strict=True)]
        found.append([model, pieces, *cells])
    return found


def kernels() -> Rows:
    """Of a step, what they take and what they would at the machine's limits."""
    found: dict[str, list[str]] = {}
    for model in models():
        captured = [of for (m, p), of in by_pieces().items() if m == model and "graph" in p]
        if not captured:
            continue
        r = compiled(model)[1]
        rates = {"experts": r["place"]["tensor_tflops"]}
        dense = r["place"]["bf16_tflops"]
        flops = {k: n / rates.get(k, dense) for k, n in r["flops_of"].items()}
        moves = {k: n / r["place"]["copy_tb_s"] for k, n in r["bytes_of"].items()}
        limits = {k: (flops.get(k, 0) + moves.get(k, 0)) / 1e9 for k in flops | moves}
        both = {k: (ms, min(ms, limits.get(k, ms))) for k, ms in r["kernels"].items()}
        both["all"] = tuple(map(sum, zip(*both.values(), strict=True)))  # type: ignore[assignment]
        cells = {k: f"{ms:.1f}, {limit:.1f}" for k, (ms, limit) in both.items()}
        cells["the step; captured"] = f"{r['ms']:.1f}; {captured[0][1]['ms']:.1f}"
        for part, cell in cells.items():
            found.setdefault(part, []).append(cell)
    return [[part, *cells] for part, cells in found.items()]


def graph_gains() -> str:
    """What a captured step gains over the same step with FP8 experts."""
    gains = []
    for (model, pieces), of in by_pieces().items():
        if pieces.endswith(" + graph"):
            plain = by_pieces()[model, pieces.removesuffix(" + graph")]
            gains.append(f"{100 * (plain[1]['ms'] / of[1]['ms'] - 1):.0f}")
    return f"another {' to '.join(sorted({min(gains), max(gains)}))}% faster"


def several_gpus() -> Rows:
    rows: dict[str, dict[str, str]] = {}
    for r in results(SEVERAL):
        name, _, pieces = r["variant"].partition(": ")
        cell = f"{r['ms']:.1f} ({r['ratio']:.2f}), {r['peak_gib']:.1f}"
        rows.setdefault(name, {})[pieces] = cell
    columns = "default", "layers + loss", "layers + loss + AdamW compiled"
    return [
        [
            name.replace(", ", " by ", 1).replace("group", "`group=`"),
            *(of.get(column, "") for column in columns),
        ]
        for name, of in rows.items()
    ]


def queueing_share() -> str:
    """Of a step, until rank 0's host has queued it."""
    shares = [r["host_us"] / 10 / r["ms"] for r in results(SEVERAL)]
    return f"takes it {min(shares):.0f} to {max(shares):.0f}% of the step"


# ---- LoRA ---------------------------------------------------------------------------------------


def frozen_times() -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    for r in results(LORA):
        rows.setdefault(r["model"], {})[r["op"]] = r["ms"]
    return rows


def frozen() -> Rows:
    layers = "quantized in each step", "frozen, turned", "frozen, kept"
    return [
        [
            model,
            *(f"{ms[way]:.2f}" for way in layers),
            *(f"{ms[op]:.3f}" for op in ("turn_weight", "copy")),
        ]
        for model, ms in frozen_times().items()
    ]


def low_rank() -> Rows:
    found = []
    for model, ms in frozen_times().items():
        cells = [model]
        for mode in ("kept", "turned"):
            base = ms[f"frozen, {mode}"]
            low = [f"{ms[f'LoRA r {rank}, {mode}'] / base:.2f}" for rank in (16, 64)]
            cells += [f"{base:.2f}", *low]
        found.append(cells)
    return found


def lora_model() -> Rows:
    names = {
        "turned": "FP8, turned in each backward",
        "kept": "FP8, kept",
        "bf16, PEFT": "bf16, by PEFT",
        "bf16, attention": "bf16, on attention alone",
    }
    return [
        [
            names[r["op"]],
            *(f"{r['shape']['T']:,}", f"{r['ms']:.0f}"),
            *(f"{r['tokens_per_s']:,.0f}", f"{r['peak_gib']:.1f}"),
        ]
        for r in results(LORA_MODEL)
    ]


def beside_peft() -> tuple[Record, Record]:
    rows = {r["op"]: r for r in results(LORA_MODEL) if r["shape"]["T"] == 8192}
    return rows["turned"], rows["bf16, PEFT"]


def readme_lora() -> str:
    ours, peft = beside_peft()
    share = 100 * ours["ms"] / peft["ms"]
    return (
        f"trains Qwen3-30B in {ours['peak_gib']:.0f} GiB, and in {share:.0f}% of the time that "
        "PEFT takes in bf16"
    )


def less_than_peft() -> str:
    ours, peft = beside_peft()
    share, less = 100 * ours["ms"] / peft["ms"], peft["peak_gib"] - ours["peak_gib"]
    return f"takes {share:.0f}% of PEFT's time at 8,192 tokens, in {less:.0f} GiB less"


def lora_losses() -> Rows:
    return [
        [
            f"{r['experts']} experts, seed {r['seed']}",
            *(f"{r[f'to {n}']:.3f}" for n in range(40, 201, 40)),
        ]
        for r in results("lora-losses.json")
    ]


# ---- other frameworks ---------------------------------------------------------------------------


def megatron() -> Rows:
    alone = record("megatron.json")["alone"]
    return [
        [
            f"{r['model']}: {r['variant']}",
            f"{r['ms']:.1f}",
            f"{r['tokens_per_s']:,.0f}",
            f"{r['ratio']:.2f}",
            f"{alone[r['model']][r['variant']]['peak_gib']:.2f}",
        ]
        for r in results("megatron.json")
    ]


def megatron_layer() -> str:
    """Our layer over TransformerEngine's bf16."""
    times = sorted(r["ratio"] for r in results("megatron.json") if r["variant"] == "our layer")
    return f"the layer {times[0]:.2f} to {times[-1]:.2f}"


def torchtitan(name: str) -> Rows:
    who = "torchtitan bf16", "fp8moe, the layer", "fp8moe, the experts"
    rows: dict[str, list[str]] = {}
    for r in results(name):
        name = r["variant"] + (", the whole head" if r["shape"]["V"] > 2048 else "")
        found = [f"{r['ms']:.1f}", f"{r['tokens_per_s']:,.0f}", f"{r['times_own']:.2f}"]
        cells = rows.setdefault(name, ["-"] * len(who))
        cells[who.index(r["who"])] = ", ".join(found[: 2 if r["who"] == who[0] else 3])
    return [[name, *cells] for name, cells in rows.items()]


def torchtitan_losses() -> Rows:
    return [
        [
            r["variant"],
            f"`{r['who']}`",
            *(f"{r[who][step]:.4f}" for step in (0, -1) for who in ("own", "ours")),
            f"{max(abs(a - b) for a, b in zip(r['own'], r['ours'], strict=True)):.4f}",
        ]
        for r in results("torchtitan-losses.json")
    ]


def jax() -> Rows:
    found = []
    for r in results("jax.json"):
        ms = r["ms"], r["peers"]["torch, captured"]
        found.append([r["model"], *(f"{t:.2f}" for t in ms), f"{ms[0] / ms[1]:.3f}"])
    return found


def rollout() -> Rows:
    rows: dict[str, list[str]] = {}
    for r in results("rollout.json"):
        own, base = r["ms"], r["peers"].get("default")
        rows.setdefault(r["op"], []).append(f"{own:.3f}" if base is None else f"{own / base:.3f}")
    names = {"default": "default, ms", "default, again": "default, again"}
    return [[names.get(op, f"`{op}`"), *cells] for op, cells in rows.items()]


def rollout_losses() -> Rows:
    last, found = {}, []
    for run in record(ROLLOUT_LOSSES)["runs"]:
        last[run["arm"], run["seed"]] = statistics.fmean(run["loss"][-50:])
    for r in results(ROLLOUT_LOSSES):
        own, base = ([last[arm, seed] for seed in range(3)] for arm in (r["variant"], "bf16"))
        apart = [a - b for a, b in zip(own, base, strict=True)]
        cells = [r["about"], *(f"{loss:.3f}" for loss in (*own, statistics.fmean(own)))]
        span = f"{min(apart):+.3f} to {max(apart):+.3f}" if r["variant"] != "bf16" else ""
        found.append([*cells, span])
    return found


# ---- quality, activations -----------------------------------------------------------------------


def quality(name: str) -> Rows:
    found = []
    for r in results(name):
        g, spread = r.get("gap"), r["between_seeds"]
        gap = f"{g['mean']:+.4f}" if g else ""
        if g and g["low"] is not None:
            gap += f" ({g['low']:+.4f} to {g['high']:+.4f})"
        cells = f"{r['heldout']:.4f}", "" if spread is None else f"{spread:.3f}", gap
        found.append([r["about"], str(r["seeds"]), *cells, f"{r['peak_gib']:.1f}"])
    return found


def heldout(name: str) -> dict[tuple[str, int], list[list[float]]]:
    """By arm and seed: [step, loss, seconds] of each evaluation."""
    return {(r["arm"], r["seed"]): r["heldout"] for r in record(name)["runs"]}


def quality_seeds(name: str, *arms: str) -> Rows:
    """bf16's loss at the end, the arms' gaps to it, and the step at which FP8 reached it."""
    runs, found = heldout(name), []
    for seed in sorted(seed for arm, seed in runs if arm == "fp8"):
        last = {arm: runs[arm, seed][-1][1] for arm in ("bf16", *arms) if (arm, seed) in runs}
        gaps = [f"{last[arm] - last['bf16']:+.4f}" if arm in last else "" for arm in arms]
        by_step = [(step, loss, step) for step, loss, _ in runs["fp8", seed]]
        reached = seconds_to({"heldout": by_step}, last["bf16"])
        at = "not reached" if reached is None else f"{reached:.0f}"
        found.append([str(seed), f"{last['bf16']:.4f}", *gaps, at])
    return found


def trains_as_fast() -> str:
    """Medians over the seeds: other work was beside one."""
    runs = record(LONG)["runs"]
    bf16, fp8 = (
        statistics.median(run["tokens_per_s"] for run in runs if run["arm"] == arm)
        for arm in ("bf16", "fp8")
    )
    return f"trains {fp8 / bf16:.2f} times as fast: {bf16:,.0f} and {fp8:,.0f} tokens per second"


def quality_steps() -> Rows:
    found = []
    for r in results("quality-step.json"):
        s, bf16 = r["shape"], r["peers"]["bf16"]
        name = f"{r['model']}: {s['E']} experts of {s['I']}, top-{s['k']}"
        times = (f"{ms:.1f}" for ms in (bf16, r["limit_ms"], r["ms"]))
        found.append([name, r["variant"], *times, f"{bf16 / r['ms']:.2f}"])
    return found


def activations() -> Rows:
    rows: dict[tuple[str, str], list[Record]] = {}
    for r in results(ACTIVATIONS):
        rows.setdefault((f"{r['shape']['I']:,}", r["op"]), []).append(r)
    found = []
    for head, (swiglu, *others) in rows.items():
        ratios = [swiglu["ms"] / swiglu["peers"]["copy"]]
        ratios += [r["ms"] / r["peers"]["SwiGLU"] for r in others]
        found.append([*head, *(f"{ratio:.2f}" for ratio in ratios)])
    return found


def activation_blocks() -> Rows:
    found = []
    for r in results("activation-blocks.json"):
        best = min(r["peers"].values())
        found.append([r["variant"], *(f"{t:.2f}" for t in (r["ms"], best, best / r["ms"]))])
    return found
