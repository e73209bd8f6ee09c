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
// Operands lie in boxes of so many rows of A or B; those of edge and split tiles come so, too.
inline constexpr int kBox = 64;
// TMA reads scales from multiples of 16 bytes on; an expert's rows may start anywhere. So a box
// starts at the multiple of 4 rows before the operand's and holds 4 more than it.
inline constexpr int kScaleBox = kBox + 4;
inline constexpr int kMaxExperts = 1024;

// Tiles of fprop of other shapes, beside those of the table. A stage's boxes of A tell them apart:
// an expert's last rows, if no more than kBox, are tail tiles in M of 64x256; the last columns of
// D, if no more than kBox, tail tiles in N of 256x64. Split tiles have three boxes of both.
inline constexpr int kTailMBoxes = 1, kTailNBoxes = 4;
inline constexpr int kTailMColumns = 4 * kBox, kTailNRows = kTailNBoxes * kBox;
inline constexpr int kSplitBoxes = 3, kSplitParts = 3;

struct TileShape {
  int m, n;                                    // rows and columns of D
  int producer_registers, consumer_registers;  // per thread, by setmaxnreg
  int staging_buffers;                         // per consumer warp, for D on its way out
  bool tail_m, tail_n;                         // fprop: the kinds of tail tiles beside it
  int tail_parts;     // fprop: multiplies of a warpgroup per K-block of a tail tile
  int scale_columns;  // fprop: columns whose block scales a K-block needs; a tail tile in M has two
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

// A stage of fprop holds five boxes in tiles that have tail tiles beside them, so that all keep the
// same pace. Registers are all that a CTA has of them, but for 8 per thread with two consumers,
// where 24 would make the producers spill. With 192 columns or rows an instance writes one type of
// D: with both its loop is 1 to 2% slower.
inline constexpr TileShape kTiles[] = {
    // m, n, registers, staging, tails, parts, scale columns, fprop, wgrad_128x128, wgrad_1x128
    {128, 128, 40, 232, 3, false, false, 2, 128, Outputs::either, Outputs::either, Outputs::none},
    {128, 192, 40, 232, 3, true, true, 2, 192, Outputs::bf16, Outputs::each, Outputs::none},
    {192, 128, 32, 160, 2, true, false, 1, 192, Outputs::bf16, Outputs::f32, Outputs::each},
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
  // The longer side of a tile is in 64s, and touches two blocks of 128.
  static constexpr bool kLongRows = M > N;
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

// Columns computed for n columns of D, tiles being whole.
constexpr int64_t padded(int64_t n, int tile) { return (n + tile - 1) / tile * tile; }

}  // namespace fp8moe::cuda::gemm
