// What a grouped GEMM launch is: plain structs shared by host and kernel. No CUTLASS here.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/gemm/config.h"

namespace fp8moe::cuda::gemm {

// What the epilogue does with the fp32 sums.
enum class Output : int { store_bf16, store_f32, add_bf16, add_f32 };

struct Params {
  CUtensorMap a, b;                  // FP8, 3-D (K, row, expert), boxes of 128 bytes swizzled
  CUtensorMap scale_a, scale_b;      // f32 1x128 scales, 2-D (row, K-block)
  const float* block_scale_a;        // [cdiv(M,128), K-blocks]         tokens_block
  const float* block_scale_b;        // [(E,) cdiv(N,128), K-blocks]    rows, tokens_block
  const int32_t* row_offsets;        // [E+1] rows
  const int32_t* tokens_per_expert;  // [E]   tokens_*
  const int32_t* col_offsets;        // [E+1] tokens_*
  void* d;                           // [R, N] or [E, M, N]
  int experts;
  int m;         // rows of D per expert (tokens_*; unused for rows)
  int n;         // columns of D
  int k_blocks;  // cdiv(K, 128) or Kcap / 128
  Output output;
  int column_group;  // 16 or 32: column_operand_map of b
};

}  // namespace fp8moe::cuda::gemm
