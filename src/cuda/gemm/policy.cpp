#include "cuda/gemm/policy.h"

#include <optional>
#include <string>

#include "cuda/gemm/schedule.h"
#include "fp8moe/error.h"

namespace fp8moe::cuda::gemm {
namespace {

inline constexpr int kTileM = 128, kTileM192 = 192;
struct Config {
  int tile_m = kTileM;   // rows of a tile of D; kTileM192 with 128 columns
  int tile_n = 192;      // columns of a tile of D: 128 or 192
  bool split = false;    // rows: a badly filled last wave is cut into split tiles
  int raster_group = 1;  // rows of tiles in a raster group (schedule.h)
};
constexpr int64_t padded_columns(int64_t n, int tile_n) { return padded(n, tile_n); }
// A tile of 192 columns runs at about 1.1 times the rate of one of 128 (docs/notes); the narrow one
// pays where it leaves out more than that. f32 rows are rare and have no wide instance.
constexpr Config choose_config(Kind kind, int64_t n, bool bf16) {
  const bool narrow = 10 * padded_columns(n, 192) > 11 * padded_columns(n, 128);
  return {.tile_n = narrow || (kind == Kind::fprop && !bf16) ? 128 : 192};
}

// Whether experts have so few rows, of Kind::fprop, that reading weights may bound the time.
constexpr bool few_rows(int64_t rows, int64_t experts) { return rows < 2 * kTileM * experts; }

constexpr bool has_tail_n(int tile_n, int64_t n, int64_t rows, int64_t experts) {
  return tile_n == 192 && n % tile_n > 0 && n % tile_n <= kBox && !few_rows(rows, experts);
}

// In ten waves and more the code of split tiles costs what they gain, 0.5% (docs/notes).
constexpr bool few_waves(int64_t n, int64_t rows, int64_t experts, int64_t sms) {
  return padded_columns(n, 192) / 192 * (rows / kTileM + experts) < 10 * sms;
}

// What evenly routed rows [rows, n] take by one kind of tiles, in the time of a tile of 128x192: a
// model of few waves (docs/notes).
constexpr double waves_time(const Config& kind, int64_t n, int64_t rows, int64_t experts,
                            int64_t sms) {
  Sizes sizes{};
  sizes.n = static_cast<int>(n);
  sizes.tail_n = has_tail_n(kind.tile_n, n, rows, experts);
  const auto each = static_cast<int>((rows + experts - 1) / experts);
  const int64_t tiles =
      experts * row_tiles(tile_shape(kind.tile_m, kind.tile_n), sizes, each).all();
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

std::optional<Candidate>& forced() {
  static thread_local std::optional<Candidate> candidate;
  return candidate;
}

Candidate parent(const Problem& p, int64_t sms) {
  const bool rows = p.kind == Kind::fprop, added = p.add && !p.bf16;
  const Config c = rows ? fprop_config(p.n, p.m, p.k_blocks, p.experts, p.bf16, sms)
                        : wgrad_config(p.kind, p.m, p.n, p.k_blocks, p.experts, p.bf16, p.add);
  return {.tile_m = c.tile_m,
          .tile_n = c.tile_n,
          .split = c.split,
          .tail_n = rows && has_tail_n(c.tile_n, p.n, p.m, p.experts),
          .raster_group = c.raster_group,
          .dynamic = !rows && dynamic_schedule(p.k_blocks, p.experts, added),
          .load_d = !rows && added && loads_output(p.k_blocks, p.experts)};
}

}  // namespace

bool is_legal(const Problem& p, const Candidate& c) {
  const TileShape& shape = shape_of(c);
  const bool rows = p.kind == Kind::fprop, left_n = p.n % shape.n > 0 && p.n % shape.n <= kBox;
  return shape.writes(p.kind, p.bf16) && c.raster_group > 0 && (rows || !(c.split || c.tail_n)) &&
         (!c.split || (shape.tail_m && p.bf16)) && (!c.tail_n || (shape.tail_n && left_n)) &&
         (!rows || !(c.dynamic || c.load_d)) && (!c.load_d || (p.add && !p.bf16));
}

std::vector<Candidate> candidates(const Problem& problem) {
  std::vector<Candidate> legal;
  for (const TileShape& shape : kTiles)
    for (const int raster_group : {4, 8, 12, 16, 32})
      for (const bool split : {false, true})
        for (const bool tail_n : {false, true})
          for (const bool dynamic : {false, true})
            for (const bool load_d : {false, true}) {
              const Candidate c{shape.m, shape.n, split, tail_n, raster_group, dynamic, load_d};
              const bool raster = problem.kind == Kind::fprop
                                      ? raster_group >= 8 && raster_group <= 16
                                      : raster_group != 12 && raster_group != 16;
              if (raster && is_legal(problem, c)) legal.push_back(c);
            }
  return legal;
}

Candidate choose(const Problem& problem, int64_t sms) {
  const std::optional<Candidate>& given = forced();
  if (!given) return parent(problem, sms);
  if (!is_legal(problem, *given))
    throw InvalidArgument("the forced candidate is not legal for this grouped GEMM");
  return *given;
}

void force(const Candidate* candidate) {
  forced() = candidate ? std::optional(*candidate) : std::nullopt;
}

}  // namespace fp8moe::cuda::gemm
