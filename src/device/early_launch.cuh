// Launches that start while the one ahead of them in the stream still runs.
#pragma once

#include <type_traits>

#include "device/runtime.h"

namespace fp8moe::cuda {

// The next launch may start; what the launch before wrote may be read.
__device__ __forceinline__ void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// A launch that may start before the one ahead of it in the stream has ended.
template <typename... Args>
void launch_early(void (*kernel)(Args...), unsigned grid, unsigned threads, size_t shared_bytes,
                  cudaStream_t stream, std::type_identity_t<Args>... args) {
  constexpr size_t kWithoutOptIn = 48 * 1024;
  if (shared_bytes > kWithoutOptIn)
    allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  FP8MOE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace fp8moe::cuda
