#include <string>

#include "common/backends.h"
#include "cpu/multiversion.h"
#include "fp8moe/ops.h"

namespace fp8moe {

BuildInfo build_info() {
  const char* isa = cpu::has_v4() ? "x86-64-v4" : cpu::has_v3() ? "x86-64-v3" : "baseline";
  return {.version = FP8MOE_VERSION,
          .cuda = FP8MOE_HAS_CUDA != 0,
          .cuda_toolkit = FP8MOE_CUDA_TOOLKIT,
          .cutlass = FP8MOE_CUTLASS_VERSION,
          .cpu_isa = isa};
}

#if !FP8MOE_HAS_CUDA
void cuda::require_device(Device, const char* op) {
  throw DeviceUnavailable("[" + std::string(op) +
                          "] this build has no CUDA backend; pass CPU tensors, or reinstall with "
                          "FP8MOE_CUDA=ON");
}

int64_t cuda::sm_count(Device device) {
  require_device(device, "sm_count");
  return 0;
}
#endif

void require_cuda(int device) { cuda::require_device({DeviceType::cuda, device}, "require_cuda"); }

}  // namespace fp8moe
