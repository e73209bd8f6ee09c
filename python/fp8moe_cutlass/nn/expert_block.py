"""ExpertBlock: a forward of the experts over two parameters, whoever holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fp8moe_cutlass.activation import Activation
from fp8moe_cutlass.autograd import (
    Fp8Weights,
    Grouped,
    Local,
    Move,
    Need,
    Options,
    quantize_weights,
)
from fp8moe_cutlass.autograd.body import Biases
from fp8moe_cutlass.autograd.torch_op import Owner, give_key, run
from fp8moe_cutlass.autograd.weights import is_codes, of_codes
from fp8moe_cutlass.distributed import Exchange, GroupMove
from fp8moe_cutlass.distributed.shards import local, whole
from fp8moe_cutlass.nn._validate import check_inputs, check_int, check_mask, check_rows
from fp8moe_cutlass.nn.fsdp import GatheredExperts, gathered_weights
from fp8moe_cutlass.nn.lora import LayerLora, factors_of
from fp8moe_cutlass.ops._torch import compiling, in_backward
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.slow_path import slow_path


class ExpertBlock(Owner):
    """Runs experts over its parameters. An integration derives another one than MoEExperts, for
    parameters that a module of another library holds."""

    gate_up_proj: Any  # [E, 2I, H], a Parameter or computed; or a Parameter of FP8 codes. Of an
    # activation without a gate: up_proj, [E, I, H]
    down_proj: Any  # [E, H, I]
    gate_up_proj_scale_inv: Any  # of codes: [E, cdiv(2I, 128), cdiv(H, 128)]
    down_proj_scale_inv: Any  # of codes: [E, cdiv(H, 128), cdiv(I, 128)]
    _options: Options
    _move: Move
    _turned = False  # the two weights are held as [E, in, out]
    _reused: Any = None  # nn.reuse.Reused, inside reuse_fp8_weights
    _lora: LayerLora | None = None  # of add_lora
    lora_enabled = True

    @property
    def recipe(self) -> Fp8Recipe | None:
        recipe: Fp8Recipe | None = self._options.recipe
        return recipe

    @property
    def activation(self) -> Activation:
        return self._options.activation

    @property
    def preactivation(self) -> str:
        return self._options.preactivation

    @property
    def transposed_weights(self) -> str:
        return self._options.transposed_weights

    @property
    def delay_wgrad(self) -> bool:
        return self._delayed is not None

    def local_weights(self) -> tuple[Tensor, Tensor]:
        """gate_up_proj and down_proj as this rank holds and multiplies them: the parameters, or,
        after shard_experts, tensors whose gradients are theirs."""
        gate_up, down = self.gate_up_proj, self.down_proj
        if self._average is not None:
            gate_up, down = local(gate_up), local(down)
        return (gate_up.mT, down.mT) if self._turned else (gate_up, down)

    def local_biases(self) -> Biases | None:
        """The biases of both projections, as of local_weights; None: there are none."""
        if not self.has_bias:
            return None
        biases = self.own_biases()
        return biases if self._average is None else Biases(*map(local, biases))

    @property
    def _exchange(self) -> Exchange | None:
        return self._move.exchange if isinstance(self._move, GroupMove) else None

    def forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        no_expert: int = -1,
        max_assignments: int | None = None,
        weights: Fp8Weights | None = None,
    ) -> Tensor:
        """x [..., H] float, topk_idx [..., S] int32 or int64, topk_weights [..., S] float
        -> out [..., H] in x's dtype (under autocast: in the autocast dtype).

        no_expert: the id of a slot without an expert, besides -1, such as transformers'
        num_experts. Other ids out of range raise on the CPU; on a GPU they are dropped and counted.
        topk_idx may be a routing mask [..., E] bool, True where an expert takes a token, with
        topk_weights [..., E]: the same as ids in ascending order. It needs max_assignments, the
        most that it may hold; on a GPU those beyond are dropped. Not with a group.
        weights: the FP8 weights to multiply, such as `quantize_weights()` made; gradients are the
        parameters'. None: the parameters, quantized now, or, where they are FP8, as they lie.
        """
        held = self.local_weights()  # once: a look-up takes a microsecond
        gate_up = held[0]
        check_inputs(gate_up, x, topk_idx, topk_weights)
        if type(no_expert) is not int:
            check_int("MoEExperts", "no_expert", no_expert)
        masked = topk_idx.dtype == torch.bool
        if masked or max_assignments is not None:
            check_mask(gate_up, topk_idx, max_assignments, self._exchange is not None)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        shape = x.shape
        x, topk_idx, probs = _rows(x), _rows(topk_idx), _rows(topk_weights).float()
        if no_expert != -1 and not masked:
            topk_idx = topk_idx.masked_fill(topk_idx == no_expert, -1)
        move = self._move
        if masked:
            topk_idx, move = _ids(topk_idx), Local(topk_idx.shape[1], max_assignments)
        out = self.run(move, x, topk_idx, probs, weights, held=held)
        return in_shape(out, shape)

    def forward_rows(
        self,
        rows: Tensor,
        counts: Tensor | Sequence[int] | RoutingPlan,
        probs: Tensor | None = None,
        *,
        weights: Fp8Weights | None = None,
    ) -> Tensor:
        """The block over rows that came grouped by local expert: rows [R, H] float -> [R, H] in
        their dtype, in the same order, for callers that move tokens themselves. Nothing is moved
        and nothing is read by the host.

        counts: rows of each local expert [E], on the host or on the device; or a plan of
        ops.plan_from_counts, for experts whose rows begin at multiples of its align. Padding rows
        and rows past their sum influence nothing; what comes out there, and as their gradient, is
        unspecified. Counts in host memory are read before this returns.
        probs [R]: multiply the activation, before it is quantized, or what comes out, by the
        recipe's weighting. None: the caller weights.
        weights: as of forward.
        """
        held = self.local_weights()
        check_rows(held[0], rows, counts, probs)
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        probs = None if probs is None else probs.float().contiguous()
        rows = rows.contiguous()
        return self.run(Grouped(counts), rows, None, probs, weights, held=held)

    def run(
        self,
        move: Move,
        x: Tensor,
        topk_idx: Tensor | None,
        probs: Tensor | None,
        weights: Fp8Weights | None = None,
        need: Need | None = None,
        held: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """autograd.experts over these parameters, by any `move`. held: what local_weights() has
        given; None: it is called."""
        gate_up, down = held or self.local_weights()
        if self._turned:
            self._check_turned()
        weights = self._prepare(gate_up, down, weights)
        lora = None if self._lora is None else factors_of(self)
        biases = self.local_biases() if self.has_bias else None
        how = (self._options, move, weights, need, self, lora, biases)
        return run(x, topk_idx, probs, gate_up, down, *how)

    def quantize_weights(self) -> Fp8Weights:
        """The parameters in FP8, a value for forward's `weights=`. With what dgrad reads, unless
        under no_grad or with transposed_weights="recompute". Collective where they are sharded.
        Of FP8 weights: their codes as they lie, and what dgrad reads."""
        if self.recipe is None:
            raise ValueError("[quantize_weights] the layer must have an FP8 recipe; got None")
        transposed = self.transposed_weights == "save" and torch.is_grad_enabled()
        with torch.no_grad():
            gate_up, down = self.local_weights()
            if is_codes(gate_up):
                return self._codes(transposed)
            gate_up, down = whole(gate_up.detach()), whole(down.detach())
        gathered = gathered_weights(gate_up, down)
        if gathered is not None:  # fully_shard frees them: a value has its own
            return pytree.tree_map_only(Tensor, Tensor.clone, gathered)  # type: ignore[no-any-return]
        return quantize_weights(gate_up, down, self.recipe, transposed=transposed)

    def _prepare(
        self, gate_up: Tensor, down: Tensor, weights: Fp8Weights | None
    ) -> Fp8Weights | None:
        """The FP8 weights that a forward over these parameters multiplies; None: it quantizes
        them."""
        if self._delayed is not None and not compiling():
            self._check_delay(gate_up, down)
        codes = is_codes(gate_up)
        if codes:
            self._check_codes(gate_up, down)
        if weights is not None:
            if not isinstance(weights, Fp8Weights):
                raise ValueError(f"[MoEExperts] weights must be Fp8Weights; got {type(weights)}")
            weights.check(gate_up, down, self.recipe)
        elif self._reused is not None:
            weights = self._reused.weights_of(self)
        elif codes:
            weights = self._codes(False)
        elif GatheredExperts in (type(gate_up), type(down)):  # isinstance asks a metaclass
            weights = gathered_weights(gate_up, down)
        elif not compiling() and (own := self.gate_up_proj).is_leaf and own.grad is not None:
            _say_what_repeats(self.recipe)
        return weights

    def _codes(self, transposed: bool) -> Fp8Weights:
        gate_up, down = self.gate_up_proj, self.down_proj
        scales = self.gate_up_proj_scale_inv, self.down_proj_scale_inv
        return of_codes(gate_up, scales[0], down, scales[1], transposed=transposed)

    def _check_codes(self, gate_up: Tensor, down: Tensor) -> None:
        """FP8 weights are frozen, and are what they are: a sum with codes is none with values."""
        for name, w in (("gate_up_proj", gate_up), ("down_proj", down)):
            got = None
            if not isinstance(w, nn.Parameter):
                got = (
                    "a computed one (parametrize, functional_call, PEFT's target_parameters: see "
                    "integrations.transformers.get_peft_model)"
                )
            elif w.requires_grad and torch.is_grad_enabled():
                got = "one that requires a gradient, which codes cannot have: requires_grad_(False)"
            if got is not None:
                raise RuntimeError(
                    f"[MoEExperts] {name} holds FP8 codes and must be a frozen parameter; got {got}"
                )

    def backward_dw(self) -> None:
        """Run the weight gradients that `delay_wgrad` left behind, oldest first. One that raises
        is still pending, with those behind it."""
        delayed = self._delayed or []
        while delayed:
            wanted = delayed[0].to.weight
            if not any(wanted is w for w in self.local_weights()):
                raise RuntimeError(
                    "[MoEExperts] backward_dw() needs the parameters that forward saw; got others "
                    "(fully_shard, or a new Parameter), which would not see the gradients"
                )
            delayed[0].run()
            del delayed[0]  # and what it has saved

    def _check_turned(self) -> None:
        """What multiplies are views of the parameters, which have neither."""
        own = self.gate_up_proj, self.down_proj
        if self.delay_wgrad or any(getattr(w, "main_grad", None) is not None for w in own):
            raise ValueError(
                "[MoEExperts] weights [E, in, out] must have their gradient in .grad, at once;"
                f" got {'delay_wgrad=True' if self.delay_wgrad else 'main_grad'}"
            )

    def _check_delay(self, gate_up: Tensor, down: Tensor) -> None:
        if not (gate_up.is_leaf and down.is_leaf):
            raise RuntimeError(
                "[MoEExperts] delay_wgrad must be False where weights are computed (parametrize, "
                "functional_call): backward_dw() has no way back to what they are made of; got True"
            )
        # A checkpointed forward runs again inside a backward: there others may be pending.
        if torch.is_grad_enabled() and not in_backward():
            self._check_nothing_pending("the next training forward")

    def _check_nothing_pending(self, before: str) -> None:
        if self._delayed:
            raise RuntimeError(
                f"[MoEExperts] backward_dw() must run before {before}; "
                f"got {len(self._delayed)} weight gradients that still wait for it"
            )

    def __getstate__(self) -> dict[str, Any]:
        self._check_nothing_pending("a copy of the layer")
        own: Any = {"_delayed": None if self._delayed is None else []}
        state = super().__getstate__()  # type: ignore[misc]  # a module's, without what compile() made
        return {**state, **own, "_reused": None, "_counters": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        give_key(self)


Finder = Callable[[nn.Module], ExpertBlock | None]
finders: list[Finder] = []  # of integrations: the block that a module of another library runs


def blocks_of(module: nn.Module) -> dict[str, Any]:
    """Every ExpertBlock of `module` by its name in it."""
    found: dict[str, Any] = {}
    for name, m in module.named_modules():
        for find in (_itself, *finders):
            block = find(m)
            if block is not None:
                found[name] = block
                break
    return found


def _itself(module: nn.Module) -> ExpertBlock | None:
    return module if isinstance(module, ExpertBlock) else None


def _say_what_repeats(recipe: Fp8Recipe | None) -> None:
    """Warns a forward that accumulates: its weights have a gradient."""
    if recipe is not None and torch.is_grad_enabled() and not in_backward():
        slow_path(
            "weights quantized in every forward",
            "[MoEExperts] several forwards before an optimizer step quantize the same weights; "
            "run them `with fp8moe_cutlass.nn.reuse_fp8_weights(model):` to quantize once",
        )


def _rows(t: Tensor) -> Tensor:
    """t [..., C] as dense rows [N, C]: no view, which autograd would record, where it is one."""
    return (t if t.ndim == 2 else t.reshape(-1, t.shape[-1])).contiguous()


def in_shape(out: Tensor, shape: Sequence[int]) -> Tensor:
    """out [T, H], which nobody else holds, as [..., H]: no view to autograd, as of nn.Linear.
    fully_shard warns of views, on which an in-place operation would drop its hooks."""
    return out if len(shape) == 2 else torch.ops.aten._unsafe_view(out, shape)


def _ids(mask: Tensor) -> Tensor:
    """A routing mask [T, E] as ids [T, E] in ascending order, -1 where it is False."""
    ids = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)
    return torch.where(mask, ids, -1)
