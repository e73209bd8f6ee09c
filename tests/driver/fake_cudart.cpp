// CUDA's runtime as far as require_device asks it, on a machine with one GPU: FAKE_GPU, its name,
// of FAKE_CAPABILITY (80).
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "no name"; }
const char* cudaGetErrorString(cudaError_t) { return "no text"; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 99000, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  const int capability = std::atoi(std::getenv("FAKE_CAPABILITY"));
  *value = which == cudaDevAttrComputeCapabilityMajor   ? capability / 10
           : which == cudaDevAttrComputeCapabilityMinor ? capability % 10
                                                        : 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::snprintf(properties->name, sizeof properties->name, "%s", std::getenv("FAKE_GPU"));
  return cudaSuccess;
}
}
