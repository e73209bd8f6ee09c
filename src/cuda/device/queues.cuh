// The queues of queues.h.
#pragma once

#include "cuda/queues.h"

namespace fp8moe::cuda {

// Zero between launches. Each source file has its own.
static __device__ unsigned queues[kQueues];

// How many were taken before this one. The last of `takes` leaves the queue at zero. One thread.
__device__ __forceinline__ int take(int queue, int takes) {
  const unsigned taken = atomicAdd(&queues[queue], 1u);
  if (taken + 1 == static_cast<unsigned>(takes)) queues[queue] = 0;
  return static_cast<int>(taken);
}

}  // namespace fp8moe::cuda
