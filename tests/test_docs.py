"""What README and docs show is true: snippets run as written, links lead somewhere, tables equal
their records, pages keep the limits of scripts/prose.py."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp8moe_cutlass
import pages

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
)
NOTES = "docs/notes/transformers-step.md"
MEGATRON = "docs/how-to/megatron-core.md"  # tests/test_megatron_core_docs.py runs it
ROLLOUT = "docs/how-to/rollout.md"
JAX = "docs/how-to/jax.md"  # tests/test_jax_moe.py runs it
TITAN = "docs/how-to/torchtitan.md"  # tests/test_torchtitan.py runs it
CXX = shutil.which("c++") or shutil.which("g++")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a language on a page, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


# What holds when a page's program has run.
AFTER = {
    "README.md": "assert {p for g in optimizer.param_groups for p in g['params']} == "
    "set(moe.parameters())"
}


def program(page: str, *before: str) -> str:
    """All Python of a page, one block after the other. before: lines that run first."""
    parts = [*before, *blocks(page, "python"), AFTER.get(page, "")]
    if not torch.cuda.is_available():
        parts = [part.replace('device_map="cuda"', 'device_map="cpu"') for part in parts]
    if any("init_process_group" in part for part in parts):
        # A thread of torch's gloo may still release tensors. Where Python (before 3.14) ends under
        # it, it aborts the process: end without the interpreter's own end.
        parts += ["import os, sys", "sys.stdout.flush()", "os._exit(0)"]
    return "\n".join(parts)


def prose():
    spec = importlib.util.spec_from_file_location("prose", ROOT / "scripts/prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# They run transformers' models, or several ranks' code.
LORA = "docs/how-to/lora.md"
SLOW = {"README.md", "docs/how-to/hugging-face.md", "docs/how-to/several-gpus.md", LORA}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=[pytest.mark.slow] if p in SLOW else [])
        for p in PAGES
        if blocks(p, "python") and p not in (MEGATRON, JAX, TITAN)
    ],
)
def test_python_runs_as_written(page: str, tmp_path: Path) -> None:
    if page == "README.md":
        pytest.importorskip("transformers")
        from transformers_models import model_of

        model_of("Qwen3Moe").save_pretrained(tmp_path / "Qwen/Qwen3-30B-A3B")  # a tiny one instead
    run_python(page, tmp_path, *(lora_checkpoint(tmp_path) if page == LORA else ()))


def lora_checkpoint(tmp_path: Path) -> list[str]:
    """A tiny FP8 checkpoint by transformers' quantizer, and what lets a CPU load it as it is."""
    pytest.importorskip("peft")
    import transformers
    from transformers.quantizers import quantizer_finegrained_fp8 as quantizer

    from transformers_models import model_of

    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    model_of("Qwen3Moe", **sizes).bfloat16().save_pretrained(tmp_path / "bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            quantizer.FineGrainedFP8HfQuantizer, "validate_environment", lambda *a, **k: None
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "bf16",
            dtype="bfloat16",
            quantization_config=transformers.FineGrainedFP8Config(),
        )
    model.save_pretrained(tmp_path / "Qwen/Qwen3-30B-A3B-FP8")
    return [
        "from transformers.quantizers import quantizer_finegrained_fp8 as _q",
        "_q.FineGrainedFP8HfQuantizer.validate_environment = lambda *a, **k: None",
    ]


def run_python(page: str, tmp_path: Path, *before: str) -> None:
    """A page's program as a user who copies it would run it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    ranks = {k: str(v) for k, v in torchrun.items()} | {"MASTER_PORT": str(port)}
    code = tmp_path / "page.py"
    code.write_text(program(page, *before))
    command = [sys.executable, code]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **ranks}
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_several_gpus_runs_on_two_ranks(tmp_path: Path) -> None:
    code = tmp_path / "page.py"
    code.write_text(program("docs/how-to/several-gpus.md"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, code], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/several-gpus/checkpoint-2/model.safetensors").exists()


@pytest.mark.slow
def test_tutorial_commands_run(tmp_path: Path) -> None:
    text = (ROOT / "docs/tutorial/first-layer.md").read_text()
    commands = re.findall(r"^(fp8moe-cutlass|python) (.*)$", text, re.MULTILINE)
    assert commands == [
        ("fp8moe-cutlass", "doctor"),
        ("fp8moe-cutlass", "verify"),
        ("python", "examples/language_model.py --size tiny"),
    ]
    for program, arguments in commands:
        start = ["-m", "fp8moe_cutlass"] if program == "fp8moe-cutlass" else []
        run = [sys.executable, *start, *arguments.replace("examples", f"{ROOT}/examples").split()]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs/language-model/loss.json").exists()


@pytest.mark.skipif(CXX is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "cpp")])
def test_cpp_compiles_as_written(page: str) -> None:
    for code in blocks(page, "cpp"):
        flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Werror", "-x", "c++", "-"]
        command = [CXX, f"-I{fp8moe_cutlass.include_dir()}", *flags]
        done = subprocess.run(command, input=code, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    here = ROOT / page
    text = re.sub(r"```.*?```", "", here.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (here.parent / path) if path else here
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_index_lists_every_page() -> None:
    listed = re.findall(r"\]\(([^)]+)\)", (ROOT / "docs/index.md").read_text())
    kinds = ("tutorial", "how-to", "reference", "explanation")
    there = {
        p.relative_to(ROOT / "docs").as_posix() for k in kinds for p in ROOT.glob(f"docs/{k}/*.md")
    }
    assert there == {p for p in listed if p.startswith(kinds)}


def messages() -> list[str]:
    """What the package's Python says in errors and warnings, with {} for values."""
    found = []
    for path in (ROOT / "python").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(
                str(getattr(part, "value", "")) if isinstance(part, ast.Constant) else "{}"
                for part in parts
            )
            found.append(text)
    return [text for text in found if text.startswith("[")]


def test_errors_are_those_of_the_sources() -> None:
    listed = re.findall(
        r"^\| `(\[[^`]+)`", (ROOT / "docs/reference/errors.md").read_text(), re.MULTILINE
    )
    said = messages()
    assert len(listed) > 20
    for message in listed:
        pattern = re.compile(".*".join(map(re.escape, message.split("…"))))
        assert any(pattern.match(text) for text in said), message


@pytest.mark.parametrize("page", PAGES)
def test_prose_keeps_its_limits(page: str) -> None:
    found = prose().measure((ROOT / page).read_text())
    assert found["long sentences"] == []
    assert found["glossary"] == []
    if page == "README.md":
        assert {k: found[k] <= most for k, most in prose().README.items() if found[k] > most} == {}


def table(page: str, record: str) -> list[list[str]]:
    """The cells of the table that follows `<!-- table: RECORD -->`, without its head."""
    _, _, after = (ROOT / page).read_text().partition(f"<!-- table: {record} -->\n")
    rows = [line.strip("|\n").split("|") for line in after.split("\n\n")[0].splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def recorded(name: str) -> dict:
    return json.loads((ROOT / "docs/benchmarks" / name).read_text())


def makers() -> dict[str, str]:
    """The script of each record, by benchmarks/README.md."""
    _, _, text = (ROOT / "benchmarks/README.md").read_text().partition("makes which record\n")
    lines = text.partition("\n## ")[0].splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| ")]
    scripts = {}
    for _, script, of, *_ in rows:
        for record in ROOT.glob("docs/benchmarks/*.json"):
            if re.search(rf"(?<![\w-]){record.stem}(?![\w-])", of):
                scripts[record.stem] = script.strip(" `").removeprefix("scripts/")
    return scripts


def test_every_record_has_its_script() -> None:
    made = makers()
    assert set(made) == {p.stem for p in ROOT.glob("docs/benchmarks/*.json")}
    for script in set(made.values()):
        assert any((ROOT / folder / script).exists() for folder in ("benchmarks", "scripts"))


@pytest.mark.parametrize("page", [p for p in PAGES if p.startswith("docs/")])
def test_a_table_names_what_makes_its_record(page: str) -> None:
    made = makers()
    for section in re.split(r"^#+ ", (ROOT / page).read_text(), flags=re.MULTILINE):
        for record in re.findall(r"benchmarks/([\w-]+)\.json\)", section):
            assert made[record] in section, f"{record} without {made[record]}"


COMMAND = re.compile(
    r"(python|torchrun|)[^`\n]*?((?:examples|benchmarks|scripts)/\w+\.py)([^`\n#|]*)"
)


@pytest.mark.parametrize("page", [*PAGES, "benchmarks/README.md", "scripts/README.md"])
def test_commands_have_options_that_exist_and_those_required(page: str) -> None:
    for start, script, rest in COMMAND.findall((ROOT / page).read_text()):
        if script == "benchmarks/NAME.py":
            continue
        code = (ROOT / script).read_text()
        need = set(re.findall(r'add_argument\("(--[\w-]+)"[^\n]*required=True', code))
        if re.search(r"\bparser\(__doc__\)", code) and "def parser(" not in code:
            need.add("--json")  # of benchmarks/common.py
        given = set(re.findall(r"(?<!\S)--[\w-]+", rest))
        if script == "benchmarks/layer.py":
            code += (ROOT / "benchmarks/model_layer.py").read_text()
        known = set(re.findall(r'"(--[\w-]+)"', code)) | {"--device", "--quick", "--json"}
        assert given <= known, (script, rest)
        assert not start or given >= need, (script, rest)


def results(name: str) -> list[dict]:
    return recorded(name)["results"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_as_its_records(page: str) -> None:
    """Tables, phrases and commits that benchmarks/pages.py writes."""
    assert pages.page(page) == (ROOT / page).read_text()


def test_every_record_and_plot_is_used_by_a_page() -> None:
    text = "".join((ROOT / page).read_text() for page in PAGES)
    here = {p.name for p in ROOT.glob("docs/benchmarks/*")}
    assert {name for name in here if name not in text} == set()


def by_pieces(record: str) -> dict[tuple[str, str], list[dict]]:
    """Steps of a model with pieces of the recipe: grouped_mm's, then ours."""
    rows: dict[tuple[str, str], list[dict]] = {}
    for r in results(record):
        rows.setdefault((r["model"], r["variant"].partition(": ")[2]), []).append(r)
    return rows


def test_readme_steps_equal_their_record() -> None:
    """Hugging Face's default and what the how-to advises, but for loops of one's own."""
    rows = by_pieces("transformers-recipe-h100.json")
    want = []
    for model in dict.fromkeys(model for model, _ in rows):
        pieces = [p for m, p in rows if m == model and "graph" not in p and "backward" not in p]
        (bf16, fp8), fast = rows[model, "default"], rows[model, pieces[-1]]
        ms = [f"{r['ms']:.1f}" for r in (bf16, fp8, *fast)]
        gib = ", ".join(f"{r['peak_gib']:.1f}" for r in (bf16, fast[1]))
        want.append([*ms, f"{bf16['ms'] / fast[1]['ms']:.2f}", gib])
    assert [row[1:] for row in table("README.md", "transformers-recipe-h100.json")] == want


def test_readme_says_what_transposed_codes_cost() -> None:
    """2 to 3% of time and 1 to 4 GiB, of whole steps, eager and compiled."""
    of_steps = [r for r in results("transformers-h100.json") if r["op"] == "step"]
    steps = {(r["model"], r["variant"]): r for r in of_steps}
    longer, below = [], []
    for (model, variant), remade in steps.items():
        if "remade" in variant:
            saved = steps[model, variant.replace(", remade", "")]
            longer.append(100 * (remade["ms"] / saved["ms"] - 1))
            [bf16] = [remade["peak_gib"][base] for base in remade["peers"]]
            below.append(bf16 - remade["peak_gib"][variant])
    assert (round(min(longer)), round(max(longer))) == (2, 3)
    assert (round(min(below)), round(max(below))) == (1, 4)
    text = " ".join((ROOT / "README.md").read_text().split())
    assert "takes 2 to 3% longer, and its peaks are 1 to 4 GiB below bf16's" in text


def test_readme_says_what_records_say() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    kept = [
        memory["fp8moe"]["saved"] / memory[pages.TORCH]["saved"]
        for r in results(pages.LAYER)
        if r["variant"] == pages.REUSING
        for memory in [r["memory"]]
    ]
    assert all(0.3 < share <= 0.5 for share in kept)
    assert "keeps a third to a half of [its activations]" in text
    lora = {r["op"]: r for r in results("lora-model-h100.json") if r["shape"]["T"] == 8192}
    assert round(lora["turned"]["peak_gib"]) == 37
    assert 0.45 < lora["turned"]["ms"] / lora["bf16, PEFT"]["ms"] < 0.55
    assert "trains Qwen3-30B in 37 GiB, and in half the time that PEFT takes in bf16" in text
    of = pages.ep_rows(pages.EP_4)["DeepSeek-V3", pages.STEP]["random, exact, beside bf16, peer"]
    assert 1.6 < of["peers"][pages.BESIDE] / of["ms"] < 1.75
    assert "and bf16 two thirds longer" in text


@pytest.mark.parametrize("record", ["transformers-h100.json", "transformers-v3-sizes-h100.json"])
def test_transformers_table_equals_its_record(record: str) -> None:
    want = []
    for r in results(record):
        [(base, ms)] = r["peers"].items()
        what = ", ".join(filter(None, (r["op"], r["variant"].removeprefix("fp8moe").strip(", "))))
        whole = r["op"] == "step"
        gib = [f"{r['peak_gib'][name]:.1f}" if whole else "" for name in (base, r["variant"])]
        figures = [f"{ms:.1f}", f"{r['ms']:.1f}", f"{r['ratio']:.2f}", *gib]
        if "remade" not in what:
            want.append([r["model"], what, *figures])
    assert table("docs/how-to/hugging-face.md", record) == want


def test_recipe_tables_equal_their_records() -> None:
    """The how-to has what is advised, the notes every piece for the first model."""
    for device, page in (("h100", "docs/how-to/hugging-face.md"), ("h200", NOTES)):
        name = f"transformers-recipe-{device}.json"
        rows = by_pieces(name)
        want = []
        for (model, pieces), of in rows.items():
            base = rows[model, "default"][0]["ms"]
            figures = [
                (
                    *(f"{r['ms']:.1f}", f"{base / r['ms']:.2f}", f"{r['peak_gib']:.1f}"),
                    *(f"{r['tokens_per_s'] / 1e3:.1f}", f"{100 * r['limit_ms'] / r['ms']:.0f}%"),
                )
                for r in of
            ]
            cells = [", ".join(two) for two in zip(*figures, strict=True)]
            if device == "h100":
                want.append([model, pieces, *cells])
            elif model == next(iter(rows))[0]:
                want.append([pieces, *cells[:3]])
        assert table(page, name) == want


LIMITS = "transformers-limits-h200.json"


def test_limits_of_a_step_equal_their_record() -> None:
    """Kernels of a step, what they take at the machine's limits, and what the bars allow."""
    name = "transformers-recipe-h100.json"
    rows = by_pieces(name)
    want: dict[str, list[str]] = {}
    for model in dict.fromkeys(model for model, _ in rows if "LoRA" not in model):
        v3 = "V3" in model
        fast = "layers + loss" if v3 else "layers + loss + AdamW compiled"
        bf16, r = rows[model, fast]
        place = r.get("place") or recorded(name)["environment"]
        rates = {"experts": place["tensor_tflops"]}
        flops = {k: n / rates.get(k, place["bf16_tflops"]) for k, n in r["flops_of"].items()}
        moves = {k: n / place["copy_tb_s"] for k, n in r["bytes_of"].items()}
        limits = {k: (flops.get(k, 0) + moves.get(k, 0)) / 1e9 for k in flops | moves}
        both = {k: (ms, min(ms, limits.get(k, ms))) for k, ms in r["kernels"].items()}
        both["all"] = tuple(map(sum, zip(*both.values(), strict=True)))  # type: ignore[assignment]
        cells = {k: f"{ms:.1f}, {limit:.1f}" for k, (ms, limit) in both.items()}
        captured = next(of for (m, p), of in rows.items() if m == model and "graph" in p)
        default = rows[model, "default"][0]["ms"]
        cells["the step; captured"] = f"{r['ms']:.1f}; {captured[1]['ms']:.1f}"
        cells["0.45 of the default"] = f"{0.45 * default:.1f}"
        share = 0.76 if v3 else 0.82
        allowed = (share * of["ms"] for of in (bf16, captured[0]))
        cells["0.82, or 0.76, of bf16 experts; captured"] = "; ".join(f"{ms:.1f}" for ms in allowed)
        for part, cell in cells.items():
            want.setdefault(part, []).append(cell)
    assert table(NOTES, name) == [[part, *cells] for part, cells in want.items()]


def test_captured_steps_and_heads_equal_their_record() -> None:
    steps, heads = {}, {}
    for r in results(LIMITS):
        if r["op"] == "step" and "run" in r:
            experts, _, pieces = r["variant"].partition(": ")
            steps.setdefault(pieces, {})[experts] = r["ms"]
        elif r["op"] == "head and loss":
            shape = f"{r['shape']['H']:,}, {r['shape']['V']:,}"
            heads.setdefault(shape, {})[r["variant"]] = f"{r['ms']:.1f}"
    default = steps.pop("default")["grouped_mm"]
    want = []
    for pieces, ms in steps.items():
        if "grouped_mm" in ms:
            bf16, ours = ms["grouped_mm"], ms["fp8moe"]
            what = pieces.removeprefix("layers + loss + AdamW compiled").removeprefix(" + ")
            ratios = (f"{ours / base:.3f}" for base in (default, bf16))
            want.append([what or "as they are", f"{bf16:.1f}", f"{ours:.1f}", *ratios])
    assert table(NOTES, f"{LIMITS}, captured") == want
    names = "bf16", "torchao tensorwise", "torchao rowwise", "this library's operators"
    want = [[shape, *(of.get(name, "") for name in names)] for shape, of in heads.items()]
    assert table(NOTES, f"{LIMITS}, heads") == want


def test_losses_equal_their_record() -> None:
    """FP8 experts' are closer to the default's than those of bf16 by another implementation."""
    [losses] = recorded(LIMITS)["losses"].values()
    first, *_ = losses.values()
    experts, want, furthest = {"grouped_mm": "bf16", "fp8moe": "FP8 experts"}, [], []
    for variant, its in losses.items():
        name, _, pieces = variant.partition(": ")
        apart = [abs(a - b) for a, b in zip(its, first, strict=True)]
        furthest.append(max(apart))
        figures = (max(apart), sum(apart) / len(apart), sum(its[-20:]) / 20)
        cells = ["" if f == 0 else f"{f:.3f}" for f in figures]
        want.append([f"{experts[name]}, {pieces}", *cells])
    assert table(NOTES, f"{LIMITS}, losses") == want
    assert furthest[2] < furthest[1] < furthest[3]


@pytest.mark.parametrize(
    "record", ["several-gpus-h100.json", "several-gpus-h200.json", "several-gpus-4-h200.json"]
)
def test_several_gpus_tables_equal_their_records(record: str) -> None:
    rows: dict[tuple[str, int], dict[str, dict]] = {}
    for r in results(record):
        rows.setdefault((r["model"], r["shape"]["T"]), {})[r["variant"]] = r
    ways = "bf16, fully_shard", "FP8, fully_shard", "FP8, group"
    want = []
    for (model, tokens), of in rows.items():
        of_ways = [of[way] for way in ways if way in of]
        cells = [f"{r['ms']:.1f} ({r['ratio']:.2f}), {r['peak_gib']:.1f}" for r in of_ways]
        want.append([f"{model}, {tokens:,} tokens per rank", *cells])
    assert table("docs/how-to/several-gpus.md", record) == want


def test_several_gpus_recipe_table_equals_its_record() -> None:
    rows: dict[str, dict[str, str]] = {}
    for r in results("several-gpus-recipe-h100.json"):
        name, _, pieces = r["variant"].partition(": ")
        cell = f"{r['ms']:.1f} ({r['ratio']:.2f}), {r['peak_gib']:.1f}"
        rows.setdefault(name, {})[pieces] = cell
    columns = "default", "layers + loss", "layers + loss + AdamW compiled"
    want = [
        [
            name.replace(", ", " by ").replace("group", "`group=`"),
            *(of.get(column, "") for column in columns),
        ]
        for name, of in rows.items()
    ]
    assert table("docs/how-to/several-gpus.md", "several-gpus-recipe-h100.json") == want


def test_frozen_table_equals_its_record() -> None:
    rows: dict[str, dict[str, float]] = {}
    for r in results("lora-h100.json"):
        rows.setdefault(r["model"], {})[r["op"]] = r["ms"]
    layers = "quantized in each step", "frozen, turned", "frozen, kept"
    want = [
        [
            model,
            *(f"{ms[way]:.2f}" for way in layers),
            *(f"{ms[op]:.3f}" for op in ("turn_weight", "copy")),
        ]
        for model, ms in rows.items()
    ]
    assert table("docs/how-to/fp8-checkpoints.md", "lora-h100.json") == want


LOSSES_TO = range(40, 201, 40)


def test_lora_tables_equal_their_records() -> None:
    rows: dict[str, dict[str, float]] = {}
    for r in results("lora-h100.json"):
        rows.setdefault(r["model"], {})[r["op"]] = r["ms"]
    want = []
    for model, ms in rows.items():
        cells = [model]
        for mode in ("kept", "turned"):
            frozen = ms[f"frozen, {mode}"]
            low = [f"{ms[f'LoRA r {rank}, {mode}'] / frozen:.2f}" for rank in (16, 64)]
            cells += [f"{frozen:.2f}", *low]
        want.append(cells)
    assert table("docs/how-to/lora.md", "lora-h100.json") == want
    names = {
        "turned": "FP8, turned in each backward",
        "kept": "FP8, kept",
        "bf16, PEFT": "bf16, by PEFT",
        "bf16, attention": "bf16, on attention alone",
    }
    want = [
        [
            names[r["op"]] + (", layers compiled" if r.get("compiled") else ""),
            *(f"{r['shape']['T']:,}", f"{r['ms']:.0f}"),
            *(f"{r['tokens_per_s']:,.0f}", f"{r['peak_gib']:.1f}"),
        ]
        for r in results("lora-model-h100.json")
    ]
    assert {r["layers"] for r in results("lora-model-h100.json")} == {48}
    assert table("docs/how-to/lora.md", "lora-model-h100.json") == want
    want = [
        [f"{r['experts']} experts, seed {r['seed']}", *(f"{r[f'to {n}']:.3f}" for n in LOSSES_TO)]
        for r in results("lora-losses-cpu.json")
    ]
    assert table("docs/how-to/lora.md", "lora-losses-cpu.json") == want
    for r in results("lora-losses-cpu.json"):
        beside = recorded("lora-losses-cpu.json")["losses"][f"bf16 {r['seed']}"]
        assert abs(r["to 200"] - sum(beside[-20:]) / 20) < 0.005


def test_megatron_table_equals_its_record() -> None:
    record = recorded("megatron-h100.json")
    want = [
        [
            f"{r['model']}: {r['variant']}",
            f"{r['ms']:.1f}",
            f"{r['tokens_per_s']:,.0f}",
            f"{r['ratio']:.2f}",
            f"{record['alone'][r['model']][r['variant']]['peak_gib']:.2f}",
        ]
        for r in record["results"]
    ]
    assert table(MEGATRON, "megatron-h100.json") == want


def test_torchtitan_table_equals_its_record() -> None:
    want = [
        [
            r["variant"],
            f"`{r['who']}`",
            *(f"{r[who][step]:.4f}" for step in (0, -1) for who in ("own", "ours")),
            f"{max(abs(a - b) for a, b in zip(r['own'], r['ours'], strict=True)):.4f}",
        ]
        for r in results("torchtitan-losses-cpu.json")
    ]
    assert table(TITAN, "torchtitan-losses-cpu.json") == want


@pytest.mark.parametrize("record", ["torchtitan-h100.json", "torchtitan-ep-h200.json"])
def test_torchtitan_speed_equals_its_record(record: str) -> None:
    named = (
        "torchtitan bf16",
        "fp8moe, the layer",
        "fp8moe, the experts",
        "torchao rowwise FP8",
    )
    ran = {r["who"] for r in results(record)}
    who = [name for name in named if name in ran]
    rows: dict[str, list[str]] = {}
    for r in results(record):
        name = r["variant"] + (", the whole head" if r["shape"]["V"] > 2048 else "")
        found = [f"{r['ms']:.1f}", f"{r['tokens_per_s']:,.0f}", f"{r['times_own']:.2f}"]
        cells = rows.setdefault(name, ["-"] * len(who))
        cells[who.index(r["who"])] = ", ".join(found[: 2 if r["who"] == who[0] else 3])
    want = [[name, *cells] for name, cells in rows.items()]
    assert table(TITAN, record) == want


def test_jax_table_equals_its_record() -> None:
    want = []
    for r in results("jax-h100.json"):
        ms = r["ms"], r["peers"]["torch, captured"]
        want.append([r["model"], *(f"{t:.2f}" for t in ms), f"{ms[0] / ms[1]:.3f}"])
        assert all(r["bit_equal"].values())
    assert table(JAX, "jax-h100.json") == want
    want = []
    for r in results("jax-512-h100.json"):
        ragged, ours = r["peers"]["ragged_dot"], r["beside_ragged_dot_ms"]
        want.append([r["model"], f"{ours:.2f}", f"{ragged:.1f}", f"{ragged / ours:.0f}"])
    assert table(JAX, "jax-512-h100.json") == want


def test_activations_table_equals_its_record() -> None:
    rows: dict[tuple[str, str], list[dict]] = {}
    for r in results("activations-h200.json"):
        rows.setdefault((f"{r['shape']['I']:,}", r["op"]), []).append(r)
    want = []
    for head, (swiglu, *others) in rows.items():
        ratios = [swiglu["ms"] / swiglu["peers"]["copy"]]
        ratios += [r["ms"] / r["peers"]["SwiGLU"] for r in others]
        want.append([*head, *(f"{ratio:.2f}" for ratio in ratios)])
    assert table("docs/notes/activation.md", "activations-h200.json") == want
    beside = table("docs/notes/activation.md", "activations-h200.json, predicted")
    swiglu = {(inner, op): ratio for inner, op, ratio, *_ in want}
    assert [inner for inner, *_ in beside] == ["2,880", "1,856", "704"]
    for inner, _, dz, _, columns in beside:
        assert (dz, columns) == (swiglu[inner, "dz"], swiglu[inner, "dz and columns"])


def test_rollout_losses_equal_their_record() -> None:
    record, last, want = recorded("rollout-losses-h100.json"), {}, []
    for run in record["runs"]:
        last[run["arm"], run["seed"]] = statistics.fmean(run["loss"][-50:])
    for r in record["results"]:
        own, base = ([last[arm, seed] for seed in range(3)] for arm in (r["variant"], "bf16"))
        apart = [a - b for a, b in zip(own, base, strict=True)]
        cells = [r["about"], *(f"{loss:.3f}" for loss in (*own, statistics.fmean(own)))]
        span = f"{min(apart):+.3f} to {max(apart):+.3f}" if r["variant"] != "bf16" else ""
        want.append([*cells, span])
    assert table(ROLLOUT, "rollout-losses-h100.json") == want


def test_quality_tables_equal_their_record() -> None:
    record, page = recorded("quality-h100.json"), "docs/explanation/does-fp8-train-as-well.md"
    want = []
    for r in record["results"]:
        g = r.get("gap")
        gap = f"{g['mean']:+.4f} ({g['low']:+.4f} to {g['high']:+.4f})" if g else ""
        cells = f"{r['heldout']:.4f}", f"{r['between_seeds']:.3f}", gap, f"{r['tokens_per_s']:,.0f}"
        last = f"{r['seconds']:.1f}", f"{r['peak_gib']:.1f}"
        want.append([r["about"], str(r["seeds"]), *cells, *last])
    assert table(page, "quality-h100.json") == want
    runs = {(r["arm"], r["seed"]): r["heldout"] for r in record["runs"]}
    want, apart = [], []
    for seed in range(5):
        bf16, fp8, noise = (runs[arm, seed] for arm in ("bf16", "fp8", "noise"))
        (_, base, base_s), (_, own, _), (_, other, _) = bf16[-1], fp8[-1], noise[-1]
        apart.append([a[1] - b[1] for a, b in zip(fp8, bf16, strict=True)])
        reached = next((k for k, (_, loss, _) in enumerate(fp8) if loss <= base), None)
        time = "not reached"
        if reached is not None:  # straight between evaluations
            (_, a, then), (_, b, now) = fp8[reached - 1 : reached + 1]
            time = f"{then + (a - base) / (a - b) * (now - then):.1f}"
        cells = f"{base:.4f}", f"{own - base:+.4f}", f"{other - base:+.4f}", f"{base_s:.1f}", time
        want.append([str(seed), *cells])
    assert table(page, "quality-h100.json, seeds") == want
    assert not record["results"][1]["bar"]["kept"]
    means = [statistics.fmean(gaps) for gaps in zip(*apart, strict=True)]
    halves = [2.776 * statistics.stdev(gaps) / 5**0.5 for gaps in zip(*apart, strict=True)]
    assert len(means) == 42
    assert min(means) > 0
    steps = [step for step, *_ in runs["bf16", 0]]
    clear = [n for n, mean, half in zip(steps, means, halves, strict=True) if mean > half]
    assert len(clear) == 8
    assert clear[-1] == 330


def test_quality_steps_equal_their_record() -> None:
    want = []
    for r in results("quality-step-h200.json"):
        s, bf16 = r["shape"], r["peers"]["bf16"]
        name = f"{r['model']}: {s['E']} experts of {s['I']}, top-{s['k']}"
        times = (f"{ms:.1f}" for ms in (bf16, r["limit_ms"], r["ms"]))
        want.append([name, r["variant"], *times, f"{bf16 / r['ms']:.2f}"])
    assert table("docs/explanation/does-fp8-train-as-well.md", "quality-step-h200.json") == want


def test_activation_blocks_table_equals_its_record() -> None:
    want = []
    for r in results("activation-blocks-h200.json"):
        best = min(r["peers"].values())
        times = r["ms"], best, best / r["ms"]
        want.append([r["variant"], *(f"{t:.2f}" for t in times)])
    assert table("docs/notes/activation.md", "activation-blocks-h200.json") == want


def test_rollout_times_equal_their_record() -> None:
    rows: dict[str, list[str]] = {}
    for r in results("rollout-h100.json"):
        own, base = r["ms"], r["peers"].get("default")
        rows.setdefault(r["op"], []).append(f"{own:.3f}" if base is None else f"{own / base:.3f}")
    names = {"default": "default, ms", "default, again": "default, again"}
    want = [[names.get(op, f"`{op}`"), *cells] for op, cells in rows.items()]
    assert table(ROLLOUT, "rollout-h100.json") == want
