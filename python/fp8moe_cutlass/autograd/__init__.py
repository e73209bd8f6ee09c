"""Differentiable blocks: what is saved, what is computed again, where weight gradients go.

None has a second derivative, and each raises where one is asked for.
"""

from fp8moe_cutlass.autograd import operator  # noqa: F401  (registers it)
from fp8moe_cutlass.autograd.block import Grouped, Local, Move
from fp8moe_cutlass.autograd.body import Counters, Need, Options
from fp8moe_cutlass.autograd.movement import permute_pad, unpermute_unpad
from fp8moe_cutlass.autograd.router_logits import router_logits
from fp8moe_cutlass.autograd.router_topk import router_topk
from fp8moe_cutlass.autograd.torch_op import experts
from fp8moe_cutlass.autograd.weights import Fp8Weights, quantize_weights

__all__ = [
    "Counters",
    "Fp8Weights",
    "Grouped",
    "Local",
    "Move",
    "Need",
    "Options",
    "experts",
    "permute_pad",
    "quantize_weights",
    "router_logits",
    "router_topk",
    "unpermute_unpad",
]
