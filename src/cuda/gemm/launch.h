// The seam between who asks for a grouped GEMM and who compiles the kernel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/gemm/config.h"
#include "cuda/gemm/params.h"
#include "cuda/runtime.h"

namespace fp8moe::cuda::gemm {

// Runs the instance of (kind, a, b, config) on the current device; defined in instances/.
template <Kind kKind, DType A, DType B>
void launch(const Params& params, const Config& config, const DeviceInfo& device,
            cudaStream_t stream);

// Picks the formats' instance at run time.
template <Kind kKind>
void launch(DType a, DType b, const Params& params, const Config& config, const DeviceInfo& device,
            cudaStream_t stream) {
  const auto with = [&]<DType A>() {
    if (b == DType::e4m3)
      launch<kKind, A, DType::e4m3>(params, config, device, stream);
    else
      launch<kKind, A, DType::e5m2>(params, config, device, stream);
  };
  if (a == DType::e4m3)
    with.template operator()<DType::e4m3>();
  else
    with.template operator()<DType::e5m2>();
}

}  // namespace fp8moe::cuda::gemm
