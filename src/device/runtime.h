// What every CUDA op needs from the runtime: errors that name the failed call, the device and its
// sizes, launches. Nothing here allocates, synchronizes or runs before the first op with CUDA
// tensors.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fp8moe/error.h"
#include "fp8moe/explain.h"
#include "fp8moe/tensor.h"

namespace fp8moe::cuda {

// Throws CudaError "cudaFoo(...): <CUDA's text>"; the runtime's error state is left clear.
[[noreturn]] void throw_cuda_error(cudaError_t error, const char* expression);

#define FP8MOE_CUDA_CHECK(expression)                                                 \
  do {                                                                                \
    const cudaError_t error_ = (expression);                                          \
    if (error_ != cudaSuccess) ::fp8moe::cuda::throw_cuda_error(error_, #expression); \
  } while (false)

// Makes `device` current for a scope: tensors decide where an op runs, not the caller's device.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;  // -1: it was current already
};

struct DeviceInfo {
  int capability = 0;  // 10 major + minor
  int sm_count = 0;
  int64_t l2_bytes = 0;
  int shared_per_block = 0;  // bytes, after opting in
};

// Read once per device and kept.
const DeviceInfo& device_info(Device device);

// How long L2 keeps a line, in the words of createpolicy on sm_90 (CUTLASS: TMA::CacheHintSm90).
inline constexpr uint64_t kLeavesFirst = 0x12F0000000000000;
inline constexpr uint64_t kLeavesInTurn = 0x1000000000000000;

// For what a kernel reads once. Where L2 can hold what is `written`, reads leave first, and the
// next kernel finds the writes there. Where it cannot, reads that leave before the writes do make a
// kernel up to 11% slower (docs/notes).
uint64_t read_once_policy(const Tensor& written);

inline cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

// t = 0, queued; nothing for a tensor not given or empty. On the current device.
void write_zeros(const Tensor& t, Stream stream);

// Opts a kernel in to so much dynamic shared memory on the current device, which CUDA is asked for
// once: it takes 0.3 us. A cudaDeviceReset in between is not noticed.
void allow_shared(const void* kernel, size_t bytes);

// Enough blocks for `work` items, at most `per_sm` for each SM: the grid of a loop over items.
unsigned persistent_grid(Device device, int64_t work, int per_sm);

#if defined(__CUDACC__)
// One launch, checked. `op` names the caller in the error. Above 48 KB of shared memory the kernel
// is opted in first.
template <typename... Params, typename... Args>
void launch(const char* op, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Args&&... args) {
  constexpr size_t kWithoutOptIn = 48 * 1024;
  if (shared_bytes > kWithoutOptIn)
    allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaError_t error = cudaLaunchKernelEx(&config, kernel, static_cast<Args&&>(args)...);
  if (error == cudaSuccess) error = cudaGetLastError();
  if (error != cudaSuccess) throw_cuda_error(error, op);
}
#endif

}  // namespace fp8moe::cuda
