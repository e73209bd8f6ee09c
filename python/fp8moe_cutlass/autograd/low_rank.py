"""Low-rank terms (LoRA) of the expert block in FP8: a further K-block of its GEMMs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd.body import Lora, Need
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor

GATE_UP, DOWN = 0, 2  # the first of a projection's two factors in a Lora
LORA_TENSORS = 8  # of LoraSaved.tensors()


class LoraSaved(NamedTuple):
    """What the backward of low-rank terms reads."""

    factors: tuple[Tensor, ...]  # of a Lora
    h: Fp8Tensor | None  # [R, I]
    u1: Tensor | None  # [R, r] bf16: scaling x A^T of gate_up
    u2: Tensor | None  # [R, r] bf16: scaling h A^T of down

    def tensors(self) -> list[Tensor | None]:
        h = (None, None) if self.h is None else (self.h.data, self.h.scale_inv)
        return [*self.factors, *h, self.u1, self.u2]

    @staticmethod
    def of(tensors: Sequence[Any], pow2: bool) -> LoraSaved:
        *factors, data, scale, u1, u2 = tensors
        h = None if data is None else Fp8Tensor(data, scale, "gemm", pow2, "e4m3", check=False)
        return LoraSaved(tuple(factors), h, u1, u2)


def saved_of(
    lora: Lora, need: Need, h: Fp8Tensor | None, u1: Tensor | None, u2: Tensor | None
) -> LoraSaved:
    """What a backward reads of `lora`: all but its factors is for their gradients."""
    return LoraSaved(lora.factors, *((h, u1, u2) if need.lora else (None, None, None)))


NONE: tuple[Any, dict[str, Any]] = (None, {})  # what Terms give where there are none


class Terms(NamedTuple):
    """The low-rank terms of a pass."""

    lora: Lora
    recipe: Fp8Recipe

    def forward(self, of: int, rows: Any, plan: RoutingPlan) -> tuple[Any, dict[str, Any]]:
        """u = scaling rows A^T of projection `of`, GATE_UP or DOWN, and the operands that add
        u B^T to grouped_gemm."""
        return self._pair(rows, plan, of, rank_first=True)

    def backward(self, of: int, rows: Any, plan: RoutingPlan) -> tuple[Any, dict[str, Any]]:
        """du = scaling rows B, and the operands that add du A."""
        return self._pair(rows, plan, of, rank_first=False)

    def _pair(
        self, rows: Fp8Tensor, plan: RoutingPlan, of: int, rank_first: bool
    ) -> tuple[Any, dict[str, Any]]:
        a, b = (t.detach().to(torch.bfloat16).contiguous() for t in self.lora.factors[of : of + 2])
        rule: Any = {"scale": self.recipe.scale, "eps": self.recipe.eps}
        how: Any = {"rank_first": rank_first, "scaling": self.lora.scaling}
        u, u_q = ops.lora_project(rows, a if rank_first else b, plan, **how, **rule)
        w2 = ops.quantize_lora(b if rank_first else a, rank_first=not rank_first, **rule)
        return u, {"a2": u_q, "w2": w2}

    def wgrad(self, of: int, u: Any, rows: Any, plan: RoutingPlan) -> Tensor:
        """The gradient of factor `of`, in its dtype: u^T rows, or transposed for a B."""
        dtype = self.lora.factors[of].dtype
        exact: Any = "bfloat16" if dtype == torch.bfloat16 else "float32"
        made: Tensor = ops.lora_wgrad(u, rows, plan, rank_first=of % 2 == 0, out_dtype=exact)
        return made.to(dtype)
