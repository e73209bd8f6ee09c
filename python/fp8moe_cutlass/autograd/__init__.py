"""Differentiable blocks: what is saved, what is computed again, where weight gradients go.

None has a second derivative, and each raises where one is asked for.
"""

from fp8moe_cutlass.autograd.bf16 import Groups, group
from fp8moe_cutlass.autograd.experts import bf16_experts, fp8_experts
from fp8moe_cutlass.autograd.fp8 import Observer
from fp8moe_cutlass.autograd.gate import gate_logits
from fp8moe_cutlass.autograd.movement import permute_pad, unpermute_unpad
from fp8moe_cutlass.autograd.weight_grad import weight_grads
from fp8moe_cutlass.autograd.weights import Fp8Weights, quantize_weights

__all__ = [
    "Fp8Weights",
    "Groups",
    "Observer",
    "bf16_experts",
    "fp8_experts",
    "gate_logits",
    "group",
    "permute_pad",
    "quantize_weights",
    "unpermute_unpad",
    "weight_grads",
]
