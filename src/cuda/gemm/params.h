// What a grouped GEMM launch is: plain structs shared by host and kernel. No CUTLASS here.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/gemm/config.h"

namespace fp8moe::cuda::gemm {

struct Params {
  CUtensorMap a, b;                  // FP8, 2-D (K, row), boxes of 128 bytes swizzled
  CUtensorMap scale_a, scale_b;      // f32 1x128 scales, 2-D (row, K-block)
  CUtensorMap d_map;                 // 3-D (column, row, expert), boxes of one slab
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
  bool bf16;     // D; else f32
  bool add;      // tokens_*: to what D holds
};

}  // namespace fp8moe::cuda::gemm
