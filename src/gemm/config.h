// Which kernel runs a grouped GEMM: pure functions over plain structs, no device needed.
#pragma once

#include <cstdint>

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

inline constexpr int kTileM = 128, kTileM192 = 192;  // rows of a tile, and of a 192x128 one
inline constexpr int kBlockK = 128;  // one K-block: the quantization tile, and one promotion
// Operands lie in boxes of so many rows of A or B; those of edge and split tiles come so, too.
inline constexpr int kBox = 64;
// TMA reads scales from multiples of 16 bytes on; an expert's rows may start anywhere. So a box
// starts at the multiple of 4 rows before the operand's and holds 4 more than it.
inline constexpr int kScaleBox = kBox + 4;
inline constexpr int kMaxExperts = 1024;

// What decides which tiles there are, in what order. The experts' sizes are read on the device.
struct Sizes {
  const int32_t* row_offsets;        // [E+1] rows
  const int32_t* tokens_per_expert;  // [E]   wgrad
  const int32_t* col_offsets;        // [E+1] wgrad
  int experts;
  int m;             // rows of D per expert (wgrad; unused for rows)
  int n;             // columns of D
  int k_blocks;      // cdiv(K, 128) or Kcap / 128
  int raster_group;  // rows of tiles in a raster group, see place_in_raster_groups
  bool tail_n;       // rows: the last columns are tail tiles in N
};

struct Config {
  int tile_m = kTileM;   // rows of a tile of D; kTileM192 with 128 columns
  int tile_n = 192;      // columns of a tile of D: 128 or 192
  bool split = false;    // rows: a badly filled last wave is cut into split tiles
  int raster_group = 1;  // rows of tiles in a raster group (schedule.h)
};

// Columns computed for n columns of D, tiles being whole.
constexpr int64_t padded_columns(int64_t n, int tile_n) {
  return (n + tile_n - 1) / tile_n * tile_n;
}

// A tile of 192 columns runs at about 1.1 times the rate of one of 128 (docs/notes); the narrow one
// pays where it leaves out more than that. f32 rows are rare and have no wide instance.
constexpr Config choose_config(Kind kind, int64_t n, bool bf16) {
  const bool narrow = 10 * padded_columns(n, 192) > 11 * padded_columns(n, 128);
  return {.tile_n = narrow || (kind == Kind::fprop && !bf16) ? 128 : 192};
}

// Whether experts have so few rows, of Kind::fprop, that reading weights may bound the time.
constexpr bool few_rows(int64_t rows, int64_t experts) { return rows < 2 * kTileM * experts; }

// A tile of Kind::fprop, 128x128 apart, is [64 a, 64 (5 - a)] of D, a being its boxes of A: stages
// hold five boxes whatever the shape, so the CTAs keep the same pace. An expert's last rows, if no
// more than kBox, are tail tiles in M of 64x256; the last columns of D beside tiles of 192 columns,
// if no more than kBox, tail tiles in N of 256x64, but at few rows, where that costs 3%
// (docs/notes).
inline constexpr int kTailMBoxes = 1, kTailNBoxes = 4;
inline constexpr int kTailMColumns = 4 * kBox, kTailNRows = kTailNBoxes * kBox;
constexpr bool has_tail_m(int tile_m, int tile_n) { return tile_m + tile_n == 5 * kBox; }
constexpr bool has_tail_n(int tile_n, int64_t n, int64_t rows, int64_t experts) {
  return tile_n == 192 && n % tile_n > 0 && n % tile_n <= kBox && !few_rows(rows, experts);
}

// The tiles left for the last wave, of the same kind and columns, are cut where each CTA then has
// one part at most: into split ones, [64 a, 64 (3 - a)]. Whole tiles become three of 128x64, tail-N
// ones two, 192x128 ones three of 64x128, tail-M ones two. Their stages hold three boxes, not five.
inline constexpr int kSplitBoxes = 3, kSplitParts = 3;
inline constexpr double kSplitTime = 0.67;  // of a tile of 128x192's, by measurement
constexpr bool cuts_last_wave(int64_t left, int64_t ctas) { return kSplitParts * left <= ctas; }
// What so many tiles take, scheduled statically: each takes `one`, if `split` those of the last
// wave may be cut.
constexpr double tiles_time(int64_t tiles, double one, bool split, int64_t ctas) {
  const int64_t left = tiles % ctas;
  const double last = left == 0 ? 0 : split && cuts_last_wave(left, ctas) ? kSplitTime : one;
  return one * static_cast<double>(tiles / ctas) + last;
}
// In ten waves and more the code of split tiles costs what they gain, 0.5% (docs/notes).
constexpr bool few_waves(int64_t n, int64_t rows, int64_t experts, int64_t sms) {
  return padded_columns(n, 192) / 192 * (rows / kTileM + experts) < 10 * sms;
}

// The tiles of an expert's rows, before any is cut.
struct RowTiles {
  int rows;  // without those of tail tiles in M
  int wide;  // columns of whole tiles
  int whole, tail_n, tail_m;

  constexpr int all() const { return whole + tail_n + tail_m; }
};
constexpr RowTiles row_tiles(int tile_m, int tile_n, const Sizes& sizes, int rows) {
  const int last = rows % tile_m;
  const bool tail_m = has_tail_m(tile_m, tile_n) && last > 0 && last <= kBox;
  if (tail_m) rows -= last;
  const int wide = sizes.tail_n ? sizes.n / tile_n : (sizes.n + tile_n - 1) / tile_n;
  return {.rows = rows,
          .wide = wide,
          .whole = (rows + tile_m - 1) / tile_m * wide,
          .tail_n = sizes.tail_n ? (rows + kTailNRows - 1) / kTailNRows : 0,
          .tail_m = tail_m ? (sizes.n + kTailMColumns - 1) / kTailMColumns : 0};
}

// What evenly routed rows [rows, n] take by one kind of tiles, in the time of a tile of 128x192: a
// model of few waves (docs/notes).
constexpr double waves_time(const Config& kind, int64_t n, int64_t rows, int64_t experts,
                            int64_t sms) {
  Sizes sizes{};
  sizes.n = static_cast<int>(n);
  sizes.tail_n = has_tail_n(kind.tile_n, n, rows, experts);
  const auto each = static_cast<int>((rows + experts - 1) / experts);
  const int64_t tiles = experts * row_tiles(kind.tile_m, kind.tile_n, sizes, each).all();
  const double one = kind.tile_m == kTileM192 ? 0.975 : kind.tile_n == 192 ? 1 : 0.75;
  return tiles_time(tiles, one, kind.split, sms);
}

// Tiles of Kind::fprop are 192x128, 192x128 with three warpgroups to multiply, where waves are many
// and experts have so many rows on the average: few where 192 columns hold more outside of D, more
// where tiles are short, never where 128 hold more (docs/notes).
constexpr bool fprop_takes_192x128(int64_t n, int64_t rows, int64_t k_blocks, int64_t experts) {
  const int64_t m192 = padded_columns(n, 128), wide = padded_columns(n, 192);
  if (m192 > wide) return false;
  const bool fewer = m192 < wide && !has_tail_n(192, n, rows, experts);
  return rows >= (fewer ? 350 : k_blocks >= 32 ? 1000 : 3000) * experts;
}

// Whether the tiles of wgrad contract fewer than `few` K-blocks on the average. Kcap stands for
// the tokens, whose number the host does not know.
constexpr bool few_tokens(int64_t k_blocks, int64_t experts, int64_t few) {
  return k_blocks < few * experts;
}

// Whether CTAs take tiles of wgrad as they come free: those so short that storing them bounds
// the time, or, where f32 is `added`, fetching D. SMs differ in how fast they do that: scheduled
// statically in turn, fast CTAs run ahead by dozens of tiles, and what they have read is gone from
// L2 when the slow ones want it. Longer tiles, and those of rows, are better scheduled statically,
// as neighbours then work on neighbouring tiles (docs/notes).
constexpr bool dynamic_schedule(int64_t k_blocks, int64_t experts, bool added) {
  return few_tokens(k_blocks, experts, added ? 12 : 5);
}

// What CTAs take tiles by: a counter on the device, zero between launches (launch_numbers.h).
inline constexpr int kQueues = 1 << 16;

// Rows of tiles in a raster group (schedule.h), by measurement. Rows: 16, or those of a wave that
// takes all columns. wgrad: fewer where D weighs more.
constexpr int fprop_raster_group(int tile_n, int64_t n, int64_t sms) {
  const int64_t wave = sms * tile_n / padded_columns(n > 0 ? n : 1, tile_n);
  return wave >= 12 && wave < 16 ? static_cast<int>(wave) : 16;
}
constexpr int wgrad_raster_group(int64_t k_blocks, int64_t experts, int64_t n, bool bf16,
                                 bool added) {
  const bool wide = n > 32 * 192;  // a wave of tiles takes less than 4 rows of D's
  return dynamic_schedule(k_blocks, experts, added && wide) ? 4 : bf16 ? 32 : 8;
}

// How the rows [rows, n] of all experts are tiled.
constexpr Config fprop_config(int64_t n, int64_t rows, int64_t k_blocks, int64_t experts, bool bf16,
                              int64_t sms) {
  Config config = choose_config(Kind::fprop, n, bf16);
  const bool few = few_waves(n, rows, experts, sms);
  config.split = few && config.tile_n == 192;
  // With fewer rows it is the routing that decides how many experts get by with tail tiles in M.
  if (bf16 && few && rows >= 96 * experts) {
    constexpr Config kKinds[] = {{kTileM, 192, true}, {kTileM, 128}, {kTileM192, 128, true}};
    double least = waves_time(config, n, rows, experts, sms);
    for (const Config& kind : kKinds) {
      const double time = waves_time(kind, n, rows, experts, sms);
      if (time < least) {
        config = kind;
        least = time;
      }
    }
  } else if (bf16 && !few && fprop_takes_192x128(n, rows, k_blocks, experts)) {
    config.tile_m = kTileM192;
    config.tile_n = 128;
  }
  config.raster_group = fprop_raster_group(config.tile_n, n, sms);
  return config;
}

// Whether tiles of wgrad are 192x128, 192x128, with three warpgroups to multiply: with scales of
// columns always, since a promotion takes longer than a multiply there and two more promotions hide
// more of it than one; else f32 where fewer sums lie outside of D [m, n] so, of tiles that would be
// scheduled statically if D were written, and taken where D is added to (docs/notes).
constexpr bool wgrad_takes_192x128(Kind kind, int64_t m, int64_t n, int64_t k_blocks,
                                   int64_t experts, bool bf16, bool added) {
  return kind == Kind::wgrad_1x128 || (!bf16 && !dynamic_schedule(k_blocks, experts, false) &&
                                       (!added || dynamic_schedule(k_blocks, experts, true)) &&
                                       padded_columns(m, kTileM192) * padded_columns(n, 128) <
                                           padded_columns(m, kTileM) * padded_columns(n, 192));
}

// How dw [m, n] of each expert is tiled.
constexpr Config wgrad_config(Kind kind, int64_t m, int64_t n, int64_t k_blocks, int64_t experts,
                              bool bf16, bool accumulate) {
  Config config = choose_config(kind, n, bf16);
  const bool added = accumulate && !bf16;
  config.raster_group = wgrad_raster_group(k_blocks, experts, n, bf16, added);
  if (wgrad_takes_192x128(kind, m, n, k_blocks, experts, bf16, added)) {
    config.tile_m = kTileM192;
    config.tile_n = 128;
    if (kind == Kind::wgrad_128x128) config.raster_group = 4;
  }
  // f32 of two K-blocks a tile, written and not added to, is 2% faster by 128 columns.
  if (!bf16 && !added && few_tokens(k_blocks, experts, 3)) config.tile_n = 128;
  return config;
}

// Adding f32 sums to D. L2 reduces at a quarter of the rate at which memory can be read and
// written, which short tiles feel; to bring what D holds, add and store costs a tile a wait, which
// long ones feel. Both give the same bits.
constexpr bool loads_output(int64_t k_blocks, int64_t experts) {
  return few_tokens(k_blocks, experts, 20);
}

}  // namespace fp8moe::cuda::gemm
