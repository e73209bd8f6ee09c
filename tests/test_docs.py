"""What README and docs show is true: snippets run as written, links lead somewhere, tables equal
their records, pages keep the limits of scripts/prose.py."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8moe_cutlass
import page_layer
import page_models
import page_records
import pages
import quality
from page_records import results

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
)
MEGATRON = "docs/how-to/megatron-core.md"  # tests/test_megatron_core_docs.py runs it
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


def makers() -> dict[str, str]:
    """The script of each record, by benchmarks/README.md."""
    _, _, text = (ROOT / "benchmarks/README.md").read_text().partition("makes which record\n")
    lines = text.partition("\n## ")[0].splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| ")]
    scripts = {}
    for _, script, of, *_ in rows:
        of = re.sub(r"\(.*?\)", "", of)
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


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_as_its_records(page: str) -> None:
    """Tables, phrases and commits that benchmarks/pages.py writes."""
    assert pages.page(page) == (ROOT / page).read_text()


def test_pages_follow_a_record_of_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures, GPU and commit; line breaks stay."""
    monkeypatch.setattr(pages, "place", lambda name: {"gpu": "an H100", "commit": "abcdef1"})
    monkeypatch.setattr(pages, "card", lambda name: "H100")
    link = "[x.json](../benchmarks/layer.json), one"
    assert pages.with_places(f"{link}\nH200, commit 0123456") == f"{link}\nH100, commit abcdef1"
    text = pages.with_phrase(
        "It takes 2.0 to\n3.0 ms.", r"takes [\d.]+ to [\d.]+", "takes 4.0 to 5.0"
    )
    assert text == "It takes 4.0 to\n5.0 ms."


def test_every_record_and_plot_is_used_by_a_page() -> None:
    text = "".join((ROOT / page).read_text() for page in PAGES)
    here = {p.name for p in ROOT.glob("docs/benchmarks/*")}
    assert {name for name in here if name not in text} == set()


def test_readme_says_what_records_say() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    kept = [
        memory["fp8moe"]["saved"] / memory[page_layer.TORCH]["saved"]
        for r in results(page_layer.LAYER)
        if r["variant"] == page_layer.REUSING
        for memory in [r["memory"]]
    ]
    assert all(0.3 < share <= 0.5 for share in kept)
    assert "keeps a third to a half of [its activations]" in text


def test_sweep_says_what_its_record_says() -> None:
    """FP8 wins everywhere once the weights are quantized."""
    assert all(reused > 1.1 for _, reused in page_layer.ratios().values())


def test_lora_model_is_whole() -> None:
    assert {r["layers"] for r in results(page_models.LORA_MODEL)} == {48}


def test_lora_losses_lie_together() -> None:
    record = page_records.record("lora-losses.json")
    for r in record["results"]:
        beside = record["losses"][f"bf16 {r['seed']}"]
        assert abs(r["to 200"] - sum(beside[-20:]) / 20) < 0.005


def test_jax_has_the_bits_of_torch() -> None:
    assert all(all(r["bit_equal"].values()) for r in results("jax.json"))


def gaps_of(runs: Any, arm: str, seeds: range) -> list[tuple[float, float]]:
    """At each evaluation the mean, and half of its interval."""
    pairs = [(runs[arm, seed], runs["bf16", seed]) for seed in seeds]
    each = [[a[1] - b[1] for a, b in zip(*pair, strict=True)] for pair in pairs]
    found = [quality.interval(of) for of in zip(*each, strict=True)]
    return [(of["mean"], of["high"] - of["mean"]) for of in found]


def test_quality_says_what_its_record_says() -> None:
    """Where the gap's interval ends, and its sign on the way."""
    rows = {r["variant"]: r for r in results(page_models.QUALITY)}
    assert not rows["fp8"]["bar"]["interval"]
    assert rows["fp8"]["bar"]["mean"]
    assert rows["fp8"]["bar"]["no_growth"]
    assert round(rows["fp8"]["gap"]["low"], 4) == -0.0114
    assert round(rows["fp8"]["gap"]["high"], 4) == 0.0077
    runs = page_models.heldout(page_models.QUALITY)
    steps = [step for step, *_ in runs["bf16", 0]]
    gaps = functools.partial(gaps_of, runs)

    def above(arm: str, seeds: range) -> int:
        return sum(mean > 0 for mean, _ in gaps(arm, seeds))

    def clear(seeds: range) -> list[int]:
        both = zip(steps, gaps("fp8", seeds), strict=True)
        return [step for step, (mean, half) in both if abs(mean) > half]

    assert len(steps) == above("fp8", range(5)) == 42
    assert len(clear(range(5))) == 8
    assert above("fp8", range(5, 10)) == 19
    assert above("fp8", range(10)) == above("noise", range(5)) == 33
    assert clear(range(10)) == [11, 154]
    means = [mean for mean, _ in gaps("fp8", range(10))]
    assert max(means[steps.index(396) :]) < 0
    small = (r for r in rows.values() if r["seeds"] == 2)
    assert all(r["gap"]["low"] < 0 < r["gap"]["high"] for r in small)


def test_quality_says_what_its_longer_pairs_say() -> None:
    rows = {r["variant"]: r for r in results(page_models.LONG)}
    gap, growth = rows["fp8"]["gap"], rows["fp8"]["growth"]
    assert rows["fp8"]["bar"]["kept"]
    assert [f"{gap[k]:+.4f}" for k in ("mean", "low", "high")] == ["+0.0006", "-0.0040", "+0.0051"]
    assert [f"{growth[k]:+.4f}" for k in ("mean", "low", "high")] == [
        *("-0.0002", "-0.0038", "+0.0034")
    ]
    runs = page_models.heldout(page_models.LONG)
    mean, half = gaps_of(runs, "fp8", range(1, 5))[-1]  # of those fixed before they ran
    assert [round(v, 4) for v in (mean, mean - half, mean + half)] == [0.0009, -0.0057, 0.0075]
    found = gaps_of(runs, "fp8", range(5))
    assert sum(mean > 0 for mean, _ in found) == 28
    assert len(found) == 41
    assert all(abs(mean) <= half for mean, half in found)
