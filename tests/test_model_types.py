"""docs/reference/model-types.md: its table is what the installed transformers has.

    python tests/test_model_types.py

prints the table anew.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

from fp8moe_cutlass import Activation
from fp8moe_cutlass.integrations import transformers as fp8moe
from fp8moe_cutlass.integrations.transformers_activation import activation_of
from fp8moe_cutlass.integrations.transformers_check import biases_of, is_turned
from fp8moe_cutlass.integrations.transformers_llama4 import is_llama4
from transformers_models import experts_classes

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parent.parent / "docs/reference/model-types.md"


def rows() -> Iterator[str]:
    """A line per experts class: the model types of its folder, its name, whether it runs, and with
    which options nn.MoEExperts computes it."""
    modules = {**experts_classes(), **without_implementation()}
    for name, module in sorted(modules.items(), key=lambda item: item[1].__module__):
        folder = module.__module__.split(".")[-2]
        types = ", ".join(f"`{t}`" for t in CONFIG_MAPPING if of_experts(t, folder))
        [found] = fp8moe.check(nn.ModuleList([module]))
        runs = found.reason is None or "sizes must be" in found.reason
        word = "yes" if runs else "by `swap`" if is_llama4(module) else f"no: {found.reason}"
        yield f"| {types} | `{name}` | {word} | {'' if word[:2] == 'no' else options_of(module)} |"


def options_of(module: Any) -> str:
    """What nn.MoEExperts(E, H, I) takes beside sizes, by the defaults of the class's config."""
    if is_llama4(module):
        with torch.device("meta"):
            module = type(module)(transformers.Llama4TextConfig())
    of = activation_of(module)
    given = {f.name: getattr(of, f.name) for f in fields(of)}
    kind = [] if of.kind == Activation().kind else [repr(given["kind"]).replace("'", '"')]
    more = [f"{k}={v}" for k, v in given.items() if k != "kind" and v != getattr(Activation(), k)]
    found = [f"`activation=Activation({', '.join(kind + more)})`"] if kind or more else []
    found += ["`bias=True`"] if biases_of(module) else []
    found += ["weights [E, in, out]"] if is_turned(module) else []
    return ", ".join(found) or "sizes alone"


def of_experts(model_type: str, folder: str) -> bool:
    """Whether a model type of transformers/models/FOLDER has a number of experts in its config."""
    if model_type_to_module_name(model_type) != folder:
        return False
    config = CONFIG_MAPPING[model_type]().get_text_config()
    parts = [config, getattr(config, "ffn_config", None)]  # DBRX has it there
    names = {n for p in parts if p is not None for n in (*vars(p), *type(p).attribute_map)}
    return any(re.search(r"num(_local|_routed)?_experts$|n_routed_experts$", n) for n in names)


def without_implementation() -> dict[str, Any]:
    """The experts classes that no experts implementation computes: empty modules of them."""
    found = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        code = file.read_text()
        module: Any = None
        for name in re.findall(r"^class (\w+Experts)\(", code, re.MULTILINE):
            if "Shared" in name or re.search(rf"@use_experts_imp.*\nclass {name}\(", code):
                continue
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            cls = getattr(module, name)
            found[name] = cls.__new__(cls)
            nn.Module.__init__(found[name])
    return found


def test_the_table_is_what_transformers_has() -> None:
    text = PAGE.read_text()
    if f"transformers {transformers.__version__.rpartition('.')[0]}" not in text:
        pytest.skip(f"the page is about another transformers than {transformers.__version__}")
    assert re.findall(r"^\| `.*$", text, re.MULTILINE) == list(rows())


def test_pages_count_what_runs() -> None:
    """Beside the classes that they name."""
    run = len(re.findall(r"^\| `.*\| yes \| .* \|$", PAGE.read_text(), re.MULTILINE))
    root = PAGE.parents[2]
    assert f"[{run - 3} more classes]" in (root / "README.md").read_text()
    assert f"[{run - 8} more classes]" in (root / "docs/how-to/hugging-face.md").read_text()


if __name__ == "__main__":
    print("| model type | experts class | FP8 | with |", "|---|---|---|---|", *rows(), sep="\n")
