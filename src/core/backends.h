// The two backends behind the door: the same functions, arguments already checked.
#pragma once

#include "cpu/ops.h"
#include "cuda/ops.h"

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
