"""Modules: MoEExperts (the experts) and MoE (router, experts, shared expert); reuse_fp8_weights."""

from fp8moe_cutlass.nn.experts import MoEExperts
from fp8moe_cutlass.nn.moe import MoE, SharedExpert
from fp8moe_cutlass.nn.reuse import reuse_fp8_weights
from fp8moe_cutlass.nn.router import Router, Routing

__all__ = ["MoE", "MoEExperts", "Router", "Routing", "SharedExpert", "reuse_fp8_weights"]
