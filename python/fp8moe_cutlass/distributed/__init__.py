"""Expert parallelism over torch.distributed: tokens travel to their experts in FP8, and back.

`nn.MoEExperts(..., group=)` is what uses this; docs/how-to/several-gpus.md shows how,
docs/explanation/expert-parallelism.md what travels and what it costs.
"""

from fp8moe_cutlass.distributed.bf16 import Bf16Block
from fp8moe_cutlass.distributed.exchange import Exchange, Shared, make_exchange
from fp8moe_cutlass.distributed.experts import Block, dispatched_experts
from fp8moe_cutlass.distributed.fp8 import Fp8Block

__all__ = [
    "Bf16Block",
    "Block",
    "Exchange",
    "Fp8Block",
    "Shared",
    "dispatched_experts",
    "make_exchange",
]
