// Included by instances/*.cu, one Kind and format of A each, so that they compile in parallel.
#pragma once

#include <string>

#include "gemm/kernel.cuh"
#include "gemm/launch.h"

namespace fp8moe::cuda::gemm {

template <Kind kKind, DType A, int TileM, int TileN, Output kOutput>
void launch_kernel(const Params& params, const DeviceInfo& device, cudaStream_t stream) {
  constexpr int kBytes = Stage<kKind, TileM, TileN>::kBytes;
  auto* kernel = grouped_gemm_kernel<kKind, A, TileM, TileN, kOutput>;
  allow_shared(reinterpret_cast<const void*>(kernel), kBytes);
  kernel<<<static_cast<unsigned>(device.sm_count), TileTraits<TileM, TileN>::kThreads, kBytes,
           stream>>>(params);
  FP8MOE_CUDA_CHECK(cudaGetLastError());
}

template <Kind kKind, DType A>
void launch(const Params& params, const Candidate& candidate, const DeviceInfo& device,
            cudaStream_t stream) {
  with_tile(shape_of(candidate), [&]<int TileM, int TileN>() {
    constexpr TileShape kShape = tile_shape(TileM, TileN);
    const auto run = [&]<Output kOutput>() {
      launch_kernel<kKind, A, TileM, TileN, kOutput>(params, device, stream);
    };
    if constexpr (kShape.outputs(kKind) == Outputs::either) {
      return run.template operator()<Output::either>();
    } else {
      if constexpr (kShape.writes(kKind, true)) {
        if (params.bf16) return run.template operator()<Output::bf16>();
      }
      if constexpr (kShape.writes(kKind, false)) {
        if (!params.bf16) return run.template operator()<Output::f32>();
      }
      throw InvalidArgument("no kernel of tile " + std::to_string(TileM) + "x" +
                            std::to_string(TileN));
    }
  });
}

}  // namespace fp8moe::cuda::gemm
