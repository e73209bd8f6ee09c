"""The experts of a rank in FP8: rows travel quantized and go from the wire into the GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd import fp8
from fp8moe_cutlass.autograd.ctx_io import Saved
from fp8moe_cutlass.autograd.dense import dense
from fp8moe_cutlass.autograd.experts import quantize
from fp8moe_cutlass.autograd.weight_grad import Gradients
from fp8moe_cutlass.autograd.weights import Fp8Weights
from fp8moe_cutlass.distributed.exchange import Exchange, Sizes
from fp8moe_cutlass.distributed.rank_agreement import Terms
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor


@dataclass(frozen=True)
class Fp8Block:
    """fp8.forward and fp8.backward between two exchanges: a Block (experts.py)."""

    gate_up: Tensor  # [E / ranks, 2I, H], the parameter
    down: Tensor  # [E / ranks, H, I], the parameter
    recipe: Fp8Recipe
    weights: Fp8Weights | None = None  # of this rank's experts; None: not yet quantized
    keep: str = "none"
    transposed_weights: str = "save"
    observe: fp8.Observer | None = None
    kept: fp8.Kept | None = None

    @property
    def parameters(self) -> tuple[Tensor, Tensor]:
        return self.gate_up, self.down

    def ready(self, terms: Terms, trained: bool) -> Fp8Block:
        kept = None
        if trained:
            codes = self.transposed_weights == "save"
            kept = fp8.Kept(self.keep, codes, terms.x_grad, self.gate_up.requires_grad)
        weights, kept = fp8.weights_for(*self.parameters, self.weights, self.recipe, kept)
        observe = self.observe if trained else None
        return replace(self, weights=weights, kept=kept, observe=observe)

    def spent(self) -> Fp8Block:
        return replace(self, weights=None)

    def plan(self, topk_idx: Tensor, exchange: Exchange) -> tuple[RoutingPlan, Tensor]:
        plan, counts = ops.dispatch_plan(
            topk_idx, exchange.num_experts, exchange.ranks, segment=exchange.segment
        )
        return plan, counts

    def pack(
        self,
        x: Tensor,
        probs: Tensor,
        topk_idx: Tensor,
        plan: RoutingPlan,
        exchange: Exchange,
        sizes: Callable[[], Sizes],
    ) -> Tensor:
        # Into as many rows as there can be: the sizes are on their way meanwhile.
        if self.observe is not None:
            self.observe("x", quantize(x, self.recipe), plan, x)
        return self._pack(x, plan, "e4m3", topk_idx, probs, num_experts=exchange.num_experts)

    def forward(
        self, rows: Tensor, slots: int, plan: RoutingPlan, exchange: Exchange, sizes: Sizes
    ) -> tuple[Tensor, tuple[Saved, ...]]:
        weights, kept = self.weights, self.kept
        assert weights is not None
        x, topk_idx, probs = self._unpack(rows, self.down.shape[1], slots, "e4m3")
        local = ops.route(
            len(exchange.local_experts), topk_idx=topk_idx, capacity=sizes.assignments
        )
        exchange.count(plan.status[:2], local.status[:1])
        keep = "none" if kept is None else kept.z
        out, acts = fp8.forward(
            x, probs, local, weights, self.recipe, keep=keep, observe=self.observe
        )
        if kept is None:
            return out, ()
        return out, fp8.to_save(acts, local, weights, *self.parameters, kept)

    def pack_gradient(self, dout: Tensor, plan: RoutingPlan, sizes: Sizes) -> Tensor:
        if self.observe is not None:
            self.observe("dout", quantize(dout, self.recipe, self.recipe.grad_dtype), plan, dout)
        return self._pack(dout, plan, self.recipe.grad_dtype)

    def backward(
        self,
        rows: Tensor,
        saved: list[Any],
        **need: bool,
    ) -> Gradients:
        kept, local, weights = fp8.from_saved(saved)
        dout, _, _ = self._unpack(rows, self.down.shape[1], 0, self.recipe.grad_dtype)
        return fp8.backward(
            dout,
            kept,
            local,
            weights,
            self.recipe,
            observe=self.observe,
            **need,
        )

    def combine(self, rows: Tensor, plan: RoutingPlan) -> Tensor:
        out: Tensor = ops.unpermute_unpad(rows, plan)
        return out

    def _pack(
        self, t: Tensor, plan: RoutingPlan, fp8_dtype: str, *ids: Tensor, **of: int
    ) -> Tensor:
        packed: Tensor = ops.quantize_pack(
            dense(t),
            plan,
            *ids,
            fp8_dtype=fp8_dtype,
            scale=self.recipe.scale,
            eps=self.recipe.eps,
            **of,
        )
        return packed

    def _unpack(
        self, rows: Tensor, hidden: int, slots: int, fp8_dtype: str
    ) -> tuple[Fp8Tensor, Any, Any]:
        pow2 = self.recipe.scale == "pow2"
        return ops.unpack(rows, hidden, slots, fp8_dtype=fp8_dtype, pow2=pow2)
