// Which tiles a CTA works on, in what order: static, computed by each CTA for itself, but for
// tiles of wgrad that are taken (`jump_to`). Plain C++, so that a host can walk it, too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/host_device.h"
#include "gemm/tile.h"

namespace fp8moe::cuda::gemm {

// What decides which tiles there are, in what order. The experts' sizes are read on the device.
struct Sizes {
  const int32_t* row_offsets;        // [E+1] rows
  const int32_t* tokens_per_expert;  // [E]   wgrad
  const int32_t* col_offsets;        // [E+1] wgrad
  int first_expert;                  // of this launch
  int experts;                       // those up to this launch's last
  int m;                             // rows of D per expert (wgrad; unused for rows)
  int n;                             // columns of D
  int k_blocks;                      // cdiv(K, 128) or Kcap / 128
  int raster_group;                  // rows of tiles in a raster group, see place_in_raster_groups
};

// The tiles of an expert's rows: whole ones of the first `rows`, tail tiles of the others.
struct RowTiles {
  int rows;
  int whole, tail;

  constexpr int all() const { return whole + tail; }
};
constexpr int tiles_in(int length, int tile) { return (length + tile - 1) / tile; }
constexpr RowTiles row_tiles(const TileShape& shape, int n, int rows, int rows_of_whole) {
  return {.rows = rows_of_whole,
          .whole = tiles_in(rows_of_whole, shape.m) * tiles_in(n, shape.n),
          .tail = tiles_in(rows - rows_of_whole, kBox) * tiles_in(n, kTailColumns)};
}
constexpr RowTiles row_tiles(const TileShape& shape, int n, int rows) {
  const int last = rows % shape.m;
  return row_tiles(shape, n, rows, shape.tail && last <= kBox ? rows - last : rows);
}

// The last expert's tiles, `before` tiles into the order. Rows of whole tiles that begin another
// wave become tail tiles, where one wave holds them: they take less time.
constexpr RowTiles fill_last_wave(const TileShape& shape, int n, int rows, int before, int ctas,
                                  const RowTiles& tiles) {
  const int over = (before + tiles.whole) % ctas,
            kept = tiles_in(tiles.rows, shape.m) - tiles_in(over, tiles_in(n, shape.n));
  if (!shape.tail || over == 0 || kept < 0) return tiles;
  const RowTiles filled = row_tiles(shape, n, rows, kept * shape.m);
  return filled.tail <= ctas ? filled : tiles;
}

// Whether an expert's tail tiles lie beside its whole ones: they read the same columns of B, which
// weigh most where there are few rows. With more rows CTAs leave step by it (docs/notes).
constexpr bool tails_beside(const TileShape& shape, int raster_group, const RowTiles& tiles) {
  return tiles.tail > 0 && tiles.rows < raster_group * shape.m;
}

inline constexpr int kNoMore = -1;  // as Tile::k_blocks: the last tile was the last

struct alignas(16) Tile {
  int expert = 0;
  int row = 0;      // first row of A
  int rows = 0;     // rows of D from here on; none or less: nothing to store
  int column = 0;   // first column of D
  int tail = 0;     // whether it is a tail tile
  int k_first = 0;  // first K-block
  int k_blocks = 0;
  int whole_k_blocks = 0;  // those of a whole tile, else none: all that its first multiply asks
};

// Tile `within` of an expert, in raster groups of rows of tiles, columns of tiles outside: what the
// SMs work on at one time stays near square, so it reads few distinct bytes and finds them in L2,
// and SMs that are neighbours read the same B, the larger operand.
struct Place {
  int row, column;
};

FP8MOE_HD Place place_in_raster_groups(int raster_group, int within, int tiles_m, int tiles_n) {
  const int first = within / (tiles_n * raster_group) * raster_group,
            in_group = within - first * tiles_n;
  const int height = std::min(raster_group, tiles_m - first), column = in_group / height;
  return {first + in_group - column * height, column};
}

template <Kind kKind, int TileM, int TileN>
class Schedule;

// Tiles of an expert's rows, scheduled statically: whole ones, then tail tiles; of few rows strip
// by strip of the columns, so that both read a strip's B.
template <int TileM, int TileN>
class Schedule<Kind::fprop, TileM, TileN> {
 public:
  // row_offsets: in shared memory.
  FP8MOE_HD Schedule(const Sizes& sizes, const int32_t* row_offsets, int cta, int ctas)
      : sizes_(sizes),
        row_offsets_(row_offsets),
        at_(cta),
        ctas_(ctas),
        expert_(sizes.first_expert) {}

  // The next tile of this CTA; false when there is none.
  FP8MOE_HD bool next(Tile& tile) {
    constexpr TileShape kShape = tile_shape(TileM, TileN);
    constexpr int kStrip = std::lcm(TileN, kTailColumns);
    int first = 0, rows = 0;
    bool last = false;
    RowTiles tiles;
    for (;; ++expert_) {
      if (expert_ >= sizes_.experts) return false;
      first = row_offsets_[expert_];
      rows = row_offsets_[expert_ + 1] - first;
      tiles = row_tiles(kShape, sizes_.n, rows);
      last = expert_ + 1 == sizes_.experts;
      if (last) tiles = fill_last_wave(kShape, sizes_.n, rows, before_, ctas_, tiles);
      if (at_ < before_ + tiles.all()) break;
      before_ += tiles.all();
    }
    const int tiles_m = tiles_in(tiles.rows, TileM), tails_m = tiles_in(rows - tiles.rows, kBox);
    int whole = tiles.whole, tail = tiles.tail;  // of a strip; the one strip may have all columns
    if (!last && tails_beside(kShape, sizes_.raster_group, tiles)) {
      whole = kStrip / TileN * tiles_m;
      tail = kStrip / kTailColumns * tails_m;
    }
    const int within = at_ - before_, strip = within / (whole + tail),
              in_strip = within - strip * (whole + tail),
              of_whole = std::min(whole, tiles.whole - strip * whole);
    Place place;  // in rows and columns
    tile.tail = in_strip >= of_whole;
    if (tile.tail) {
      const int at = strip * tail + in_strip - of_whole;
      place = {tiles.rows + at % tails_m * kBox, at / tails_m * kTailColumns};
    } else {
      rows = tiles.rows;
      place = place_in_raster_groups(sizes_.raster_group, strip * whole + in_strip, tiles_m,
                                     tiles_in(sizes_.n, TileN));
      place = {place.row * TileM, place.column * TileN};
    }
    tile.expert = expert_;
    tile.row = first + place.row;
    tile.rows = rows - place.row;
    tile.column = place.column;
    tile.k_blocks = sizes_.k_blocks;
    at_ += ctas_;
    return true;
  }

 private:
  const Sizes& sizes_;
  const int32_t* row_offsets_;
  int at_, ctas_;
  int expert_;
  int before_ = 0;  // tiles of the experts before it
};

// Tiles of dw, [M, N] for each expert: scheduled statically, unless `jump_to` says which one is
// next.
template <Kind kKind, int TileM, int TileN>
class Schedule {
 public:
  FP8MOE_HD Schedule(const Sizes& sizes, const int32_t*, int cta, int ctas)
      : sizes_(sizes), at_(cta), ctas_(ctas) {}

  // The tiles of all experts of the launch.
  FP8MOE_HD int count() const {
    return (sizes_.experts - sizes_.first_expert) * tiles_m() * tiles_n();
  }

  FP8MOE_HD void jump_to(int to) { at_ = to; }

  FP8MOE_HD bool next(Tile& tile) {
    const int each = tiles_m() * tiles_n();
    const int expert = at_ / each;
    tile.expert = sizes_.first_expert + expert;
    if (tile.expert >= sizes_.experts) return false;
    const Place place =
        place_in_raster_groups(sizes_.raster_group, at_ - expert * each, tiles_m(), tiles_n());
    tile.row = place.row * TileM;
    tile.rows = sizes_.m - tile.row;
    tile.column = place.column * TileN;
    tile.k_first = sizes_.col_offsets[tile.expert] / kBlockK;
    tile.k_blocks = (sizes_.tokens_per_expert[tile.expert] + kBlockK - 1) / kBlockK;
    at_ += ctas_;
    return true;
  }

 private:
  FP8MOE_HD int tiles_m() const { return tiles_in(sizes_.m, TileM); }
  FP8MOE_HD int tiles_n() const { return tiles_in(sizes_.n, TileN); }

  const Sizes& sizes_;
  int at_, ctas_;
};

}  // namespace fp8moe::cuda::gemm
