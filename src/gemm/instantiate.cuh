// Included by instances/*.cu, one Kind and format of A each, so that they compile in parallel.
#pragma once

#include <string>

#include "gemm/kernel.cuh"
#include "gemm/launch.h"

namespace fp8moe::cuda::gemm {

template <Kind kKind, DType A, int TileM, int TileN, Output kOutput, bool kSplit = false>
void launch_kernel(const Params& params, const DeviceInfo& device, cudaStream_t stream) {
  constexpr int kBytes = Stage<kKind, TileM, TileN>::kBytes;
  auto* kernel = grouped_gemm_kernel<kKind, A, TileM, TileN, kOutput, kSplit>;
  allow_shared(reinterpret_cast<const void*>(kernel), kBytes);
  kernel<<<static_cast<unsigned>(device.sm_count), kThreads<TileM>, kBytes, stream>>>(params);
  FP8MOE_CUDA_CHECK(cudaGetLastError());
}

// With 192 columns or rows one way to write D each: with both the loop is 1 to 2% slower.
template <Kind kKind, DType A>
void launch(const Params& params, const Config& config, const DeviceInfo& device,
            cudaStream_t stream) {
  const auto run = [&]<int TileM, int TileN, Output kOutput, bool kSplit = false>() {
    launch_kernel<kKind, A, TileM, TileN, kOutput, kSplit>(params, device, stream);
  };
  if (config.tile_m == kTileM192) {
    if constexpr (kKind == Kind::fprop) {
      if (params.bf16 && config.split)
        return run.template operator()<kTileM192, 128, Output::bf16, true>();
    }
    if constexpr (kKind != Kind::wgrad_128x128) {
      if (params.bf16) return run.template operator()<kTileM192, 128, Output::bf16>();
    }
    if constexpr (kKind != Kind::fprop) {
      if (!params.bf16) return run.template operator()<kTileM192, 128, Output::f32>();
    }
  } else if constexpr (kKind != Kind::wgrad_1x128) {
    if (config.tile_n == 128) return run.template operator()<kTileM, 128, Output::either>();
    if constexpr (kKind == Kind::fprop) {
      if (params.bf16 && config.split)
        return run.template operator()<kTileM, 192, Output::bf16, true>();
    }
    if (params.bf16) return run.template operator()<kTileM, 192, Output::bf16>();
    if constexpr (kKind == Kind::wgrad_128x128)
      return run.template operator()<kTileM, 192, Output::f32>();
  }
  throw InvalidArgument("no kernel of tile " + std::to_string(config.tile_m) + "x" +
                        std::to_string(config.tile_n));
}

}  // namespace fp8moe::cuda::gemm
