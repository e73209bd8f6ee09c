// C = A B^T over FP8 operands whose contracted dimension is contiguous, B in E4M3: what
// grouped_gemm and grouped_gemm_wgrad are made of, one product per expert.
#pragma once

#include <vector>

#include "fp8moe/tensor.h"

namespace fp8moe::cpu {

// scale(row, block) = scales[row / row_tile * row_step + block * block_step]
struct BlockOperand {
  const uint8_t* codes;  // [rows, depth]
  int64_t stride;        // elements from row to row
  DType format;
  const float* scales;
  int64_t row_tile;
  int64_t row_step;
  int64_t block_step;

  // Rows [row, ...) and contracted elements [column, ...) of q's matrix; both start a tile, row
  // also anywhere when the tiles are 1x128.
  static BlockOperand of(const Fp8Tensor& q, int64_t matrix, int64_t row, int64_t column);
  float scale(int64_t row, int64_t block) const {
    return scales[row / row_tile * row_step + block * block_step];
  }
};

struct BlockProduct {
  BlockOperand a;
  BlockOperand b;
  int64_t rows;
  int64_t columns;
  int64_t depth;
  int64_t out;  // offset of C's first element in the output, whose rows are `columns` long
  BlockOperand a2{}, b2{};  // a second pair, whose blocks are added after the first's
  int64_t depth2 = 0;
};

// out[product] (+)= sum over 128-blocks of the depth of partial * (scale_a scale_b): each partial a
// f32 sum in ascending order, the blocks added in ascending order in f32, rounded once to out's
// dtype and then, under accumulate, added to what is there. No thread count changes a bit.
void multiply(const std::vector<BlockProduct>& products, const Tensor& out, bool accumulate);

}  // namespace fp8moe::cpu
