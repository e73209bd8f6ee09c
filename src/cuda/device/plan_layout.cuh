// From the number of assignments of each expert to its place in the plan, by one block.
#pragma once

#include <cstdint>

#include "cuda/device/plan.cuh"
#include "cuda/device/reduce.cuh"

namespace fp8moe::cuda {

constexpr int kMaxExperts = 1024;  // one thread each
constexpr int kLayoutThreads = 1024;

// Exclusive prefix sum over the block's 1024 threads; *total is the sum.
__device__ __forceinline__ int64_t exclusive_sum(int64_t value, int64_t* total) {
  __shared__ int64_t warp_sum[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t before = __shfl_up_sync(kFullWarp, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == 31) warp_sum[warp] = sum;
  __syncthreads();
  int64_t warps = warp_sum[lane];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t before = __shfl_up_sync(kFullWarp, warps, step);
    if (lane >= step) warps += before;
  }
  *total = __shfl_sync(kFullWarp, warps, 31);
  const int64_t before = __shfl_sync(kFullWarp, warps, warp == 0 ? 0 : warp - 1);
  __syncthreads();  // warp_sum may be used again
  return (warp == 0 ? 0 : before) + sum - value;
}

// Where expert threadIdx.x lies. The rank of its i-th assignment is first_rank + i; it has a row
// when that is below the capacity, that is when i < tokens.
struct ExpertPlace {
  int64_t first_rank;
  int tokens;
  int first_row;
  int end_row;
};

// count: assignments of expert threadIdx.x (0 from plan.experts on). With write, the block also
// writes the plan's tokens_per_expert, row_offsets, col_offsets and status (bad: ids that name no
// expert).
__device__ __forceinline__ ExpertPlace place_expert(int64_t count, int64_t capacity, int align,
                                                    const PlanView& plan,
                                                    int32_t* tokens_per_expert,
                                                    int32_t* row_offsets, int32_t* col_offsets,
                                                    bool write, int64_t bad) {
  constexpr int64_t kMaxInt = 0x7FFFFFFF;
  const int e = threadIdx.x;
  int64_t ranks, ends;
  const int64_t rank = exclusive_sum(count, &ranks);
  const int64_t left = capacity - rank;
  const int tokens = static_cast<int>(left < 0 ? 0 : left < count ? left : count);
  const int rows = (tokens + align - 1) / align * align;
  const int columns = (tokens + 127) / 128 * 128;
  // Rows and columns are below 2^31: one scan does both.
  const int64_t begin = exclusive_sum(int64_t{columns} << 32 | rows, &ends);
  const int first_row = static_cast<int>(begin & 0xFFFFFFFF);
  if (write) {
    if (e < plan.experts) {
      tokens_per_expert[e] = tokens;
      row_offsets[e] = first_row;
      col_offsets[e] = static_cast<int>(begin >> 32);
    }
    if (e == 0) {
      row_offsets[plan.experts] = static_cast<int>(ends & 0xFFFFFFFF);
      col_offsets[plan.experts] = static_cast<int>(ends >> 32);
    }
    if (e < RoutingPlan::kStatusWords) {
      const int64_t overflow = ranks > capacity ? ranks - capacity : 0;
      const int64_t word = e == kOverflow ? overflow : e == kBadExpert ? bad : 0;
      plan.status[e] = static_cast<int32_t>(word < kMaxInt ? word : kMaxInt);
    }
  }
  return {
      .first_rank = rank, .tokens = tokens, .first_row = first_row, .end_row = first_row + rows};
}

}  // namespace fp8moe::cuda
