"""The experts of a Hugging Face model, read from its config.json alone: nothing is downloaded.

transformers builds the model on the meta device, and `integrations.transformers.check` says which
of its experts run in FP8. So sizes are those of the parameters, whatever a config calls them.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn


class Sizes(NamedTuple):
    """One layer's experts, and how many layers of the model have such."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    layers: int = 1
    kind: str = "these sizes"
    note: str = ""


def of_config(path: Path) -> Sizes:
    """The sizes in a config.json, or in that of a folder. ValueError with the reason where its
    experts cannot run in FP8; of several kinds of layers the most frequent counts."""
    path = path / "config.json" if path.is_dir() else path
    given = json.loads(path.read_text())
    quantized = given.pop("quantization_config", None) is not None
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        raise ValueError(
            "[layer] a config.json needs transformers: pip install '.[transformers]', or give "
            "--sizes"
        ) from None
    model_type = given.get("model_type")
    if model_type in CONFIG_MAPPING:
        sizes = _of_modules(_built(given, CONFIG_MAPPING[model_type]), model_type)
    else:
        sizes = _by_names(given)
    if quantized:
        note = "Its checkpoint is quantized: refused unless transformers dequantizes it."
        sizes = sizes._replace(note=f"{sizes.note} {note}".strip())
    return sizes


def _built(given: dict[str, Any], config_class: Any) -> nn.Module:
    """The model on the meta device: of the config's architecture, or what AutoModel makes."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    names = [name for name in given.get("architectures") or [] if hasattr(transformers, name)]
    of: Any = getattr(transformers, names[0]) if names else transformers.AutoModel.from_config
    try:
        config = config_class.from_dict(given)
        with torch.device("meta"):
            made: nn.Module = of(config)
    except Exception as error:
        raise ValueError(
            f"[layer] transformers must build the whole model of config.json; got "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}: give --sizes"
        ) from error
    return made


def _of_modules(model: nn.Module, model_type: str) -> Sizes:
    from fp8moe_cutlass.activation import SWIGLU
    from fp8moe_cutlass.integrations import transformers as fp8moe
    from fp8moe_cutlass.integrations.transformers_activation import activation_of
    from fp8moe_cutlass.integrations.transformers_check import biases_of, weights_of

    refused, runs = {}, Counter[tuple[int, ...]]()
    others_than_swiglu, biased = set(), False
    for found in fp8moe.check(model):
        if found.reason is not None:
            refused[found.kind] = found.reason
            continue
        module: Any = model.get_submodule(found.name)
        of, hidden, intermediate = weights_of(module)[1].shape
        activation = activation_of(module)
        if activation != SWIGLU:
            others_than_swiglu.add(str(activation))
        biased |= bool(biases_of(module))
        runs[of, hidden, intermediate, _top_k(module.config)] += 1
    reasons = "; ".join(f"{kind}: {reason}" for kind, reason in refused.items())
    if not runs:
        raise ValueError(
            f"[layer] experts of {model_type} cannot run in FP8: {reasons}"
            if refused
            else f"[layer] config must be of a model with experts; got {model_type}"
        )
    [(sizes, layers), *others] = runs.most_common()
    notes = [f"Not in FP8: {reasons}."] if refused else []
    notes += [f"Not timed: {n} layers of E, H, I, k = {s}." for s, n in others]
    notes += [f"Timed with SwiGLU in the place of {a}." for a in sorted(others_than_swiglu)]
    notes += ["Timed without their biases."] if biased else []
    experts, hidden, intermediate, top_k = sizes
    return Sizes(experts, hidden, intermediate, top_k, layers, model_type, " ".join(notes))


def _top_k(config: Any) -> int:
    for name in ("num_experts_per_tok", "top_k_experts"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    raise ValueError("[layer] config must have num_experts_per_tok; got none: give --sizes")


def _by_names(given: dict[str, Any]) -> Sizes:
    """Of a model type that nn.Router knows and transformers does not, such as kimi_k2."""
    from fp8moe_cutlass.nn.published import routing_of

    config = SimpleNamespace(**given)
    try:
        hidden, experts, top_k, _ = routing_of(config)
        layers = config.num_hidden_layers - getattr(config, "first_k_dense_replace", 0)
        intermediate = config.moe_intermediate_size
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"[layer] config must be of a model type that transformers or nn.Router knows; got "
            f"{given.get('model_type')!r} ({error}): give --sizes"
        ) from error
    note = "Its class is not in transformers: `check(model)` says whether it can run."
    return Sizes(experts, hidden, intermediate, top_k, layers, config.model_type, note)
