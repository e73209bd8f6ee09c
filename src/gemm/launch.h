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

// Picks the instance of A's format at run time; B is in E4M3.
template <Kind kKind>
void launch(DType a, const Params& params, const Candidate& candidate, const DeviceInfo& device,
            cudaStream_t stream) {
  if (a == DType::e4m3)
    launch<kKind, DType::e4m3>(params, candidate, device, stream);
  else
    launch<kKind, DType::e5m2>(params, candidate, device, stream);
}

}  // namespace fp8moe::cuda::gemm
