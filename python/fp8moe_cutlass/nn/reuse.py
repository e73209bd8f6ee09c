"""reuse_fp8_weights: FP8 weights quantized once for a scope."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fp8moe_cutlass.autograd import Fp8Weights
from fp8moe_cutlass.autograd.streams import capturing, tensors_of
from fp8moe_cutlass.autograd.weights import is_codes
from fp8moe_cutlass.distributed.shards import held, is_sharded
from fp8moe_cutlass.nn._validate import check_bool
from fp8moe_cutlass.nn.expert_block import ExpertBlock, blocks_of
from fp8moe_cutlass.nn.fp8_checkpoint import NAMES
from fp8moe_cutlass.ops._torch import compiling


class Reused:
    """The FP8 weights of a layer in a scope, and what its parameters were when they were made."""

    def __init__(self, name: str, layer: ExpertBlock, check: bool) -> None:
        self.name, self.check = name, check
        self.weights: Fp8Weights | None = layer.quantize_weights()
        self.captured = capturing(layer.down_proj.device)
        # An alias has its parameter's version counter, and keeps the address from being given away.
        self.seen = [(p, held(p).detach(), _version(p)) for p in _parameters(layer)]

    def weights_of(self, layer: ExpertBlock) -> Fp8Weights | None:
        """Gives a forward these weights, after `compare`. From the first forward over computed
        weights on it gives None: to compute and to remove them may write to the parameters."""
        if _computed(layer):
            self.weights = None
        if self.weights is not None:
            self._refuse_capture(layer)
            self.compare(layer)
        return self.weights

    def _refuse_capture(self, layer: ExpertBlock) -> None:
        """A CUDA graph would read these after the scope has freed them; and what a capture has
        made holds no values before its replay."""
        if compiling() or capturing(layer.down_proj.device) == self.captured:
            return
        raise RuntimeError(
            "[reuse_fp8_weights] the scope and its forwards must be in one capture of a CUDA "
            "graph, or none of them: capture with weights=layer.quantize_weights(), and keep the "
            f"value as long as the graph; got {self.name or type(layer).__name__}"
        )

    def compare(self, layer: ExpertBlock) -> None:
        """RuntimeError if a parameter is not what it was."""
        for name, now, (then, alias, version) in zip(
            NAMES, _parameters(layer), self.seen, strict=False
        ):
            if now is not then:
                changed = "is another tensor"
            elif compiling():  # which sees neither addresses nor versions
                continue
            elif held(now).data_ptr() != alias.data_ptr():
                changed = "is at another address"
            elif _version(now) != version:
                changed = "has been written"
            else:
                continue
            self._raise(name, changed)
        if self.check and not compiling():
            self._compare_codes(layer)

    def _compare_codes(self, layer: ExpertBlock) -> None:
        both = self.weights, layer.quantize_weights()
        if self.weights is not None:
            self.weights.wait()  # the scope may have begun on another stream
        for name in ("gate_up", "down"):
            pair = [tensors_of((getattr(w, name), getattr(w, f"{name}_t"))) for w in both]
            if not all(_same(a, b) for a, b in zip(*pair, strict=False)):  # one may lack its _t
                self._raise(f"{name}_proj", "quantizes to other codes")

    def _raise(self, parameter: str, changed: str) -> None:
        where = f"{self.name}.{parameter}" if self.name else parameter
        raise RuntimeError(
            "[reuse_fp8_weights] parameters must stay as they are inside; leave it before the "
            f"optimizer's step; got {where}, which {changed}"
        )


@contextmanager
def reuse_fp8_weights(module: nn.Module, *, check: bool = False) -> Iterator[None]:
    """Every FP8 MoEExperts of `module` quantizes its weights here, and its forwards inside reuse
    them: for gradient accumulation, evaluation, generation.

        with reuse_fp8_weights(model):
            for batch in microbatches:
                loss(model(batch)).backward()
        optimizer.step()

    Under no_grad only the codes that a forward reads are written, for inference alone. A parameter
    that is replaced, moved or written in place raises RuntimeError by its name, in the next eager
    forward or at the end. Writes that do not raise a tensor's version are not noticed (a fused
    optimizer, one of DTensors, a write through `.data` or by another process), except with `check`,
    which quantizes again in every eager forward and at the end, and compares all codes. Under
    fully_shard, which gathers the weights for each forward anyway, it is refused. Computed weights
    (parametrize, functional_call) are quantized in every forward, as outside, and so are all that
    PEFT's target_parameters adapt, merged or not. A forward is captured in a CUDA graph only where
    the graph has the whole scope.
    """
    check_bool("reuse_fp8_weights", "check", check)
    named = blocks_of(module) if isinstance(module, nn.Module) else {}
    if not named:
        raise ValueError(
            f"[reuse_fp8_weights] module must contain a MoEExperts; got {type(module).__name__}"
        )
    layers = [
        (n, m)
        for n, m in named.items()
        if m.recipe is not None and not _computed(m) and not _is_adapted(n)
    ]
    for name, layer in layers:
        _refuse(name, layer)
    try:
        for name, layer in layers:
            layer._reused = Reused(name, layer, check)
        yield
        for _, layer in layers:
            if layer._reused is not None:
                layer._reused.weights_of(layer)
    finally:
        for _, layer in layers:
            layer._reused = None


def _refuse(name: str, layer: ExpertBlock) -> None:
    got = None
    if layer._reused is not None:
        got = "one that is inside already: leave that scope first"
    elif layer._average is None and any(is_sharded(p) for p in _parameters(layer)):
        got = "a DTensor (fully_shard)"
    if got is not None:
        raise RuntimeError(
            "[reuse_fp8_weights] a layer must hold whole parameters and be in one scope at a "
            f"time; got {got}, in {name or type(layer).__name__}"
        )


def _is_adapted(name: str) -> bool:
    """Whether PEFT has the layer, by the name in its wrapper: it merges by writes to `.data`."""
    return name.rpartition(".")[2] == "base_layer"


def _computed(layer: ExpertBlock) -> bool:
    return not all(isinstance(p, nn.Parameter) for p in _parameters(layer))


def _parameters(layer: ExpertBlock) -> tuple[Tensor, ...]:
    """The parameters of NAMES; scales only of FP8 weights."""
    gate_up, down = layer.gate_up_proj, layer.down_proj
    if not is_codes(gate_up):
        return gate_up, down
    return gate_up, down, layer.gate_up_proj_scale_inv, layer.down_proj_scale_inv


def _version(p: Tensor) -> int | None:
    return None if p.is_inference() else p._version


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
