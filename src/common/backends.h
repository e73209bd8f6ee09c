// The two backends behind the checks. Of every operator's parameters P, already checked, each
// defines `template <> void run(const P& p, Stream stream)`, and workspace_bytes where P has one.
#pragma once

#include "fp8moe/explain.h"
#include "fp8moe/ops.h"

namespace fp8moe {

namespace cpu {
template <class P>
void run(const P& p, Stream stream);
template <class P>
int64_t workspace_bytes(const P& p);
}  // namespace cpu

namespace cuda {
template <class P>
void run(const P& p, Stream stream);
template <class P>
int64_t workspace_bytes(const P& p);

// Refuses a machine without driver or GPU, and a GPU that is not compute capability 9.0.
void require_device(Device device, const char* op);

// What the choice of a grouped GEMM's tiles takes of a GPU; refuses as require_device.
int64_t sm_count(Device device);
}  // namespace cuda

// Runs the checked operator on the backend of `device`: the last statement of an operator.
template <class P>
void dispatch(const P& p, Device device, Stream stream) {
  if (device.type == DeviceType::cpu) return cpu::run(p, stream);
  cuda::require_device(device, P::op);
#if FP8MOE_HAS_CUDA
  cuda::run(p, stream);
#endif
}

template <class P>
int64_t dispatch_workspace(const P& p, Device device) {
  if (device.type == DeviceType::cpu) return cpu::workspace_bytes(p);
  cuda::require_device(device, P::op);
#if FP8MOE_HAS_CUDA
  return cuda::workspace_bytes(p);
#else
  return 0;
#endif
}

}  // namespace fp8moe
