// copy_rows: a copy of the driver's for each place.
#include "common/backends.h"
#include "device/runtime.h"

namespace fp8moe::cuda {

template <>
void run(const CopyRows& p, Stream stream) {
  const DeviceGuard guard(p.out.device);
  const int64_t width = p.out.shape[1] * size_of(p.out.dtype);
  for (int64_t i = 0; i < p.places.shape[0]; ++i) {
    const auto* place = p.places.as<const int64_t>() + 3 * i;
    if (place[1] == 0) continue;
    FP8MOE_CUDA_CHECK(cudaMemcpyAsync(
        p.out.as<uint8_t>() + place[2] * width, reinterpret_cast<const void*>(place[0]),
        static_cast<size_t>(place[1] * width), cudaMemcpyDeviceToDevice, stream_of(stream)));
  }
}

}  // namespace fp8moe::cuda
