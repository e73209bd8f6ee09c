"""Differentiable blocks: what is saved, what is computed again, where weight gradients go.

None has a second derivative, and each raises where one is asked for.
"""

from fp8moe_cutlass.autograd.block import Grouped, Local, Move, experts, grouped_plan
from fp8moe_cutlass.autograd.body import Need, Options
from fp8moe_cutlass.autograd.counters import Counters
from fp8moe_cutlass.autograd.gate import gate_logits
from fp8moe_cutlass.autograd.movement import permute_pad, unpermute_unpad
from fp8moe_cutlass.autograd.router_topk import router_topk
from fp8moe_cutlass.autograd.weight_grad import weight_grads
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
    "gate_logits",
    "grouped_plan",
    "permute_pad",
    "quantize_weights",
    "router_topk",
    "unpermute_unpad",
    "weight_grads",
]
