// The shapes of a tile of D: one table of every number that depends on the shape.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

namespace fp8moe::cuda::gemm {

// D = A B^T over the groups of experts, all operands with the contracted dimension contiguous.
// Letters here: a tile is [TileM, TileN] of D; a K-block is 128 of the contracted dimension.
enum class Kind : int {
  fprop,          // experts own rows of A [R, K]; B [E, N, K]. A scaled 1x128, B by blocks
  wgrad_128x128,  // experts own K-blocks of A [M, Kcap], B [N, Kcap]; D [E, M, N]. Blocks on both
  wgrad_1x128,    // the same, both scaled 1x128 along the contracted dimension
};

// The types of D that an instance can write.
enum class Output : int { bf16, f32, either };
// The instances of a kind and shape: one per type of D, or one for both types.
enum class Outputs : int { none, bf16, f32, each, either };

inline constexpr int kBlockK = 128;  // one K-block: the quantization tile, and one promotion
// Operands lie in boxes of so many rows of A or B; those of tail tiles come so, too.
inline constexpr int kBox = 64;
// TMA reads scales from multiples of 16 bytes on; an expert's rows may start anywhere. So a box
// starts at the multiple of 4 rows before the operand's and holds 4 more than it.
inline constexpr int kScaleBox = kBox + 4;
inline constexpr int kMaxExperts = 1024;

// Beside tiles of five boxes an expert's last rows, if no more than kBox, are tail tiles of fprop,
// 64x256: one box of A and four of B, so that all tiles keep the same pace.
inline constexpr int kTailColumns = 4 * kBox;

struct TileShape {
  int m, n;                                    // rows and columns of D
  int producer_registers, consumer_registers;  // per thread, by setmaxnreg
  int staging_buffers;                         // per consumer warp, for D on its way out
  bool tail;                                   // fprop: there are tail tiles beside it
  int scale_columns;  // fprop: those whose block scales a K-block needs; a tail tile needs two
  double k_block_ns;  // cost of a K-block on an SM at the power limit, see policy.cpp
  Outputs fprop, wgrad_128x128, wgrad_1x128;

  constexpr Outputs outputs(Kind kind) const {
    return kind == Kind::fprop ? fprop : kind == Kind::wgrad_128x128 ? wgrad_128x128 : wgrad_1x128;
  }
  constexpr bool writes(Kind kind, bool bf16) const {
    const Outputs all = outputs(kind);
    return all == Outputs::either || all == Outputs::each ||
           all == (bf16 ? Outputs::bf16 : Outputs::f32);
  }
};

// Registers are all that a CTA has of them, but for 8 per thread with two consumers,
// where 24 would make the producers spill. With 192 columns or rows an instance writes one type of
// D: with both its loop is 1 to 2% slower.
inline constexpr TileShape kTiles[] = {
    // m, n, registers, staging, tail, scale columns, ns, fprop, wgrad_128x128, wgrad_1x128
    {128, 128, 40, 232, 3, false, 128, 491, Outputs::either, Outputs::either, Outputs::none},
    {128, 192, 40, 232, 3, true, 192, 649, Outputs::bf16, Outputs::each, Outputs::none},
    {192, 128, 32, 160, 2, true, 192, 649, Outputs::bf16, Outputs::f32, Outputs::each},
};

// The row of the table; m and n must be one of them.
constexpr const TileShape& tile_shape(int m, int n) {
  size_t i = 0;
  while (kTiles[i].m != m || kTiles[i].n != n) ++i;
  return kTiles[i];
}

// What follows from a row of the table, at compile time.
template <int M, int N>
struct TileTraits {
  static constexpr TileShape kShape = tile_shape(M, N);
  static constexpr int kConsumers = M / kBox;              // warpgroups that multiply
  static constexpr int kThreads = 128 * (1 + kConsumers);  // warpgroup 0 produces
  static constexpr int kBoxesA = M / kBox;
  static constexpr int kBoxes = kBoxesA + N / kBox;  // of a stage
};

// Calls f.operator()<M, N>() for the shape's m and n.
template <size_t I = 0, typename F>
constexpr decltype(auto) with_tile(const TileShape& shape, F&& f) {
  if constexpr (I + 1 < std::size(kTiles)) {
    if (shape.m != kTiles[I].m || shape.n != kTiles[I].n)
      return with_tile<I + 1>(shape, std::forward<F>(f));
  }
  return f.template operator()<kTiles[I].m, kTiles[I].n>();
}

}  // namespace fp8moe::cuda::gemm
