// A plan as kernels see it, and its division into blocks of 128 tokens of one expert.
#pragma once

#include <cstdint>

#include "device/memory.cuh"
#include "device/reduce.cuh"
#include "fp8moe/plan.h"

namespace fp8moe::cuda {

struct PlanView {
  const int32_t* tokens_per_expert = nullptr;  // [E]; nullptr: no plan, every row is ordinary
  const int32_t* row_offsets = nullptr;        // [E+1]
  const int32_t* col_offsets = nullptr;        // [E+1]
  const int32_t* token_of_row = nullptr;       // [R], -1: padding
  const int32_t* slot_of_row = nullptr;        // [R]
  const int32_t* row_of = nullptr;             // [T, S], -1: dropped
  const int4* col_blocks = nullptr;            // [Kcap / 128]
  int32_t* status = nullptr;
  int experts = 0;
};

inline PlanView view_of(const RoutingPlan& plan) {
  if (!plan.defined()) return {};
  return {.tokens_per_expert = plan.tokens_per_expert(),
          .row_offsets = plan.row_offsets(),
          .col_offsets = plan.col_offsets(),
          .token_of_row = plan.token_of_row(),
          .slot_of_row = plan.slot_of_row(),
          .row_of = plan.row_of(),
          .col_blocks = reinterpret_cast<const int4*>(plan.col_blocks()),
          .status = plan.status(),
          .experts = static_cast<int>(plan.experts)};
}

// Columns [128 index, 128 index + 128) of a transposed operand: `tokens` rows from first_row on are
// transposed, the rest of the columns is zero; rows up to `rows` are the expert's, padding
// included.
struct TokenBlock {
  int first_row = 0;
  int tokens = 0;
  int rows = 0;
  int expert = -1;  // -1: past the last expert's columns
};

__device__ __forceinline__ TokenBlock token_block(const PlanView& plan, int index) {
  const int4 b = __ldg(plan.col_blocks + index);
  return {.first_row = b.x, .tokens = b.y, .rows = b.z, .expert = b.w};
}

// The block at place `index` of an order by 2^log windows of tokens: the first 2^-log of each
// expert's blocks, then the second of each, and so on; past the last block `index` itself. By a
// whole warp.
__device__ __forceinline__ int block_in_windows(const PlanView& plan, int log, int index) {
  const int all = plan.col_offsets[plan.experts] / 128, lane = threadIdx.x % 32;
  if (index >= all) return index;
  // Where window w begins in expert e; and in all the experts of this lane.
  const auto start = [&](int e, int w) {
    return (plan.col_offsets[e + 1] - plan.col_offsets[e]) / 128 * w >> log;
  };
  const auto starts = [&](int w) {
    int sum = 0;
    for (int e = lane; e < plan.experts; e += 32) sum += start(e, w);
    return sum;
  };
  int window = (index << log) / all;  // or, as starts are rounded down, a later one
  int mine = starts(window), next = starts(window + 1);
  int begin = __reduce_add_sync(kFullWarp, mine), end = __reduce_add_sync(kFullWarp, next);
  while (index >= end) {
    ++window, mine = next, begin = end;
    next = starts(window + 1), end = __reduce_add_sync(kFullWarp, next);
  }
  int through = next - mine;  // blocks of the window up to this lane's last expert
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kFullWarp, through, step);
    if (lane >= step) through += before;
  }
  const int owner = __ffs(__ballot_sync(kFullWarp, through > index - begin)) - 1;
  int block = 0;
  if (lane == owner) {
    int left = index - begin - (through - (next - mine)), e = lane;
    for (int n; left >= (n = start(e, window + 1) - start(e, window)); e += 32) left -= n;
    block = plan.col_offsets[e] / 128 + start(e, window) + left;
  }
  return __shfl_sync(kFullWarp, block, owner);
}

// The three arrays that the search below reads, of at most 1,024 experts, to L2: at once, before
// the first of them is waited for. By the first three warps, one each.
__device__ __forceinline__ void prefetch_plan(const PlanView& plan) {
  const int warp = threadIdx.x / 32, e = 32 * (threadIdx.x % 32);
  const int32_t* array = warp == 0   ? plan.tokens_per_expert
                         : warp == 1 ? plan.row_offsets
                                     : plan.col_offsets;
  if (warp < 3 && e <= plan.experts) prefetch_line(array + e);
}

// An expert from such a block on: all the rows that are left of it, and the block after its last.
struct ExpertRest {
  int first_row = 0;
  int tokens = 0;  // may be negative: the segment's padding is a block or more
  int rows = 0;
  int expert = -1;
  int end = 0;

  __device__ __forceinline__ TokenBlock block() const {
    return {first_row, max(0, min(128, tokens)), max(0, min(128, rows)), expert};
  }
};

// The expert of column tile `index`, found by a whole warp: every lane counts the experts that
// begin at or before it and reads what there is to know of them, so the search waits for memory
// once.
__device__ __forceinline__ ExpertRest expert_rest_of_warp(const PlanView& plan, int index) {
  const int column = index * 128;
  int begun = 0;
  int first_column = 0, first_row = 0, end_row = 0, end_column = 0, tokens = 0;  // of the last one
  for (int e = threadIdx.x % 32; e < plan.experts; e += 32) {
    const int at = plan.col_offsets[e], next = plan.col_offsets[e + 1], row = plan.row_offsets[e],
              next_row = plan.row_offsets[e + 1], count = plan.tokens_per_expert[e];
    if (at > column) continue;
    ++begun;
    first_column = at, end_column = next, first_row = row, end_row = next_row, tokens = count;
  }
  const int all_columns = plan.col_offsets[plan.experts];
  const int expert = static_cast<int>(__reduce_add_sync(kFullWarp, begun)) - 1, lane = expert % 32;
  const int within = column - __shfl_sync(kFullWarp, first_column, lane);
  const int first = __shfl_sync(kFullWarp, first_row, lane) + within;
  const ExpertRest rest = {.first_row = first,
                           .tokens = __shfl_sync(kFullWarp, tokens, lane) - within,
                           .rows = __shfl_sync(kFullWarp, end_row, lane) - first,
                           .expert = expert,
                           .end = __shfl_sync(kFullWarp, end_column, lane) / 128};
  return column < all_columns ? rest : ExpertRest{};
}

}  // namespace fp8moe::cuda
