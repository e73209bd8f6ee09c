"""Expert parallelism over torch.distributed: tokens travel to their experts in FP8, and back.

`nn.MoEExperts(..., group=)` is what uses this; docs/how-to/several-gpus.md shows how,
docs/explanation/expert-parallelism.md what travels and what it costs.
"""

from fp8moe_cutlass.distributed.exchange import Exchange, Shared
from fp8moe_cutlass.distributed.move import GroupMove

__all__ = ["Exchange", "GroupMove", "Shared"]
