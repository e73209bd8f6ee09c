from collections.abc import Sequence

import fp8moe_cutlass


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

def quantize(x: fp8moe_cutlass.typing.DLPackArray, q: fp8moe_cutlass.typing.DLPackArray, q_scale: fp8moe_cutlass.typing.DLPackArray, q_layout: str, pow2: bool, eps: float) -> None: ...

def quantize_dual(x: fp8moe_cutlass.typing.DLPackArray, plan: fp8moe_cutlass.typing.DLPackArray, plan_shape: Sequence[int], rows: fp8moe_cutlass.typing.DLPackArray, rows_scale: fp8moe_cutlass.typing.DLPackArray, rows_layout: str, columns: fp8moe_cutlass.typing.DLPackArray, columns_scale: fp8moe_cutlass.typing.DLPackArray, columns_layout: str, pow2: bool, eps: float) -> None: ...

def quantize_weight(w: fp8moe_cutlass.typing.DLPackArray, q: fp8moe_cutlass.typing.DLPackArray | None, q_scale: fp8moe_cutlass.typing.DLPackArray | None, q_layout: str, q_t: fp8moe_cutlass.typing.DLPackArray | None, q_t_scale: fp8moe_cutlass.typing.DLPackArray | None, q_t_layout: str, pow2: bool, eps: float, interleave: int) -> None: ...

def dequantize(q: fp8moe_cutlass.typing.DLPackArray, q_scale: fp8moe_cutlass.typing.DLPackArray, q_layout: str, x: fp8moe_cutlass.typing.DLPackArray) -> None: ...

def route_workspace(plan: fp8moe_cutlass.typing.DLPackArray, plan_shape: Sequence[int]) -> int:
    """Bytes of scratch `route` needs for a plan of this shape."""

def route(topk_idx: fp8moe_cutlass.typing.DLPackArray | None, routing_map: fp8moe_cutlass.typing.DLPackArray | None, plan: fp8moe_cutlass.typing.DLPackArray, plan_shape: Sequence[int], workspace: fp8moe_cutlass.typing.DLPackArray) -> None: ...

def plan_from_counts(tokens_per_expert: fp8moe_cutlass.typing.DLPackArray, plan: fp8moe_cutlass.typing.DLPackArray, plan_shape: Sequence[int]) -> None: ...

def permute_pad(x: fp8moe_cutlass.typing.DLPackArray, x_scale: fp8moe_cutlass.typing.DLPackArray | None, x_layout: str, plan: fp8moe_cutlass.typing.DLPackArray, plan_shape: Sequence[int], probs: fp8moe_cutlass.typing.DLPackArray | None, y: fp8moe_cutlass.typing.DLPackArray, y_scale: fp8moe_cutlass.typing.DLPackArray | None, y_layout: str, permuted_probs: fp8moe_cutlass.typing.DLPackArray | None) -> None: ...

def permute_pad_backward(dy: fp8moe_cutlass.typing.DLPackArray, plan: fp8moe_cutlass.typing.DLPackArray, plan_shape: Sequence[int], permuted_dprobs: fp8moe_cutlass.typing.DLPackArray | None, dx: fp8moe_cutlass.typing.DLPackArray, dprobs: fp8moe_cutlass.typing.DLPackArray | None) -> None: ...

def unpermute_unpad(y: fp8moe_cutlass.typing.DLPackArray, plan: fp8moe_cutlass.typing.DLPackArray, plan_shape: Sequence[int], probs: fp8moe_cutlass.typing.DLPackArray | None, out: fp8moe_cutlass.typing.DLPackArray) -> None: ...

def unpermute_unpad_backward(dout: fp8moe_cutlass.typing.DLPackArray, plan: fp8moe_cutlass.typing.DLPackArray, plan_shape: Sequence[int], y: fp8moe_cutlass.typing.DLPackArray | None, probs: fp8moe_cutlass.typing.DLPackArray | None, dy: fp8moe_cutlass.typing.DLPackArray, dprobs: fp8moe_cutlass.typing.DLPackArray | None) -> None: ...

def transpose_fp8(q: fp8moe_cutlass.typing.DLPackArray, q_scale: fp8moe_cutlass.typing.DLPackArray, q_layout: str, plan: fp8moe_cutlass.typing.DLPackArray, plan_shape: Sequence[int], columns: fp8moe_cutlass.typing.DLPackArray, columns_scale: fp8moe_cutlass.typing.DLPackArray, columns_layout: str, requantize: bool, pow2: bool, eps: float) -> None: ...

def permute_transpose_fp8(q: fp8moe_cutlass.typing.DLPackArray, q_scale: fp8moe_cutlass.typing.DLPackArray, q_layout: str, plan: fp8moe_cutlass.typing.DLPackArray, plan_shape: Sequence[int], columns: fp8moe_cutlass.typing.DLPackArray, columns_scale: fp8moe_cutlass.typing.DLPackArray, columns_layout: str) -> None: ...

def swiglu_quantize(z: fp8moe_cutlass.typing.DLPackArray, plan: fp8moe_cutlass.typing.DLPackArray | None, plan_shape: Sequence[int], probs: fp8moe_cutlass.typing.DLPackArray | None, clamp: float, h: fp8moe_cutlass.typing.DLPackArray, h_scale: fp8moe_cutlass.typing.DLPackArray, h_layout: str, h_columns: fp8moe_cutlass.typing.DLPackArray | None, h_columns_scale: fp8moe_cutlass.typing.DLPackArray | None, h_columns_layout: str, z_q: fp8moe_cutlass.typing.DLPackArray | None, z_q_scale: fp8moe_cutlass.typing.DLPackArray | None, z_q_layout: str, pow2: bool, eps: float) -> None: ...

def swiglu_quantize_backward(dh: fp8moe_cutlass.typing.DLPackArray, z: fp8moe_cutlass.typing.DLPackArray | None, z_q: fp8moe_cutlass.typing.DLPackArray | None, z_q_scale: fp8moe_cutlass.typing.DLPackArray | None, z_q_layout: str, plan: fp8moe_cutlass.typing.DLPackArray | None, plan_shape: Sequence[int], probs: fp8moe_cutlass.typing.DLPackArray | None, clamp: float, dz: fp8moe_cutlass.typing.DLPackArray, dz_scale: fp8moe_cutlass.typing.DLPackArray, dz_layout: str, dprobs: fp8moe_cutlass.typing.DLPackArray | None, dz_columns: fp8moe_cutlass.typing.DLPackArray | None, dz_columns_scale: fp8moe_cutlass.typing.DLPackArray | None, dz_columns_layout: str, h_columns: fp8moe_cutlass.typing.DLPackArray | None, h_columns_scale: fp8moe_cutlass.typing.DLPackArray | None, h_columns_layout: str, pow2: bool, eps: float) -> None: ...

def grouped_gemm(a: fp8moe_cutlass.typing.DLPackArray, a_scale: fp8moe_cutlass.typing.DLPackArray, a_layout: str, w: fp8moe_cutlass.typing.DLPackArray, w_scale: fp8moe_cutlass.typing.DLPackArray, w_layout: str, plan: fp8moe_cutlass.typing.DLPackArray, plan_shape: Sequence[int], d: fp8moe_cutlass.typing.DLPackArray) -> None: ...

def grouped_gemm_wgrad(dy_t: fp8moe_cutlass.typing.DLPackArray, dy_t_scale: fp8moe_cutlass.typing.DLPackArray, dy_t_layout: str, x_t: fp8moe_cutlass.typing.DLPackArray, x_t_scale: fp8moe_cutlass.typing.DLPackArray, x_t_layout: str, plan: fp8moe_cutlass.typing.DLPackArray, plan_shape: Sequence[int], dw: fp8moe_cutlass.typing.DLPackArray, accumulate: bool) -> None: ...

def set_stream(handle: int) -> int:
    """
    Sets this thread's stream for arrays whose framework names none; returns the one before.
    """

def build_info() -> dict: ...
