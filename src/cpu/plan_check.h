// What the CPU backend reads from a plan's buffer is checked before it is used as an index: a
// buffer that was never filled, or was filled for other sizes, is an error and not a wild access.
#pragma once

#include "common/check.h"
#include "cpu/multiversion.h"
#include "fp8moe/plan.h"

namespace fp8moe::cpu {
namespace {

// Every v[i] lies in [low, limit).
FP8MOE_CLONES bool within(const int32_t* v, int64_t n, int64_t low, int64_t limit) {
  const auto first = static_cast<int32_t>(low);
  const auto last = static_cast<int32_t>(limit - 1);
  int32_t outside = 0;
  for (int64_t i = 0; i < n; ++i) outside |= (v[i] < first) | (v[i] > last);
  return outside == 0;
}

// The rows without a token are those without a slot.
FP8MOE_CLONES bool paired(const int32_t* token, const int32_t* slot, int64_t n) {
  int32_t differ = 0;
  for (int64_t i = 0; i < n; ++i) differ |= token[i] ^ slot[i];
  return differ >= 0;
}

// tokens_per_expert and row_offsets: segments within the R rows, in order, aligned, with room for
// their tokens.
inline void check_offsets(const char* op, const RoutingPlan& plan) {
  int64_t end = 0;
  for (int64_t e = 0; e < plan.experts; ++e) {
    const int64_t count = plan.tokens_per_expert()[e];
    const int64_t first = plan.row_offsets()[e];
    const int64_t next = plan.row_offsets()[e + 1];
    FP8MOE_CHECK(count >= 0 && first == end && first % plan.align == 0 && first + count <= next &&
                     next <= plan.rows(),
                 "[", op, "] plan must be filled by route or plan_from_counts; got ", count,
                 " tokens in rows [", first, ", ", next, ") of ", plan.rows(), " for expert ", e);
    end = next;
  }
}

// The same, and col_offsets within the Kcap columns.
inline void check_columns(const char* op, const RoutingPlan& plan) {
  check_offsets(op, plan);
  int64_t end = 0;
  for (int64_t e = 0; e < plan.experts; ++e) {
    const int64_t count = plan.tokens_per_expert()[e];
    const int64_t first = plan.col_offsets()[e];
    FP8MOE_CHECK(first >= end && first % kTile == 0 && first + count <= plan.columns(), "[", op,
                 "] plan must be filled by route or plan_from_counts; got ", count,
                 " tokens from column ", first, " on of ", plan.columns(), " for expert ", e);
    end = first + round_up(count, kTile);
  }
}

// The offsets, and a token and a slot in range for each row that has them, -1 for padding. least:
// -1 where padding may lie among an expert's rows, as in a plan from a row_id_map.
inline void check_rows(const char* op, const RoutingPlan& plan, int64_t least = 0) {
  check_offsets(op, plan);
  for (int64_t e = 0; e < plan.experts; ++e) {
    const int64_t first = plan.row_offsets()[e];
    const int64_t count = plan.tokens_per_expert()[e];
    const int64_t padding = plan.row_offsets()[e + 1] - first - count;
    FP8MOE_CHECK(within(plan.token_of_row() + first, count, least, plan.tokens) &&
                     within(plan.slot_of_row() + first, count, least, plan.slots) &&
                     paired(plan.token_of_row() + first, plan.slot_of_row() + first, count) &&
                     within(plan.token_of_row() + first + count, padding, -1, 0),
                 "[", op,
                 "] plan must be filled by route or plan_from_counts; got a row of expert ", e,
                 " whose token or slot is out of range");
  }
}

// row_of: a row or -1.
inline void check_row_of(const char* op, const RoutingPlan& plan) {
  FP8MOE_CHECK(within(plan.row_of(), plan.tokens * plan.slots, -1, plan.rows()), "[", op,
               "] plan must be filled by route or plan_from_counts; got a row_of out of range");
}

}  // namespace
}  // namespace fp8moe::cpu
