// The two backends behind the door: the same functions, arguments already checked.
#pragma once

#include "fp8moe/ops.h"

namespace fp8moe::cpu {
#include "core/backend_ops.inc"
}  // namespace fp8moe::cpu

#if FP8MOE_HAS_CUDA
namespace fp8moe::cuda {
#include "core/backend_ops.inc"
// Refuses a machine without driver or GPU, and a GPU that is not compute capability 9.0.
void require_device(Device device, const char* op);
}  // namespace fp8moe::cuda

// FP8MOE_DISPATCH("op", device, op(arguments)): returns what the backend of `device` returns. The
// last statement of an op.
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
#define FP8MOE_DISPATCH(op, device, ...)                                                \
  do {                                                                                  \
    if ((device).type != DeviceType::cpu)                                               \
      throw DeviceUnavailable("[" op                                                    \
                              "] this build has no CUDA backend; pass CPU tensors, or " \
                              "reinstall with FP8MOE_CUDA=ON");                         \
    return cpu::__VA_ARGS__;                                                            \
  } while (false)
#endif
