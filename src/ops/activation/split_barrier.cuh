// A barrier of the warps of a block that they arrive at and wait for at different places, so that
// what lies between hides the wait. A warp waits for each of its arrivals before the next.
#pragma once

#include <cstdint>

#include "device/bulk.cuh"

namespace fp8moe::cuda {

struct SplitBarrier {
  uint64_t state;

  // By one thread, before __syncthreads().
  __device__ __forceinline__ void start(int warps) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(warps)
                 : "memory");
  }
  // By a whole warp: what its lanes did to shared memory before is seen by who has waited.
  __device__ __forceinline__ void arrive() {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
  }
  // For the arrivals of turn 0, 1, ... By a whole warp, which stays together.
  __device__ __forceinline__ void wait(int turn) {
    uint32_t done;
    do {
      asm volatile(
          "{\n .reg .pred done;\n"
          " mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
          " selp.u32 %0, 1, 0, done;\n}"
          : "=r"(done)
          : "r"(shared_address(&state)), "r"(turn & 1)
          : "memory");
    } while (!__all_sync(0xFFFFFFFFu, done));
  }
};

}  // namespace fp8moe::cuda
