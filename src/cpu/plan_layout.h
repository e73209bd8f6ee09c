// From the number of assignments of each expert to everything of a plan but the assignments' rows.
#pragma once

#include <algorithm>
#include <vector>

#include "fp8moe/plan.h"

namespace fp8moe::cpu {

// col_blocks, from the sections before it.
inline void lay_out_blocks(const RoutingPlan& plan) {
  int32_t* block = plan.col_blocks();
  int32_t* const end = plan.buffer.as<int32_t>() + plan.buffer_size();
  const auto put = [&](int32_t row, int32_t tokens, int32_t rows, int32_t expert) {
    for (int32_t word : {row, tokens, rows, expert}) *block++ = word;
  };
  for (int64_t e = 0; e < plan.experts; ++e) {
    const int32_t tokens = plan.tokens_per_expert()[e], row = plan.row_offsets()[e],
                  rows = plan.row_offsets()[e + 1] - row;
    for (int32_t i = 0; i < tokens; i += kTile)
      put(row + i, std::min<int32_t>(kTile, tokens - i), std::min<int32_t>(kTile, rows - i),
          static_cast<int32_t>(e));
  }
  while (block < end) put(0, 0, 0, -1);
}

// counts [E]: kept ids of each expert, before the capacity. Writes status, tokens_per_expert,
// row_offsets, col_offsets, col_blocks, and -1 in token_of_row and slot_of_row of padding rows.
// The rank of expert e's i-th assignment is counts[0] + ... + counts[e-1] + i; it has a row when
// that is below the capacity, that is when i < tokens_per_expert[e].
inline void lay_out(const std::vector<int64_t>& counts, const RoutingPlan& plan) {
  constexpr int64_t kMaxInt = 0x7FFFFFFF;
  int64_t rank = 0;
  int64_t kept = 0;
  int32_t row = 0;
  int32_t column = 0;
  for (int64_t e = 0; e < plan.experts; ++e) {
    const auto tokens =
        static_cast<int32_t>(std::clamp<int64_t>(plan.capacity - rank, 0, counts[e]));
    const auto rows = static_cast<int32_t>(round_up(tokens, plan.align));
    plan.tokens_per_expert()[e] = tokens;
    plan.row_offsets()[e] = row;
    plan.col_offsets()[e] = column;
    std::fill_n(plan.token_of_row() + row + tokens, rows - tokens, -1);
    std::fill_n(plan.slot_of_row() + row + tokens, rows - tokens, -1);
    row += rows;
    column += static_cast<int32_t>(round_up(tokens, kTile));
    rank += counts[e];
    kept += tokens;
  }
  plan.row_offsets()[plan.experts] = row;
  plan.col_offsets()[plan.experts] = column;
  lay_out_blocks(plan);
  std::fill_n(plan.status(), RoutingPlan::kStatusWords, 0);
  plan.status()[kOverflow] = static_cast<int32_t>(std::min(rank - kept, kMaxInt));
}

// The same of a plan whose experts own capacity / experts rows each: an expert keeps the first
// `segment` of its assignments, and rows past these are padding.
inline void lay_out_segments(const std::vector<int64_t>& counts, int64_t segment,
                             const RoutingPlan& plan) {
  constexpr int64_t kMaxInt = 0x7FFFFFFF;
  const int64_t stride = plan.capacity / plan.experts;
  int64_t dropped = 0;
  int32_t column = 0;
  for (int64_t e = 0; e < plan.experts; ++e) {
    const auto tokens = static_cast<int32_t>(std::min(counts[e], segment));
    const int64_t row = e * stride;
    plan.tokens_per_expert()[e] = tokens;
    plan.row_offsets()[e] = static_cast<int32_t>(row);
    plan.col_offsets()[e] = column;
    std::fill_n(plan.token_of_row() + row + tokens, stride - tokens, -1);
    std::fill_n(plan.slot_of_row() + row + tokens, stride - tokens, -1);
    column += static_cast<int32_t>(round_up(tokens, kTile));
    dropped += counts[e] - tokens;
  }
  plan.row_offsets()[plan.experts] = static_cast<int32_t>(plan.experts * stride);
  plan.col_offsets()[plan.experts] = column;
  lay_out_blocks(plan);
  std::fill_n(plan.status(), RoutingPlan::kStatusWords, 0);
  plan.status()[kOverflow] = static_cast<int32_t>(std::min(dropped, kMaxInt));
}

}  // namespace fp8moe::cpu
