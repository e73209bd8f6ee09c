// A plan as kernels see it, and its division into blocks of 128 tokens of one expert.
#pragma once

#include <cstdint>

#include "fp8moe/plan.h"

namespace fp8moe::cuda {

struct PlanView {
  const int32_t* tokens_per_expert = nullptr;  // [E]; nullptr: no plan, every row is ordinary
  const int32_t* row_offsets = nullptr;        // [E+1]
  const int32_t* col_offsets = nullptr;        // [E+1]
  const int32_t* token_of_row = nullptr;       // [R], -1: padding
  const int32_t* slot_of_row = nullptr;        // [R]
  const int32_t* row_of = nullptr;             // [T, S], -1: dropped
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

// The block of column tile `index`, found by a whole warp: every lane counts the experts that begin
// at or before it, so the search waits for memory once.
__device__ __forceinline__ TokenBlock token_block_of_warp(const PlanView& plan, int index) {
  const int column = index * 128;
  int begun = 0;
  for (int e = threadIdx.x % 32; e < plan.experts; e += 32) begun += plan.col_offsets[e] <= column;
  const int expert = static_cast<int>(__reduce_add_sync(0xFFFFFFFFu, begun)) - 1;
  if (column >= plan.col_offsets[plan.experts]) return {};
  const int within = column - plan.col_offsets[expert];
  const int first = plan.row_offsets[expert] + within;
  return {.first_row = first,
          .tokens = max(0, min(128, plan.tokens_per_expert[expert] - within)),
          .rows = max(0, min(128, plan.row_offsets[expert + 1] - first)),
          .expert = expert};
}

}  // namespace fp8moe::cuda
