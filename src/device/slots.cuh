// The slots of one token that have a row.
#pragma once

#include <cstdint>

#include "device/reduce.cuh"

namespace fp8moe::cuda {

struct KeptSlot {
  int row;
  int slot;
  float prob;  // 1 without probs
};

__device__ __forceinline__ unsigned lanes_below(unsigned mask) {
  unsigned below;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
  return __popc(mask & below);
}

// row_of and probs [slots] of one token (probs may be null) -> kept, in shared memory, ascending;
// the number of them. The first warp compacts, the whole block waits.
__device__ __forceinline__ int keep_slots(const int32_t* row_of, const float* probs, int slots,
                                          KeptSlot* kept) {
  __shared__ int count;
  if (threadIdx.x < 32) {
    int n = 0;
    for (int first = 0; first < slots; first += 32) {
      const int slot = first + static_cast<int>(threadIdx.x);
      const int row = slot < slots ? __ldg(row_of + slot) : -1;
      const float prob = probs != nullptr && slot < slots ? __ldg(probs + slot) : 1.0f;
      const unsigned has_row = __ballot_sync(kFullWarp, row >= 0);
      if (row >= 0) kept[n + lanes_below(has_row)] = {row, slot, prob};
      n += __popc(has_row);
    }
    if (threadIdx.x == 0) count = n;
  }
  __syncthreads();
  return count;
}

}  // namespace fp8moe::cuda
