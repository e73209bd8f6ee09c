// The two backends behind the checks: the same functions, arguments already checked.
#pragma once

#include "fp8moe/explain.h"
#include "fp8moe/ops.h"

namespace fp8moe::cpu {
#include "ops/backend_ops.inc"
}  // namespace fp8moe::cpu

namespace fp8moe::cuda {
#include "ops/backend_ops.inc"

// Refuses a machine without driver or GPU, and a GPU that is not compute capability 9.0.
void require_device(Device device, const char* op);

// Plain C++, and in every build: it asks no device.
GemmChoice explain_grouped_gemm(const GemmQuery& query);
}  // namespace fp8moe::cuda

// FP8MOE_DISPATCH("op", device, op(arguments)): returns what the backend of `device` returns. The
// last statement of an op.
#if FP8MOE_HAS_CUDA
#define FP8MOE_DISPATCH(op, device, ...)    \
  do {                                      \
    if ((device).type == DeviceType::cpu) { \
      return cpu::__VA_ARGS__;              \
    } else {                                \
      cuda::require_device(device, op);     \
      return cuda::__VA_ARGS__;             \
    }                                       \
  } while (false)
#else
#define FP8MOE_DISPATCH(op, device, ...)                                              \
  do {                                                                                \
    if ((device).type != DeviceType::cpu) ::fp8moe::cuda::require_device(device, op); \
    return cpu::__VA_ARGS__;                                                          \
  } while (false)
#endif
