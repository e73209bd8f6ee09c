// SPDX-License-Identifier: Apache-2.0
// RoutingPlan: where each (token, slot) assignment lands once rows are grouped by expert.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fp8moe/tensor.h"

namespace fp8moe {

// Letters: T tokens, S slots a token, E experts, A = capacity (T*S unless the caller bounds it),
// R rows, Kcap columns of transposed operands. All of it lives in one int32 buffer on the device,
// so a plan costs one allocation and no host read. Built by `route` or `plan_from_counts`.
//
// Rows are expert-major; within an expert in token order, then slot order. Expert e owns rows
// [row_offsets[e], row_offsets[e+1]), of which the first tokens_per_expert[e] carry an assignment
// and the rest are padding. Rows at or past row_offsets[E] are unspecified everywhere. Transposed
// operands [C, Kcap] hold expert e's tokens at columns col_offsets[e] + 0, 1, ...; its segment is
// zero from tokens_per_expert[e] to its end.
struct RoutingPlan {
  Tensor buffer;  // [buffer_size()] i32, at a multiple of 16 bytes
  int64_t tokens = 0;
  int64_t slots = 1;
  int64_t experts = 0;
  int64_t align = 1;     // 1, 16, 32 or 128
  int64_t capacity = 0;  // A: at most this many assignments get a row

  static constexpr int64_t kMaxExperts = 1024;

  bool defined() const { return buffer.defined(); }

  // R = align * floor((A + min(E,A) (align-1)) / align): no routing of A assignments needs more.
  int64_t rows() const { return bound(align); }
  // Kcap: the same with segments aligned to 128.
  int64_t columns() const { return bound(kTile); }

  // Buffer sections, in this order, each starting at a multiple of 4 words (16 bytes).
  static constexpr int64_t kStatusWords = 8;
  int64_t tokens_per_expert_at() const { return kStatusWords; }                      // [E]
  int64_t row_offsets_at() const { return tokens_per_expert_at() + pad4(experts); }  // [E+1]
  int64_t col_offsets_at() const { return row_offsets_at() + pad4(experts + 1); }    // [E+1]
  int64_t token_of_row_at() const { return col_offsets_at() + pad4(experts + 1); }   // [R]
  int64_t slot_of_row_at() const { return token_of_row_at() + pad4(rows()); }        // [R]
  int64_t row_of_at() const { return slot_of_row_at() + pad4(rows()); }              // [T,S]
  int64_t col_blocks_at() const { return row_of_at() + pad4(tokens * slots); }       // [Kcap/128,4]
  int64_t buffer_size() const { return col_blocks_at() + 4 * (columns() / kTile); }

  int32_t* status() const { return buffer.as<int32_t>(); }  // see PlanStatus
  int32_t* tokens_per_expert() const { return buffer.as<int32_t>() + tokens_per_expert_at(); }
  int32_t* row_offsets() const { return buffer.as<int32_t>() + row_offsets_at(); }
  int32_t* col_offsets() const { return buffer.as<int32_t>() + col_offsets_at(); }
  int32_t* token_of_row() const { return buffer.as<int32_t>() + token_of_row_at(); }  // -1: padding
  int32_t* slot_of_row() const { return buffer.as<int32_t>() + slot_of_row_at(); }    // -1: padding
  int32_t* row_of() const { return buffer.as<int32_t>() + row_of_at(); }              // -1: dropped
  // What each 128 columns hold: first row, tokens, rows with padding (at most 128), and the expert,
  // -1 past the last one's columns.
  int32_t* col_blocks() const { return buffer.as<int32_t>() + col_blocks_at(); }

 private:
  int64_t bound(int64_t a) const {
    return a * ((capacity + std::min(experts, capacity) * (a - 1)) / a);
  }
};

// Indices of the counters in a plan's status words. All zero is a clean plan.
enum PlanStatus : int {
  kOverflow = 0,   // assignments dropped because their rank is not below the capacity
  kBadExpert = 1,  // expert ids outside [-1, E)
  kBadScale = 2,   // scales met by an FP8-domain transpose that are not positive powers of two
};

}  // namespace fp8moe
