"""Writes into README and docs what comes from records.

    python benchmarks/pages.py           # writes
    python benchmarks/pages.py --check   # says which pages are not as their records

The rows of a table that follows `<!-- table: NAME -->`, phrases with figures, and the GPU and
commit behind each link to a record. tests/test_docs.py compares them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

import page_layer as layer
import page_models as models
from page_layer import BESIDE_TE, EP_2, EP_4, GEMM, LAYER, MEMORY_BOUND, SWEEP
from page_models import (
    ACTIVATIONS,
    COARSE,
    LONG,
    LORA,
    LORA_MODEL,
    QUALITY,
    RECIPE,
    ROLLOUT_LOSSES,
    SEVERAL,
)
from page_records import ROOT, Rows, card, place

README = "README.md"
PERFORMANCE = "docs/reference/performance.md"
LAYER_PAGE = "docs/reference/layer.md"
ROUTERS = "docs/reference/routers.md"
HELPS = "docs/explanation/when-fp8-helps.md"
EP = "docs/explanation/expert-parallelism.md"
SAME = "docs/explanation/does-fp8-train-as-well.md"
GROUPS = "docs/how-to/several-gpus.md"
HUGGING_FACE = "docs/how-to/hugging-face.md"
LORA_PAGE = "docs/how-to/lora.md"
CHECKPOINTS = "docs/how-to/fp8-checkpoints.md"
MEGATRON = "docs/how-to/megatron-core.md"
TITAN = "docs/how-to/torchtitan.md"
JAX = "docs/how-to/jax.md"
ROLLOUT = "docs/how-to/rollout.md"
GEMM_NOTES = "docs/notes/grouped-gemm.md"
STEP_NOTES = "docs/notes/transformers-step.md"
ACTIVATION_NOTES = "docs/notes/activation.md"

# The page, the marker's name, and the rows.
TABLES: list[tuple[str, str, Callable[[], Rows]]] = [
    (README, RECIPE, models.readme_steps),
    (PERFORMANCE, LAYER, layer.layer),
    (PERFORMANCE, BESIDE_TE, layer.beside_te),
    (PERFORMANCE, "bf16.json", layer.bf16_layer),
    (PERFORMANCE, MEMORY_BOUND, layer.operators),
    (PERFORMANCE, f"{MEMORY_BOUND}, weights", layer.weights),
    (PERFORMANCE, GEMM, layer.gemms),
    (LAYER_PAGE, f"{LAYER}, saved", layer.saved),
    (LAYER_PAGE, f"{LAYER}, four layers", layer.four_layers),
    (LAYER_PAGE, f"{MEMORY_BOUND}, counts", layer.counts),
    (ROUTERS, "router.json", layer.routers),
    (HELPS, SWEEP, layer.sweep),
    (GROUPS, f"{EP_4}, capacities", layer.ep_capacities),
    (GROUPS, SEVERAL, models.several_gpus),
    *((EP, f"{name}, steps", lambda name=name: layer.ep_steps(name)) for name in (EP_2, EP_4)),
    *(
        (EP, f"{name}, exchanges", lambda name=name: layer.ep_exchanges(name))
        for name in (EP_2, EP_4)
    ),
    *((SAME, name, lambda name=name: models.quality(name)) for name in (LONG, QUALITY)),
    (SAME, f"{LONG}, seeds", lambda: models.quality_seeds(LONG, "fp8")),
    (SAME, f"{QUALITY}, seeds", lambda: models.quality_seeds(QUALITY, "fp8", "noise")),
    (SAME, COARSE, lambda: models.quality_seeds(COARSE, "fp8")),
    (SAME, "quality-step.json", models.quality_steps),
    (HUGGING_FACE, RECIPE, models.recipe),
    (STEP_NOTES, RECIPE, models.kernels),
    (CHECKPOINTS, LORA, models.frozen),
    (LORA_PAGE, LORA, models.low_rank),
    (LORA_PAGE, LORA_MODEL, models.lora_model),
    (LORA_PAGE, "lora-losses.json", models.lora_losses),
    (MEGATRON, "megatron.json", models.megatron),
    *(
        (TITAN, name, lambda name=name: models.torchtitan(name))
        for name in ("torchtitan.json", "torchtitan-2.json")
    ),
    (TITAN, "torchtitan-losses.json", models.torchtitan_losses),
    (JAX, "jax.json", models.jax),
    (ROLLOUT, "rollout.json", models.rollout),
    (ROLLOUT, ROLLOUT_LOSSES, models.rollout_losses),
    (ACTIVATION_NOTES, ACTIVATIONS, models.activations),
    (ACTIVATION_NOTES, "activation-blocks.json", models.activation_blocks),
]
# The page, what a phrase looks like, and what it says.
PHRASES: list[tuple[str, str, Callable[[], str]]] = [
    (README, r"[\d.]+ to [\d.]+ times as fast as torch's bf16", layer.times_as_fast),
    (README, r"\d+ to \d+% of a step here", layer.share_of_quantizing),
    (README, r"The block on one H\d00", lambda: f"The block on one {card(LAYER)}"),
    (README, r"The steps on one H\d00", lambda: f"The steps on one {card(RECIPE)}"),
    (README, r"trains Qwen3-30B in .*? PEFT takes in bf16", models.readme_lora),
    (README, r"takes \[[\d.]+ times\]\S+ one GPU's .*? times FP8's", layer.over_alone),
    (README, r"make a step [\d.]+ to [\d.]+ times as fast", models.compiled_step),
    (README, r"the layer [\d.]+ to [\d.]+\d", models.megatron_layer),
    (PERFORMANCE, r"On the layer's H\d00 a copy .*?, torch [\d.]+\d", layer.software),
    (PERFORMANCE, r"takes [\d.]+ to [\d.]+ of these times", layer.burst_shares),
    (PERFORMANCE, r"V2-Lite: [\d.]+, [\d.]+ and [\d.]+ ms", layer.te_bursts),
    (
        SAME,
        r"trains [\d.]+ times as fast: [\d,]+ and [\d,]+ tokens per second",
        models.trains_as_fast,
    ),
    (HELPS, r"With a quantization .*? tokens per expert on", layer.wins_from),
    (GROUPS, r"takes it \d+ to \d+% of the step", models.queueing_share),
    (GROUPS, r"takes [\d.]+ ms where NCCL's takes [\d.]+\d", layer.by_transport),
    (
        EP,
        r"takes [\d.]+ to [\d.]+ times as long .*? of dout it takes [\d.]+ to [\d.]+\d",
        layer.all_to_all_over,
    ),
    (EP, r"takes [\d.]+ to [\d.]+ of NCCL's", layer.combine_over),
    (HUGGING_FACE, r"another \d.*? faster", models.graph_gains),
    (LORA_PAGE, r"takes \d+% of PEFT's time .*? GiB less", models.less_than_peft),
    (
        *(GEMM_NOTES, r"the mean is [\d.]+ in fprop, [\d.]+ in dgrad and [\d.]+ in wgrad"),
        layer.gemm_means,
    ),
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


def with_phrase(text: str, pattern: str, words: str) -> str:
    """The page with `words` where the pattern is."""
    found = re.search(pattern.replace(" ", r"\s+"), text, re.DOTALL)
    if found is None:
        raise ValueError(f"no {pattern!r}")
    old, new = re.split(r"(\s+)", found[0]), words.split()
    if len(old[::2]) == len(new):  # keeps the line breaks
        old[::2] = new
        words = "".join(old)
    return text[: found.start()] + words + text[found.end() :]


def with_places(text: str) -> str:
    """The page with the GPU and the commit that each linked record names."""

    def named(found: re.Match[str]) -> str:
        of, between = place(found["name"]), found["between"]
        if of.get("gpu"):
            between = re.sub(r"\bH\d00", card(found["name"]), between)
        return found["link"] + between + (of.get("commit") or found["commit"])

    link = r"(?P<link>benchmarks/(?P<name>[\w-]+\.json)\))"
    behind = r"(?P<between>[^.;|]{0,40}?\bcommit\s)(?P<commit>[0-9a-f]{7})\b"
    return re.sub(link + behind, named, text)


def page(path: str) -> str:
    """The page as its records have it."""
    text = (ROOT / path).read_text()
    for of, name, rows in TABLES:
        if of == path:
            text = with_table(text, name, rows())
    for of, pattern, said in PHRASES:
        if of == path:
            text = with_phrase(text, pattern, said())
    return with_places(text)


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
