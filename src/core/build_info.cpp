#include "fp8moe/ops.h"

namespace fp8moe {

BuildInfo build_info() {
#if defined(__x86_64__)
  const bool v3 = __builtin_cpu_supports("x86-64-v3");
#else
  const bool v3 = false;
#endif
  return {.version = FP8MOE_VERSION,
          .cuda = FP8MOE_HAS_CUDA != 0,
          .cuda_toolkit = FP8MOE_CUDA_TOOLKIT,
          .cutlass = FP8MOE_CUTLASS_VERSION,
          .cpu_isa = v3 ? "x86-64-v3" : "baseline"};
}

}  // namespace fp8moe
