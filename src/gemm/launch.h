// The seam between who asks for a grouped GEMM and who compiles the kernel.
#pragma once

#include <cuda_runtime.h>

#include "device/runtime.h"
#include "gemm/params.h"
#include "gemm/policy.h"

namespace fp8moe::cuda::gemm {

// Runs the instance of (kind, a, candidate) on the current device; defined in instances/.
template <Kind kKind, DType A>
void launch(const Params& params, const Candidate& candidate, const DeviceInfo& device,
            cudaStream_t stream);

// The launches, each of a range of the experts. Picks the instance of A's format at run time; B is
// in E4M3.
template <Kind kKind>
void launch(DType a, Params params, const Candidate& candidate, const DeviceInfo& device,
            cudaStream_t stream) {
  const int64_t experts = params.experts;
  for (int64_t i = 1; i <= candidate.launches; ++i) {
    params.experts = static_cast<int>(experts * i / candidate.launches);
    if (a == DType::e4m3)
      launch<kKind, DType::e4m3>(params, candidate, device, stream);
    else
      launch<kKind, DType::e5m2>(params, candidate, device, stream);
    params.first_expert = params.experts;
  }
}

}  // namespace fp8moe::cuda::gemm
