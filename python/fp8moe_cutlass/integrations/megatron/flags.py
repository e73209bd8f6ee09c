"""Which of Megatron's options FP8 experts honour, and which they refuse by name.

docs/how-to/megatron-core.md has the list for users. What stands in neither place is the router's,
the dispatcher's or the rest of the model's, and works as it does there.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.utils import get_pg_size

from fp8moe_cutlass.activation import Activation

_OFFLOADED = {"expert_fc1", "moe_act", "fused_group_mlp"}
_CAPTURED = {"moe", "moe_router", "moe_preprocess"}


def check(config: Any, pg_collection: Any, name: str | None, *, layer: bool) -> None:
    """NotImplementedError that names every option of a TransformerConfig which FP8 experts cannot
    honour. name: of the experts module. layer: the whole layer is of this library."""
    refused = _of_experts(config, pg_collection, name)
    if layer:
        refused |= _of_layer(config)
    found = [option for option, wrong in refused.items() if wrong]
    if found:
        what = "MoELayer" if layer else "Experts"
        raise NotImplementedError(f"[megatron.{what}] cannot honour: {'; '.join(found)}")


def _of_experts(c: Any, groups: Any, name: str | None) -> dict[str, bool]:
    gated = c.gated_linear_unit
    offloaded = c.fine_grained_activation_offloading and {*(c.offload_modules or ())} & _OFFLOADED
    return {
        f"activation_func={_named(c.activation_func)} with gated_linear_unit={bool(gated)}": (
            c.activation_func not in ((F.silu, quick_gelu) if gated else (squared_relu,))
        ),
        f"activation_func_clamp_value={c.activation_func_clamp_value} without quick_gelu": (
            c.activation_func_clamp_value is not None and c.activation_func is not quick_gelu
        ),
        f"moe_mlp_glu_interleave_size={c.moe_mlp_glu_interleave_size}": (
            c.moe_mlp_glu_interleave_size is not None
        ),
        "use_te_activation_func": c.use_te_activation_func,
        "expert_tensor_parallel_size over 1": get_pg_size(groups.expt_tp) > 1
        or (c.expert_tensor_parallel_size or 1) > 1,
        "gtp_weight_remat_size over 1": c.gtp_weight_remat_size > 1,
        "expert_gtp_weight_remat_size over 1": c.expert_gtp_weight_remat_size > 1,
        "fp8_param": c.fp8_param,
        "fp4": c.fp4 is not None,
        "first_last_layers_bf16": c.first_last_layers_bf16,
        "quant_recipe, which has an entry for these experts": any(
            get_quant_config_or_none(f"{name}.{linear}", c.quant_recipe) is not None
            for linear in ("linear_fc1", "linear_fc2")
        ),
        "moe_single_grouped_weight": c.moe_single_grouped_weight,
        "moe_single_grouped_bias": c.moe_single_grouped_bias,
        "use_transformer_engine_op_fuser": c.use_transformer_engine_op_fuser,
        f"offload_modules with {', '.join(sorted(offloaded or ()))}": bool(offloaded),
        "moe_paged_stash": c.moe_paged_stash,
        "moe_ncclep_zero_copy": c.moe_ncclep_zero_copy,
        'transformer_impl="inference_optimized"': c.transformer_impl == "inference_optimized",
    }


def activation_of(c: Any) -> Activation:
    """The activation of a TransformerConfig that check has passed. Megatron clamps quick_gelu's
    gate and up alone, as its fused kernels do."""
    if not c.gated_linear_unit:
        return Activation("relu2")
    limit = c.activation_func_clamp_value
    alpha = 1.702 if c.activation_func is quick_gelu else 1.0
    return Activation(alpha=alpha, offset=c.glu_linear_offset, limit=limit)


def _of_layer(c: Any) -> dict[str, bool]:
    captured = c.cuda_graph_impl != "none" and (
        not c.cuda_graph_modules or _CAPTURED & {m.name for m in c.cuda_graph_modules}
    )
    return {
        f"moe_token_dispatcher_type={c.moe_token_dispatcher_type!r}, other than 'alltoall'": (
            c.moe_token_dispatcher_type != "alltoall"
        ),
        "overlap_moe_expert_parallel_comm": c.overlap_moe_expert_parallel_comm,
        "overlap_dispatch_backward_with_experts_wgrad": (
            c.overlap_dispatch_backward_with_experts_wgrad
        ),
        f"cuda_graph_impl={c.cuda_graph_impl!r} of the MoE layer": bool(captured),
        f"moe_latent_size={c.moe_latent_size}": c.moe_latent_size is not None,
        "moe_apply_probs_on_input": c.moe_apply_probs_on_input,
        "tensor_model_parallel_size over 1 without sequence_parallel": (
            c.tensor_model_parallel_size > 1 and not c.sequence_parallel
        ),
    }


def _named(function: Any) -> str:
    return getattr(function, "__name__", repr(function))
