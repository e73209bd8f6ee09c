// Included by instances/*.cu, one Kind and pair of formats each, so that they compile in parallel.
#pragma once

#include <string>

#include "cuda/gemm/kernel.cuh"
#include "cuda/gemm/launch.h"

namespace fp8moe::cuda::gemm {

template <Kind kKind, DType A, DType B, int TileN, Output kOutput, bool kThin = false>
void launch_kernel(const Params& params, const DeviceInfo& device, cudaStream_t stream) {
  constexpr int kBytes = Stage<kKind, TileN>::kBytes;
  auto* kernel = grouped_gemm_kernel<kKind, A, B, TileN, kOutput, kThin>;
  allow_shared(reinterpret_cast<const void*>(kernel), kBytes);
  kernel<<<static_cast<unsigned>(device.sm_count), kThreads, kBytes, stream>>>(params);
  FP8MOE_CUDA_CHECK(cudaGetLastError());
}

// With 192 columns one way to write D each: with both the loop is 1 to 2% slower.
template <Kind kKind, DType A, DType B>
void launch(const Params& params, const Config& config, const DeviceInfo& device,
            cudaStream_t stream) {
  if (config.tile_n == 128)
    return launch_kernel<kKind, A, B, 128, Output::either>(params, device, stream);
  if constexpr (kKind == Kind::rows) {
    if (config.tile_n == 192 && params.bf16 && config.thin)
      return launch_kernel<kKind, A, B, 192, Output::bf16, true>(params, device, stream);
  }
  if (config.tile_n == 192 && params.bf16)
    return launch_kernel<kKind, A, B, 192, Output::bf16>(params, device, stream);
  if constexpr (kKind != Kind::rows) {
    if (config.tile_n == 192)
      return launch_kernel<kKind, A, B, 192, Output::f32>(params, device, stream);
  }
  throw InvalidArgument("no kernel of tile 128x" + std::to_string(config.tile_n));
}

}  // namespace fp8moe::cuda::gemm
