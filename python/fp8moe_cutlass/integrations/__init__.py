"""The operators under the names of other libraries: a call site changes its import.

No arithmetic lives here: argument conventions, and the bookkeeping they need, over ops and
autograd. docs/how-to/from-transformer-engine.md says what differs.
"""

from fp8moe_cutlass.integrations import deepep, megatron, transformer_engine

__all__ = ["deepep", "megatron", "transformer_engine"]
