// What a grouped GEMM launch is: plain structs shared by host and kernel. No CUTLASS here.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gemm/schedule.h"

namespace fp8moe::cuda::gemm {

// A and B as TMA reads them.
struct OperandMaps {
  CUtensorMap a, b;            // FP8, 2-D (K, row), 128 bytes swizzled, of all rows of a tile
  CUtensorMap a_tail, b_tail;  // the same of a tail tile
  CUtensorMap scale_a;         // f32 1x128 scales, 2-D (row, K-block)
};

struct Params : Sizes {
  OperandMaps pair[2];          // fprop: the second's one K-block comes last
  CUtensorMap scale_b;          // as OperandMaps::scale_a
  CUtensorMap d_box;            // 3-D (column, row, expert): 128 bytes of output_box_rows rows
  CUtensorMap d_strip;          // 4-D (0, row, box, expert): strip_boxes such boxes side by side
  const float* block_scale_a;   // [cdiv(M,128), K-blocks]         wgrad_128x128
  const float* block_scale_b;   // [(E,) cdiv(N,128), K-blocks]    rows, wgrad_128x128
  const float* block_scale_b2;  // [E, cdiv(N,128)]: of the second pair
  int first_k_blocks;           // fprop: of the first pair
  void* d;                      // [R, N] or [E, M, N]
  bool bf16;                    // D; else f32
  bool strips;                  // D's columns are whole boxes, and it is not f32 of rows: d_strip
  bool add;                     // wgrad: to what D holds
  bool load_d;  // and D is f32: what it holds is brought and added to, else it is reduced into
  unsigned* queue = nullptr;  // wgrad: a word of zero, where CTAs claim tiles as they come free
};

}  // namespace fp8moe::cuda::gemm
