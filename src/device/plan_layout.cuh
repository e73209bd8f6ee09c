// From the number of assignments of each expert to its place in the plan, by one block.
#pragma once

#include <cstdint>

#include "device/plan.cuh"
#include "device/reduce.cuh"

namespace fp8moe::cuda {

constexpr int kMaxExperts = RoutingPlan::kMaxExperts;  // one thread each
constexpr int kLayoutThreads = 1024;

// Exclusive prefix sum over the block's threads, whole warps; *total is the sum.
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
  int64_t warps = lane < static_cast<int>(blockDim.x) / 32 ? warp_sum[lane] : 0;
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

// A plan under construction.
struct PlanOut {
  int32_t* status;
  int32_t* tokens_per_expert;  // [E]
  int32_t* row_offsets;        // [E+1]
  int32_t* col_offsets;        // [E+1]
  int32_t* token_of_row;       // [R]
  int32_t* slot_of_row;        // [R]
  int32_t* row_of;             // [T, S]
  int4* col_blocks;            // [blocks]
  int blocks;                  // Kcap / 128
  int experts;
  int align;
  int64_t capacity;
};

inline PlanOut out_of(const RoutingPlan& plan) {
  return {.status = plan.status(),
          .tokens_per_expert = plan.tokens_per_expert(),
          .row_offsets = plan.row_offsets(),
          .col_offsets = plan.col_offsets(),
          .token_of_row = plan.token_of_row(),
          .slot_of_row = plan.slot_of_row(),
          .row_of = plan.row_of(),
          .col_blocks = reinterpret_cast<int4*>(plan.col_blocks()),
          .blocks = static_cast<int>(plan.columns() / kTile),
          .experts = static_cast<int>(plan.experts),
          .align = static_cast<int>(plan.align),
          .capacity = plan.capacity};
}

// Where an expert lies. The rank of its i-th assignment is first_rank + i; it has a row, first_row
// + i, when that is below the capacity, that is when i < tokens.
struct ExpertPlace {
  int64_t first_rank;
  int tokens;
  int first_row;
  int first_column;
};

// The place of expert threadIdx.x, which has `count` assignments (0 from plan.experts on). With
// `write` the block also writes what a plan says of experts, and its status (bad: ids of no
// expert).
__device__ __forceinline__ ExpertPlace place_expert(const PlanOut& plan, int64_t count, int64_t bad,
                                                    bool fits, bool write) {
  constexpr int64_t kMaxInt = 0x7FFFFFFF;
  const int e = threadIdx.x;
  int64_t ranks = 0, ends;
  const int64_t rank = fits ? 0 : exclusive_sum(count, &ranks);
  const int64_t left = plan.capacity - rank;
  const int tokens = static_cast<int>(left < 0 ? 0 : left < count ? left : count);
  const int rows = (tokens + plan.align - 1) / plan.align * plan.align;
  const int columns = (tokens + 127) / 128 * 128;
  // Rows and columns are below 2^31: one scan does both.
  const int64_t begin = exclusive_sum(int64_t{columns} << 32 | rows, &ends);
  if (write && e < plan.experts) {
    plan.tokens_per_expert[e] = tokens;
    plan.row_offsets[e] = static_cast<int>(begin & 0xFFFFFFFF);
    plan.col_offsets[e] = static_cast<int>(begin >> 32);
  }
  if (write && e == 0) {
    plan.row_offsets[plan.experts] = static_cast<int>(ends & 0xFFFFFFFF);
    plan.col_offsets[plan.experts] = static_cast<int>(ends >> 32);
  }
  if (write && e < RoutingPlan::kStatusWords) {
    const int64_t overflow = ranks > plan.capacity ? ranks - plan.capacity : 0;
    const int64_t word = e == kOverflow ? overflow : e == kBadExpert ? bad : 0;
    plan.status[e] = static_cast<int32_t>(word < kMaxInt ? word : kMaxInt);
  }
  return {.first_rank = rank,
          .tokens = tokens,
          .first_row = static_cast<int>(begin & 0xFFFFFFFF),
          .first_column = static_cast<int>(begin >> 32)};
}

// -1 in the padding rows, a warp per expert, the experts spread over the grid. tokens and first_row
// [E] in shared memory.
__device__ __forceinline__ void mark_padding(const PlanOut& plan, const int* tokens,
                                             const int* first_row) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (int e = blockIdx.x * warps + warp; e < plan.experts; e += gridDim.x * warps) {
    const int rows = (tokens[e] + plan.align - 1) / plan.align * plan.align;
    for (int i = tokens[e] + lane; i < rows; i += 32) {
      plan.token_of_row[first_row[e] + i] = -1;
      plan.slot_of_row[first_row[e] + i] = -1;
    }
  }
}

// col_blocks, a warp per expert as above, first_column [E] in shared memory, too. An expert has
// `segment` rows, or, where that is 0, its tokens rounded up to the plan's align.
__device__ __forceinline__ void write_blocks(const PlanOut& plan, int segment, const int* tokens,
                                             const int* first_row, const int* first_column) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const auto blocks_of = [](int tokens) { return (tokens + 127) / 128; };
  for (int e = blockIdx.x * warps + warp; e < plan.experts; e += gridDim.x * warps) {
    const int rows = segment > 0 ? segment : (tokens[e] + plan.align - 1) / plan.align * plan.align;
    for (int block = lane; block < blocks_of(tokens[e]); block += 32) {
      const int i = 128 * block;
      plan.col_blocks[first_column[e] / 128 + block] = {first_row[e] + i, min(128, tokens[e] - i),
                                                        min(128, rows - i), e};
    }
  }
  const int last = plan.experts - 1, used = first_column[last] / 128 + blocks_of(tokens[last]);
  for (int i = used + blockIdx.x * blockDim.x + threadIdx.x; i < plan.blocks;
       i += gridDim.x * blockDim.x)
    plan.col_blocks[i] = {0, 0, 0, -1};
}

}  // namespace fp8moe::cuda
