"""Other libraries' models and names over this one: transformers, Megatron-Core, torchtitan,
TransformerEngine, DeepEP.

No arithmetic lives here: argument conventions, and the bookkeeping they need, over ops and
autograd. docs/how-to/ says how.
"""

from fp8moe_cutlass.integrations import deepep, megatron, transformer_engine

__all__ = ["deepep", "megatron", "transformer_engine"]
