// copy_rows: a copy of the driver's for each place.
#include "common/backends.h"
#include "device/runtime.h"

namespace fp8moe::cuda {

template <>
void run(const CopyRows& p, Stream stream) {
  const DeviceGuard guard(p.out.device);
  cudaStream_t on = stream_of(stream);
  if (p.beside != 0) {
    cudaEvent_t until_now{};
    FP8MOE_CUDA_CHECK(cudaEventCreateWithFlags(&until_now, cudaEventDisableTiming));
    FP8MOE_CUDA_CHECK(cudaEventRecord(until_now, on));
    on = reinterpret_cast<cudaStream_t>(p.beside);
    FP8MOE_CUDA_CHECK(cudaStreamWaitEvent(on, until_now, 0));
    FP8MOE_CUDA_CHECK(cudaEventDestroy(until_now));
  }
  const int64_t width = p.out.shape[1] * size_of(p.out.dtype);
  for (int64_t i = 0; i < p.places.shape[0]; ++i) {
    const auto* place = p.places.as<const int64_t>() + 3 * i;
    if (place[1] == 0) continue;
    FP8MOE_CUDA_CHECK(cudaMemcpyAsync(
        p.out.as<uint8_t>() + place[2] * width, reinterpret_cast<const void*>(place[0]),
        static_cast<size_t>(place[1] * width), cudaMemcpyDeviceToDevice, on));
  }
}

}  // namespace fp8moe::cuda
