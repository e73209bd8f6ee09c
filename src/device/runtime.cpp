#include "device/runtime.h"

#include <cutlass/version.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "common/backends.h"

static_assert(CUTLASS_MAJOR > 4 || (CUTLASS_MAJOR == 4 && CUTLASS_MINOR >= 2),
              "the grouped GEMMs need CUTLASS 4.2 or newer");

namespace fp8moe::cuda {

void throw_cuda_error(cudaError_t error, const char* expression) {
  cudaGetLastError();  // a failure reported once is not reported again by the next op
  throw CudaError(std::string(expression) + ": " + cudaGetErrorName(error) + ": " +
                  cudaGetErrorString(error));
}

void write_zeros(const Tensor& t, Stream stream) {
  if (!t.defined() || t.numel() == 0) return;
  FP8MOE_CUDA_CHECK(cudaMemsetAsync(t.data, 0, static_cast<size_t>(t.numel() * size_of(t.dtype)),
                                    stream_of(stream)));
}

DeviceGuard::DeviceGuard(Device device) {
  int current = 0;
  FP8MOE_CUDA_CHECK(cudaGetDevice(&current));
  if (current == device.index) return;
  FP8MOE_CUDA_CHECK(cudaSetDevice(device.index));
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

namespace {

constexpr int kMaxDevices = 64;

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  FP8MOE_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

DeviceInfo read_info(int device) {
  return {.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
                        attribute(cudaDevAttrComputeCapabilityMinor, device),
          .sm_count = attribute(cudaDevAttrMultiProcessorCount, device),
          .l2_bytes = attribute(cudaDevAttrL2CacheSize, device),
          .shared_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)};
}

}  // namespace

const DeviceInfo& device_info(Device device) {
  static std::array<DeviceInfo, kMaxDevices> infos;
  static std::array<std::once_flag, kMaxDevices> once;
  if (device.index < 0 || device.index >= kMaxDevices)
    throw DeviceUnavailable("device indices up to " + std::to_string(kMaxDevices - 1) +
                            " are supported; got cuda:" + std::to_string(device.index));
  const auto index = static_cast<size_t>(device.index);
  std::call_once(once[index], [&] { infos[index] = read_info(device.index); });
  return infos[index];
}

uint64_t read_once_policy(const Tensor& written) {
  const int64_t bytes = written.numel() * size_of(written.dtype);
  return 4 * bytes <= 3 * device_info(written.device).l2_bytes ? kLeavesFirst : kLeavesInTurn;
}

void allow_shared(const void* kernel, size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> allowed;  // by kernel and device
  int device = 0;
  FP8MOE_CUDA_CHECK(cudaGetDevice(&device));
  const std::lock_guard lock(mutex);
  size_t& most = allowed[{kernel, device}];
  if (bytes <= most) return;
  FP8MOE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(bytes)));
  most = bytes;
}

unsigned persistent_grid(Device device, int64_t work, int per_sm) {
  const int64_t slots = int64_t{per_sm} * device_info(device).sm_count;
  return static_cast<unsigned>(std::clamp<int64_t>(work, 1, slots));
}

namespace {

// The oldest driver: minor versions of CUDA run on each other's.
std::string needed_driver() {
  constexpr int kMajor = CUDART_VERSION / 1000;
  const char* oldest = kMajor == 12 ? " (525 or newer)" : kMajor == 13 ? " (580 or newer)" : "";
  return "an NVIDIA driver for CUDA " + std::to_string(kMajor) + oldest;
}

// Why the runtime finds no driver it can use, and what to do.
std::string unusable_driver(cudaError_t error) {
  if (error == cudaErrorStubLibrary)
    return "the toolkit's stub of libcuda: take its folder out of LD_LIBRARY_PATH";
  int version = 0;  // of CUDA, the newest that the driver knows
  if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0)
    return "none: install one, or start the container with its GPUs";
  return "one for CUDA " + std::to_string(version / 1000) + "." +
         std::to_string(version % 1000 / 10) + ": update it, or build with an older CUDA toolkit";
}

// Reads the number of devices, or says in the user's words why there is none.
int device_count(const std::string& tag) {
  int count = 0;  // some failures leave it untouched
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess) return count;
  cudaGetLastError();
  if (error == cudaErrorInsufficientDriver || error == cudaErrorStubLibrary)
    throw DeviceUnavailable(tag + "CUDA tensors need " + needed_driver() + "; got " +
                            unusable_driver(error) + ", or pass CPU tensors");
  if (error == cudaErrorNoDevice)
    throw DeviceUnavailable(tag +
                            "CUDA tensors need a Hopper GPU; got a driver that shows none: look at "
                            "nvidia-smi and CUDA_VISIBLE_DEVICES, or pass CPU tensors");
  throw_cuda_error(error, "cudaGetDeviceCount(&count)");
}

}  // namespace

void require_device(Device device, const char* op) {
  static std::array<std::once_flag, kMaxDevices> accepted;
  const int index = std::clamp(device.index, 0, kMaxDevices - 1);
  // A failed check throws out of call_once, so the next op asks again.
  std::call_once(accepted[static_cast<size_t>(index)], [&] {
    const std::string tag = "[" + std::string(op) + "] ";
    const int count = device_count(tag);
    if (device.index < 0 || device.index >= std::min(count, kMaxDevices))
      throw DeviceUnavailable(tag + "tensors must be on one of the " + std::to_string(count) +
                              " visible GPUs; got cuda:" + std::to_string(device.index));
    const int capability = device_info(device).capability;
    if (capability == 90) return;
    cudaDeviceProp properties{};
    FP8MOE_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index));
    throw UnsupportedDevice(
        tag + "the kernels are built for compute capability 9.0 (Hopper); got " + properties.name +
        ", compute capability " + std::to_string(capability / 10) + "." +
        std::to_string(capability % 10) + "; pass CPU tensors");
  });
}

int64_t sm_count(Device device) {
  require_device(device, "sm_count");
  return device_info(device).sm_count;
}

}  // namespace fp8moe::cuda
