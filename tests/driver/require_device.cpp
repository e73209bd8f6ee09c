// What the first CUDA tensor on cuda:0 would be told; "runs" where nothing is amiss.
#include <cstdio>

#include "common/backends.h"

int main() {
  try {
    fp8moe::cuda::require_device({fp8moe::DeviceType::cuda, 0}, "quantize");
    std::puts("runs");
  } catch (const std::exception& e) {
    std::puts(e.what());
  }
}
