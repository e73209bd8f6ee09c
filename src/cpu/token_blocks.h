// The unit of work of ops that walk an expert's tokens: 128 of them, one 128-column block of a
// transposed operand.
#pragma once

#include <vector>

#include "fp8moe/plan.h"

namespace fp8moe::cpu {

struct TokenBlock {
  int64_t first_row;     // in [0, R)
  int64_t tokens;        // rows that carry an assignment, at most 128
  int64_t rows;          // those and the padding rows after them
  int64_t first_column;  // of the transposed operand, a multiple of 128
};

// Every block of every expert, in row order.
inline std::vector<TokenBlock> token_blocks(const RoutingPlan& plan) {
  std::vector<TokenBlock> blocks;
  for (int64_t e = 0; e < plan.experts; ++e) {
    const int64_t begin = plan.row_offsets()[e];
    const int64_t end = plan.row_offsets()[e + 1];
    const int64_t tokens = plan.tokens_per_expert()[e];
    for (int64_t t = 0; t < tokens; t += kTile)
      blocks.push_back({.first_row = begin + t,
                        .tokens = std::min(kTile, tokens - t),
                        .rows = std::min(kTile, end - begin - t),
                        .first_column = plan.col_offsets()[e] + t});
  }
  return blocks;
}

// The blocks of R ordinary rows, without a plan.
inline std::vector<TokenBlock> token_blocks(int64_t rows) {
  std::vector<TokenBlock> blocks;
  for (int64_t r = 0; r < rows; r += kTile) {
    const int64_t n = std::min(kTile, rows - r);
    blocks.push_back({.first_row = r, .tokens = n, .rows = n, .first_column = r});
  }
  return blocks;
}

}  // namespace fp8moe::cpu
