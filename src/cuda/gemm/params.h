// What a grouped GEMM launch is: plain structs shared by host and kernel. No CUTLASS here.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fp8moe::cuda::gemm {

// D = A B^T over the groups of experts, all operands with the contracted dimension contiguous.
// Letters here: a tile is [kTileM, TileN] of D; a K-block is 128 of the contracted dimension.
enum class Kind : int {
  rows,           // experts own rows of A [R, K]; B [E, N, K]. A scaled 1x128, B by blocks
  tokens_block,   // experts own K-blocks of A [M, Kcap], B [N, Kcap]; D [E, M, N]. Blocks on both
  tokens_column,  // the same, both scaled 1x128 along the contracted dimension
};

// What the epilogue does with the fp32 sums.
enum class Output : int { store_bf16, store_f32, add_bf16, add_f32 };

inline constexpr int kTileM = 128;
inline constexpr int kBlockK = 128;  // one K-block: the quantization tile, and one promotion
// TMA reads scales from multiples of 16 bytes on; an expert's rows may start anywhere. So a box
// starts at the multiple of 4 rows before the tile and holds 4 more than it.
inline constexpr int kScaleBoxA = kTileM + 4;
inline constexpr int kMaxExperts = 1024;

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
