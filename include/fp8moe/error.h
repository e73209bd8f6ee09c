// SPDX-License-Identifier: Apache-2.0
// The exceptions of the C++ API. Messages read "[op] rule; got value".
#pragma once

#include <stdexcept>

#if defined(_WIN32)
#define FP8MOE_API
#else
#define FP8MOE_API __attribute__((visibility("default")))
#endif

namespace fp8moe {

// A caller's mistake (shape, dtype, device, layout, value): std::invalid_argument, so Python sees
// ValueError. Nothing has been written when it is thrown.
class FP8MOE_API InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// CUDA tensors were given, but the build has no CUDA backend, or the machine no usable driver or
// no GPU.
class FP8MOE_API DeviceUnavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A GPU is there, but not one the kernels were built for (compute capability 9.0).
class FP8MOE_API UnsupportedDevice : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A CUDA call failed; the message names the failed expression and CUDA's own text.
class FP8MOE_API CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace fp8moe
