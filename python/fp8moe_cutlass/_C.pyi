from typing import Any

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

def quantize(x: fp8moe_cutlass.typing.ArrayArg, q: fp8moe_cutlass.typing.ArrayArg, q_scale: fp8moe_cutlass.typing.ArrayArg, q_layout: str, pow2: bool, eps: float) -> None: ...

def quantize_weight(w: fp8moe_cutlass.typing.ArrayArg, q: fp8moe_cutlass.typing.ArrayArg | None, q_scale: fp8moe_cutlass.typing.ArrayArg | None, q_t: fp8moe_cutlass.typing.ArrayArg | None, q_t_scale: fp8moe_cutlass.typing.ArrayArg | None, pow2: bool, eps: float) -> None: ...

def dequantize(q: fp8moe_cutlass.typing.ArrayArg, q_scale: fp8moe_cutlass.typing.ArrayArg, q_layout: str, x: fp8moe_cutlass.typing.ArrayArg) -> None: ...

def route_workspace(plan: fp8moe_cutlass.typing.ArrayArg, tokens: int, slots: int, experts: int, align: int, capacity: int) -> int:
    """Bytes of scratch `route` needs for a plan of this shape."""

def route(topk_idx: fp8moe_cutlass.typing.ArrayArg | None, routing_map: fp8moe_cutlass.typing.ArrayArg | None, plan: fp8moe_cutlass.typing.ArrayArg, tokens: int, slots: int, experts: int, align: int, capacity: int, workspace: fp8moe_cutlass.typing.ArrayArg) -> None: ...

def plan_from_counts(tokens_per_expert: fp8moe_cutlass.typing.ArrayArg, plan: fp8moe_cutlass.typing.ArrayArg, tokens: int, slots: int, experts: int, align: int, capacity: int) -> None: ...

def permute_pad(x: fp8moe_cutlass.typing.ArrayArg, x_scale: fp8moe_cutlass.typing.ArrayArg | None, x_layout: str, plan: fp8moe_cutlass.typing.ArrayArg, tokens: int, slots: int, experts: int, align: int, capacity: int, probs: fp8moe_cutlass.typing.ArrayArg | None, y: fp8moe_cutlass.typing.ArrayArg, y_scale: fp8moe_cutlass.typing.ArrayArg | None, y_layout: str, row_probs: fp8moe_cutlass.typing.ArrayArg | None, zero_unweighted: bool) -> None: ...

def permute_pad_backward(dy: fp8moe_cutlass.typing.ArrayArg, plan: fp8moe_cutlass.typing.ArrayArg, tokens: int, slots: int, experts: int, align: int, capacity: int, row_dprobs: fp8moe_cutlass.typing.ArrayArg | None, dx: fp8moe_cutlass.typing.ArrayArg, dprobs: fp8moe_cutlass.typing.ArrayArg | None) -> None: ...

def unpermute_unpad(y: fp8moe_cutlass.typing.ArrayArg, plan: fp8moe_cutlass.typing.ArrayArg, tokens: int, slots: int, experts: int, align: int, capacity: int, probs: fp8moe_cutlass.typing.ArrayArg | None, out: fp8moe_cutlass.typing.ArrayArg) -> None: ...

def unpermute_unpad_backward(dout: fp8moe_cutlass.typing.ArrayArg, plan: fp8moe_cutlass.typing.ArrayArg, tokens: int, slots: int, experts: int, align: int, capacity: int, y: fp8moe_cutlass.typing.ArrayArg | None, probs: fp8moe_cutlass.typing.ArrayArg | None, dy: fp8moe_cutlass.typing.ArrayArg, dprobs: fp8moe_cutlass.typing.ArrayArg | None) -> None: ...

def dispatch_plan_workspace(plan: fp8moe_cutlass.typing.ArrayArg, tokens: int, slots: int, experts: int, align: int, capacity: int) -> int:
    """Bytes of scratch `dispatch_plan` needs for a plan of this shape."""

def dispatch_plan(topk_idx: fp8moe_cutlass.typing.ArrayArg, num_experts: int, segment: int, plan: fp8moe_cutlass.typing.ArrayArg, tokens: int, slots: int, experts: int, align: int, capacity: int, counts: fp8moe_cutlass.typing.ArrayArg, workspace: fp8moe_cutlass.typing.ArrayArg) -> None: ...

def quantize_pack(x: fp8moe_cutlass.typing.ArrayArg, topk_idx: fp8moe_cutlass.typing.ArrayArg | None, probs: fp8moe_cutlass.typing.ArrayArg | None, num_experts: int, plan: fp8moe_cutlass.typing.ArrayArg, tokens: int, slots: int, experts: int, align: int, capacity: int, packed: fp8moe_cutlass.typing.ArrayArg, fp8_dtype: str, pow2: bool, eps: float) -> None: ...

def unpack(packed: fp8moe_cutlass.typing.ArrayArg, hidden: int, topk_idx: fp8moe_cutlass.typing.ArrayArg, probs: fp8moe_cutlass.typing.ArrayArg) -> None: ...

def transpose_fp8(q: fp8moe_cutlass.typing.ArrayArg, q_scale: fp8moe_cutlass.typing.ArrayArg, q_layout: str, plan: fp8moe_cutlass.typing.ArrayArg, tokens: int, slots: int, experts: int, align: int, capacity: int, columns: fp8moe_cutlass.typing.ArrayArg, columns_scale: fp8moe_cutlass.typing.ArrayArg, columns_layout: str, requantize: bool, pow2: bool, eps: float) -> None: ...

def permute_transpose_fp8(q: fp8moe_cutlass.typing.ArrayArg, q_scale: fp8moe_cutlass.typing.ArrayArg, q_layout: str, plan: fp8moe_cutlass.typing.ArrayArg, tokens: int, slots: int, experts: int, align: int, capacity: int, columns: fp8moe_cutlass.typing.ArrayArg, columns_scale: fp8moe_cutlass.typing.ArrayArg, columns_layout: str) -> None: ...

def count_codes(q: fp8moe_cutlass.typing.ArrayArg, q_scale: fp8moe_cutlass.typing.ArrayArg, q_layout: str, plan: fp8moe_cutlass.typing.ArrayArg, tokens: int, slots: int, experts: int, align: int, capacity: int, columns: fp8moe_cutlass.typing.ArrayArg | None, columns_scale: fp8moe_cutlass.typing.ArrayArg | None, columns_layout: str, stride: int, counts: fp8moe_cutlass.typing.ArrayArg) -> None: ...

def act_quantize(z: fp8moe_cutlass.typing.ArrayArg, plan: fp8moe_cutlass.typing.ArrayArg | None, tokens: int, slots: int, experts: int, align: int, capacity: int, probs: fp8moe_cutlass.typing.ArrayArg | None, limit: float, h: fp8moe_cutlass.typing.ArrayArg, h_scale: fp8moe_cutlass.typing.ArrayArg, h_layout: str, z_q: fp8moe_cutlass.typing.ArrayArg | None, z_q_scale: fp8moe_cutlass.typing.ArrayArg | None, z_q_layout: str, pow2: bool, eps: float) -> None: ...

def act_quantize_backward(dh: fp8moe_cutlass.typing.ArrayArg, z: fp8moe_cutlass.typing.ArrayArg, plan: fp8moe_cutlass.typing.ArrayArg | None, tokens: int, slots: int, experts: int, align: int, capacity: int, probs: fp8moe_cutlass.typing.ArrayArg | None, limit: float, dz: fp8moe_cutlass.typing.ArrayArg, dz_scale: fp8moe_cutlass.typing.ArrayArg, dz_layout: str, dprobs: fp8moe_cutlass.typing.ArrayArg | None, dz_columns: fp8moe_cutlass.typing.ArrayArg | None, dz_columns_scale: fp8moe_cutlass.typing.ArrayArg | None, dz_columns_layout: str, h_columns: fp8moe_cutlass.typing.ArrayArg | None, h_columns_scale: fp8moe_cutlass.typing.ArrayArg | None, h_columns_layout: str, pow2: bool, eps: float) -> None: ...

def grouped_gemm(a: fp8moe_cutlass.typing.ArrayArg, a_scale: fp8moe_cutlass.typing.ArrayArg, w: fp8moe_cutlass.typing.ArrayArg, w_scale: fp8moe_cutlass.typing.ArrayArg, plan: fp8moe_cutlass.typing.ArrayArg, tokens: int, slots: int, experts: int, align: int, capacity: int, d: fp8moe_cutlass.typing.ArrayArg) -> None: ...

def grouped_gemm_wgrad(dy_t: fp8moe_cutlass.typing.ArrayArg, dy_t_scale: fp8moe_cutlass.typing.ArrayArg, dy_t_layout: str, x_t: fp8moe_cutlass.typing.ArrayArg, x_t_scale: fp8moe_cutlass.typing.ArrayArg, x_t_layout: str, plan: fp8moe_cutlass.typing.ArrayArg, tokens: int, slots: int, experts: int, align: int, capacity: int, dw: fp8moe_cutlass.typing.ArrayArg, accumulate: bool) -> None: ...

def attach_torch(objects: dict[str, Any]) -> None:
    """Hands over what eager calls ask of torch."""

def eager(direct: Any, watched: Any, kinds: str, arrays: int, written: int) -> Any:
    """
    A function of an op's arguments: `direct` of the flat ones, or `watched` where torch watches.
    """

def empty(like: Any, shape: Any, dtype: Any) -> Any:
    """A tensor beside `like` without torch's dispatcher, or None."""

def empty_fp8(like: Any, shape: Any, layout: Any, fp8_dtype: Any, pow2: bool) -> Any:
    """An Fp8Tensor beside `like` without torch's dispatcher, or None."""

def empty_plan(like: Any, sizes: tuple[int, ...]) -> Any:
    """A RoutingPlan beside `like` without torch's dispatcher, or None."""

def set_stream(handle: int) -> int:
    """
    Sets this thread's stream for arrays whose framework names none; returns the one before.
    """

def explain_grouped_gemm(gemm: str, m: int, n: int, k: int, experts: int, sm_count: int, out_dtype: str = 'bfloat16', accumulate: bool = False, columns: str = 'block') -> dict[str, Any]:
    """
    The kernel that a grouped GEMM of these sizes runs on CUDA, and how its tiles fit.
    """

def grouped_gemm_candidates(gemm: str, m: int, n: int, k: int, experts: int, sm_count: int, out_dtype: str = 'bfloat16', accumulate: bool = False, columns: str = 'block') -> list[dict[str, Any]]:
    """For measuring and tests: every way to run it. All give the same bits."""

def force_grouped_gemm(candidate: dict | None) -> None:
    """
    For measuring and tests: what this thread's grouped GEMMs run from now on; None: the choice.
    """

def build_info() -> dict[str, Any]: ...

def require_cuda(device: int = 0) -> None:
    """
    Returns where this build runs on that GPU; else raises what the first CUDA array would.
    """
