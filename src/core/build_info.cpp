#include "fp8moe/ops.h"

namespace fp8moe {

BuildInfo build_info() {
#if defined(__x86_64__)
  const char* isa = __builtin_cpu_supports("x86-64-v4")   ? "x86-64-v4"
                    : __builtin_cpu_supports("x86-64-v3") ? "x86-64-v3"
                                                          : "baseline";
#else
  const char* isa = "baseline";
#endif
  return {.version = FP8MOE_VERSION,
          .cuda = FP8MOE_HAS_CUDA != 0,
          .cuda_toolkit = FP8MOE_CUDA_TOOLKIT,
          .cutlass = FP8MOE_CUTLASS_VERSION,
          .cpu_isa = isa};
}

}  // namespace fp8moe
