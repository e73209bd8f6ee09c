// Included by instances/*.cu, one Kind and pair of formats each, so that they compile in parallel.
#pragma once

#include <string>

#include "cuda/gemm/kernel.cuh"
#include "cuda/gemm/launch.h"

namespace fp8moe::cuda::gemm {

template <Kind kKind, DType A, DType B, int TileN, int Cluster>
void launch_kernel(const Params& params, const DeviceInfo& device, cudaStream_t stream) {
  using S = Stage<kKind, TileN>;
  auto* kernel = grouped_gemm_kernel<kKind, A, B, TileN, Cluster>;
  FP8MOE_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(device.sm_count / Cluster * Cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(S::kBytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  FP8MOE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params));
}

template <Kind kKind, DType A, DType B>
void launch(const Params& params, const Config& config, const DeviceInfo& device,
            cudaStream_t stream) {
  switch (config.tile_n) {
    case 128: return launch_kernel<kKind, A, B, 128, 1>(params, device, stream);
    case 192: return launch_kernel<kKind, A, B, 192, 1>(params, device, stream);
    default: throw InvalidArgument("no kernel of tile 128x" + std::to_string(config.tile_n));
  }
}

}  // namespace fp8moe::cuda::gemm
