from typing import Any

import fp8moe_cutlass.activation
import fp8moe_cutlass.routing
import fp8moe_cutlass.tensor
import fp8moe_cutlass.typing


class DeviceUnavailable(RuntimeError):
    """
    CUDA arrays were given, but the build has no CUDA backend or the machine no usable driver or GPU.
    """

class UnsupportedDevice(RuntimeError):
    """
    The GPU is not of compute capability 9.0, the one the kernels are built for.
    """

class CudaError(RuntimeError):
    """A CUDA call failed; the message names it and CUDA's own reason."""

def quantize(x: fp8moe_cutlass.typing.DLPackArray, q: fp8moe_cutlass.tensor.Fp8Tensor | str | tuple[str, Any], scale: str, eps: float, /) -> Any: ...

def quantize_weight(w: fp8moe_cutlass.typing.DLPackArray, below: fp8moe_cutlass.typing.DLPackArray | None, q: fp8moe_cutlass.tensor.Fp8Tensor | str | tuple[str, Any] | None, q_t: fp8moe_cutlass.tensor.Fp8Tensor | str | tuple[str, Any] | None, scale: str, eps: float, /) -> Any: ...

def turn_weight(q: fp8moe_cutlass.tensor.Fp8Tensor, q_t: fp8moe_cutlass.tensor.Fp8Tensor | str | tuple[str, Any], /) -> Any: ...

def dequantize(q: fp8moe_cutlass.tensor.Fp8Tensor, x: fp8moe_cutlass.typing.DLPackArray | bool | str, /) -> Any: ...

def route(topk_idx: fp8moe_cutlass.typing.DLPackArray | None, routing_map: fp8moe_cutlass.typing.DLPackArray | None, plan: fp8moe_cutlass.routing.RoutingPlan | tuple[int, int, int, int, int], workspace: fp8moe_cutlass.typing.DLPackArray | None, /) -> Any: ...

def plan_from_counts(tokens_per_expert: fp8moe_cutlass.typing.DLPackArray, plan: fp8moe_cutlass.routing.RoutingPlan | tuple[int, int, int, int, int], /) -> Any: ...

def plan_from_row_id_map(row_id_map: fp8moe_cutlass.typing.DLPackArray, pad_offsets: fp8moe_cutlass.typing.DLPackArray | None, plan: fp8moe_cutlass.routing.RoutingPlan | tuple[int, int, int, int, int], /) -> Any: ...

def router_topk(logits: fp8moe_cutlass.typing.DLPackArray, selection_bias: fp8moe_cutlass.typing.DLPackArray | None, padding: fp8moe_cutlass.typing.DLPackArray | None, given_idx: fp8moe_cutlass.typing.DLPackArray | None, top_k: int, sequences: int, scores: fp8moe_cutlass.typing.DLPackArray | bool | str, topk_idx: fp8moe_cutlass.typing.DLPackArray | bool | str | None, topk_weights: fp8moe_cutlass.typing.DLPackArray | bool | str, tokens_per_expert: fp8moe_cutlass.typing.DLPackArray | bool | str, score: int, select_by_logits: bool, num_groups: int, topk_groups: int, best_per_group: int, closed_value: float, softmax_after_topk: bool, normalize: bool, epsilon: float, routed_scaling_factor: float, /) -> Any: ...

def router_topk_backward(dweights: fp8moe_cutlass.typing.DLPackArray | None, dscores: fp8moe_cutlass.typing.DLPackArray | None, scores: fp8moe_cutlass.typing.DLPackArray, topk_idx: fp8moe_cutlass.typing.DLPackArray, topk_weights: fp8moe_cutlass.typing.DLPackArray, dlogits: fp8moe_cutlass.typing.DLPackArray | bool | str, score: int, softmax_after_topk: bool, normalize: bool, epsilon: float, routed_scaling_factor: float, /) -> Any: ...

def permute_pad(x: fp8moe_cutlass.tensor.Fp8Tensor | fp8moe_cutlass.typing.DLPackArray, plan: fp8moe_cutlass.routing.RoutingPlan, probs: fp8moe_cutlass.typing.DLPackArray | None, y: fp8moe_cutlass.tensor.Fp8Tensor | str | tuple[str, Any] | fp8moe_cutlass.typing.DLPackArray, row_probs: fp8moe_cutlass.typing.DLPackArray | bool | str | None, zero_unweighted: bool, /) -> Any: ...

def permute_pad_backward(dy: fp8moe_cutlass.typing.DLPackArray, plan: fp8moe_cutlass.routing.RoutingPlan, row_dprobs: fp8moe_cutlass.typing.DLPackArray | None, dx: fp8moe_cutlass.typing.DLPackArray | bool | str, dprobs: fp8moe_cutlass.typing.DLPackArray | bool | str | None, /) -> Any: ...

def unpermute_unpad(y: fp8moe_cutlass.typing.DLPackArray, plan: fp8moe_cutlass.routing.RoutingPlan, probs: fp8moe_cutlass.typing.DLPackArray | None, peers: fp8moe_cutlass.typing.DLPackArray | None, first: fp8moe_cutlass.typing.DLPackArray | None, out: fp8moe_cutlass.typing.DLPackArray | bool | str, /) -> Any: ...

def unpermute_unpad_backward(dout: fp8moe_cutlass.typing.DLPackArray, plan: fp8moe_cutlass.routing.RoutingPlan, y: fp8moe_cutlass.typing.DLPackArray | None, probs: fp8moe_cutlass.typing.DLPackArray | None, dy: fp8moe_cutlass.typing.DLPackArray | bool | str, dprobs: fp8moe_cutlass.typing.DLPackArray | bool | str | None, /) -> Any: ...

def dispatch_plan(topk_idx: fp8moe_cutlass.typing.DLPackArray, num_experts: int, segment: int, plan: fp8moe_cutlass.routing.RoutingPlan | tuple[int, int, int, int, int], counts: fp8moe_cutlass.typing.DLPackArray | bool | str, dropped: fp8moe_cutlass.typing.DLPackArray | bool | str | None, workspace: fp8moe_cutlass.typing.DLPackArray | None, /) -> Any: ...

def quantize_pack(x: fp8moe_cutlass.typing.DLPackArray, topk_idx: fp8moe_cutlass.typing.DLPackArray | None, probs: fp8moe_cutlass.typing.DLPackArray | None, num_experts: int, plan: fp8moe_cutlass.routing.RoutingPlan, peers: fp8moe_cutlass.typing.DLPackArray | None, first: fp8moe_cutlass.typing.DLPackArray | None, packed: fp8moe_cutlass.typing.DLPackArray | bool | str, fp8_dtype: str, scale: str, eps: float, /) -> Any: ...

def unpack(packed: fp8moe_cutlass.typing.DLPackArray, hidden: int, slots: int, topk_idx: fp8moe_cutlass.typing.DLPackArray | bool | str, probs: fp8moe_cutlass.typing.DLPackArray | bool | str, /) -> Any: ...

def share_words(words: fp8moe_cutlass.typing.DLPackArray, more: fp8moe_cutlass.typing.DLPackArray | None, peers: fp8moe_cutlass.typing.DLPackArray, mailbox: fp8moe_cutlass.typing.DLPackArray, calls: fp8moe_cutlass.typing.DLPackArray, ended: fp8moe_cutlass.typing.DLPackArray, late: fp8moe_cutlass.typing.DLPackArray, rank: int, timeout_ms: int, told: fp8moe_cutlass.typing.DLPackArray | bool | str, /) -> Any: ...

def copy_rows(out: fp8moe_cutlass.typing.DLPackArray | bool | str, places: fp8moe_cutlass.typing.DLPackArray, beside: int, /) -> Any: ...

def transpose_fp8(q: fp8moe_cutlass.tensor.Fp8Tensor, plan: fp8moe_cutlass.routing.RoutingPlan, columns: fp8moe_cutlass.tensor.Fp8Tensor | str | tuple[str, Any], requantize: bool, scale: str, eps: float, /) -> Any: ...

def permute_transpose_fp8(q: fp8moe_cutlass.tensor.Fp8Tensor, plan: fp8moe_cutlass.routing.RoutingPlan, columns: fp8moe_cutlass.tensor.Fp8Tensor | str | tuple[str, Any], /) -> Any: ...

def count_codes(q: fp8moe_cutlass.tensor.Fp8Tensor, plan: fp8moe_cutlass.routing.RoutingPlan, columns: fp8moe_cutlass.tensor.Fp8Tensor | None, stride: int, counts: fp8moe_cutlass.typing.DLPackArray | bool | str, /) -> Any: ...

def act_quantize(z: fp8moe_cutlass.typing.DLPackArray, plan: fp8moe_cutlass.routing.RoutingPlan | None, probs: fp8moe_cutlass.typing.DLPackArray | None, activation: fp8moe_cutlass.activation.Activation, rounding: int, h: fp8moe_cutlass.tensor.Fp8Tensor | str | tuple[str, Any], z_q: fp8moe_cutlass.tensor.Fp8Tensor | str | tuple[str, Any] | None, scale: str, eps: float, /) -> Any: ...

def act_quantize_backward(dh: fp8moe_cutlass.typing.DLPackArray, z: fp8moe_cutlass.typing.DLPackArray, plan: fp8moe_cutlass.routing.RoutingPlan | None, probs: fp8moe_cutlass.typing.DLPackArray | None, activation: fp8moe_cutlass.activation.Activation, dz: fp8moe_cutlass.tensor.Fp8Tensor | str | tuple[str, Any], dprobs: fp8moe_cutlass.typing.DLPackArray | bool | str | None, dz_columns: fp8moe_cutlass.tensor.Fp8Tensor | str | tuple[str, Any] | None, h_columns: fp8moe_cutlass.tensor.Fp8Tensor | str | tuple[str, Any] | None, scale: str, eps: float, workspace: fp8moe_cutlass.typing.DLPackArray | None, /) -> Any: ...

def grouped_gemm(a: fp8moe_cutlass.tensor.Fp8Tensor, w: fp8moe_cutlass.tensor.Fp8Tensor, plan: fp8moe_cutlass.routing.RoutingPlan, d: fp8moe_cutlass.typing.DLPackArray | bool | str, a2: fp8moe_cutlass.tensor.Fp8Tensor | None, w2: fp8moe_cutlass.tensor.Fp8Tensor | None, /) -> Any: ...

def grouped_gemm_wgrad(dy_t: fp8moe_cutlass.tensor.Fp8Tensor, x_t: fp8moe_cutlass.tensor.Fp8Tensor, plan: fp8moe_cutlass.routing.RoutingPlan, dw: fp8moe_cutlass.typing.DLPackArray | bool | str, accumulate: bool, workspace: fp8moe_cutlass.typing.DLPackArray | None, /) -> Any: ...

def lora_project(rows: fp8moe_cutlass.tensor.Fp8Tensor, factor: fp8moe_cutlass.typing.DLPackArray, plan: fp8moe_cutlass.routing.RoutingPlan, u: fp8moe_cutlass.typing.DLPackArray | bool | str, u_q: fp8moe_cutlass.tensor.Fp8Tensor | str | tuple[str, Any], rank_first: bool, scaling: float, scale: str, eps: float, /) -> Any: ...

def lora_wgrad(u: fp8moe_cutlass.typing.DLPackArray, rows: fp8moe_cutlass.tensor.Fp8Tensor, plan: fp8moe_cutlass.routing.RoutingPlan, dfactor: fp8moe_cutlass.typing.DLPackArray | bool | str, rank_first: bool, /) -> Any: ...

def quantize_lora(factor: fp8moe_cutlass.typing.DLPackArray, w2: fp8moe_cutlass.tensor.Fp8Tensor | str | tuple[str, Any], rank_first: bool, scale: str, eps: float, /) -> Any: ...

def operators() -> dict[str, tuple[tuple[str, str, str, bool], ...]]:
    """
    Of each operator its fields: name, kind, role, and whether a plain array may stand for an Fp8Tensor.
    """

ZERO_WORKSPACE_BYTES: int = 576

def activations() -> dict[str, tuple[bool, bool, bool]]:
    """
    Of each kind of activation: whether it has a gate, a limit, and alpha and offset.
    """

def attach_torch(module: Any) -> None:
    """
    From then on torch's arrays are allocated, and their gradients, tangents and versions looked at.
    """

def explain_grouped_gemm(gemm: str, m: int, n: int, k: int, experts: int, sm_count: int, out_dtype: str = 'bfloat16', accumulate: bool = False, columns: str = 'block') -> dict[str, Any]:
    """
    The kernel that a grouped GEMM of these sizes runs on CUDA, and how its tiles fit.
    """

def sm_count(device: int = 0) -> int:
    """SMs of that GPU."""

def grouped_gemm_candidates(gemm: str, m: int, n: int, k: int, experts: int, sm_count: int, out_dtype: str = 'bfloat16', accumulate: bool = False, columns: str = 'block') -> list[dict[str, Any]]:
    """For measuring and tests: every way to run it. All give the same bits."""

def force_grouped_gemm(candidate: dict[str, Any] | None) -> None:
    """
    For measuring and tests: what this thread's grouped GEMMs run from now on; None: the choice.
    """

def build_info() -> dict[str, Any]: ...

def require_cuda(device: int = 0) -> None:
    """
    Returns where this build runs on that GPU; else raises what the first CUDA array would.
    """
