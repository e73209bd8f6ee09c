"""The operators, over torch tensors, NumPy arrays or, with out=, any DLPack producer.

They run on the device of their arguments, allocate what `out=` does not give, and build no autograd
graph: an argument that requires grad is refused while grad mode is on. A wrong shape, dtype,
stride, device or word is a ValueError, and nothing is written then. docs/reference/numerics.md says
what each guarantees bit by bit.
"""

from fp8moe_cutlass.ops._call import loadable
from fp8moe_cutlass.ops._outputs import zero_workspace
from fp8moe_cutlass.ops.activation import (
    ActGradients,
    ActQuantized,
    act_quantize,
    act_quantize_backward,
)
from fp8moe_cutlass.ops.exchange import (
    Dispatch,
    Unpacked,
    copy_rows,
    dispatch_plan,
    packed_row_bytes,
    quantize_pack,
    share_words,
    unpack,
)
from fp8moe_cutlass.ops.gemm import grouped_gemm, grouped_gemm_wgrad
from fp8moe_cutlass.ops.lora import Projected, lora_project, lora_wgrad, quantize_lora
from fp8moe_cutlass.ops.permute import (
    Permuted,
    PermuteGradients,
    UnpermuteGradients,
    permute_pad,
    permute_pad_backward,
    unpermute_unpad,
    unpermute_unpad_backward,
)
from fp8moe_cutlass.ops.quantize import (
    QuantizedWeight,
    count_codes,
    dequantize,
    quantize,
    quantize_weight,
    turn_weight,
)
from fp8moe_cutlass.ops.route import plan_from_counts, plan_from_row_id_map, route
from fp8moe_cutlass.ops.router import RouterTopk, router_topk, router_topk_backward
from fp8moe_cutlass.ops.transpose import permute_transpose_fp8, transpose_fp8
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.routing import RoutingPlan
from fp8moe_cutlass.tensor import Fp8Tensor

loadable(Fp8Recipe, Fp8Tensor, RoutingPlan, ActGradients, ActQuantized, Dispatch, Permuted)
loadable(PermuteGradients, Projected, QuantizedWeight, RouterTopk, Unpacked, UnpermuteGradients)

__all__ = [
    "ActGradients",
    "ActQuantized",
    "Dispatch",
    "PermuteGradients",
    "Permuted",
    "Projected",
    "QuantizedWeight",
    "RouterTopk",
    "Unpacked",
    "UnpermuteGradients",
    "act_quantize",
    "act_quantize_backward",
    "copy_rows",
    "count_codes",
    "dequantize",
    "dispatch_plan",
    "grouped_gemm",
    "grouped_gemm_wgrad",
    "lora_project",
    "lora_wgrad",
    "packed_row_bytes",
    "permute_pad",
    "permute_pad_backward",
    "permute_transpose_fp8",
    "plan_from_counts",
    "plan_from_row_id_map",
    "quantize",
    "quantize_lora",
    "quantize_pack",
    "quantize_weight",
    "route",
    "router_topk",
    "router_topk_backward",
    "share_words",
    "transpose_fp8",
    "turn_weight",
    "unpack",
    "unpermute_unpad",
    "unpermute_unpad_backward",
    "zero_workspace",
]
