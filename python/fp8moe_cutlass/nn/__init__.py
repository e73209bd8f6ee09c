"""Modules: MoEExperts (the experts), Router (by a RoutingRule, with LossCoefficients) and MoE
(both, and a shared expert); z_loss; reuse_fp8_weights; shard_experts and clip_grad_norm_."""

from fp8moe_cutlass.nn.clip import clip_grad_norm_
from fp8moe_cutlass.nn.experts import MoEExperts
from fp8moe_cutlass.nn.losses import LossCoefficients, Routing, z_loss
from fp8moe_cutlass.nn.moe import MoE, SharedExpert
from fp8moe_cutlass.nn.reuse import reuse_fp8_weights
from fp8moe_cutlass.nn.router import Router
from fp8moe_cutlass.nn.rule import RoutingRule
from fp8moe_cutlass.nn.shard import shard_experts
from fp8moe_cutlass.ops._call import loadable

loadable(LossCoefficients, Routing, RoutingRule)

__all__ = [
    "LossCoefficients",
    "MoE",
    "MoEExperts",
    "Router",
    "Routing",
    "RoutingRule",
    "SharedExpert",
    "clip_grad_norm_",
    "reuse_fp8_weights",
    "shard_experts",
    "z_loss",
]
