// Which tiles a CTA works on, in what order: static, computed by each CTA for itself, but for
// tiles of wgrad that are taken (`jump_to`). Plain C++, so that a host can walk it, too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/host_device.h"
#include "gemm/config.h"

namespace fp8moe::cuda::gemm {

inline constexpr int kUncounted = INT32_MAX;  // as the count of tiles
inline constexpr int kNoMore = -1;            // as Tile::k_blocks: the last tile was the last

struct alignas(16) Tile {
  int expert = 0;
  int row = 0;          // first row of A
  int rows = 0;         // rows of D from here on; none or less: nothing to store
  int column = 0;       // first column of D
  int16_t boxes_a = 0;  // rows of A, in boxes
  int16_t boxes = 0;    // rows: of A and B together
  int k_first = 0;      // first K-block
  int k_blocks = 0;
  int whole_k_blocks = 0;  // those of a whole tile, else none: all that its first multiply asks

  FP8MOE_HD bool tail_m() const { return boxes_a == kTailMBoxes; }
  FP8MOE_HD bool tail_n() const { return boxes_a == kTailNBoxes; }
  FP8MOE_HD bool split() const { return boxes == kSplitBoxes; }
  FP8MOE_HD bool whole(int tile_m) const { return boxes_a == tile_m / kBox && !split(); }
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

// Tiles of an expert's rows, scheduled statically: whole ones, then tail-N ones, then tail-M ones.
// Where the last wave is cut, all its tiles' first parts are scheduled statically, then the second
// ones, then the third; a CTA gets one at most, or one that does not exist.
template <int TileM, int TileN>
class Schedule<Kind::fprop, TileM, TileN> {
 public:
  // How many tiles, before any is cut, the experts first, first + step, ... have.
  FP8MOE_HD static int count(const Sizes& sizes, const int32_t* row_offsets, int first, int step) {
    int tiles = 0;
    for (int e = first; e < sizes.experts; e += step)
      tiles += row_tiles(TileM, TileN, sizes, row_offsets[e + 1] - row_offsets[e]).all();
    return tiles;
  }

  // row_offsets: in shared memory. tiles: the count of all experts; without it no wave is cut.
  FP8MOE_HD Schedule(const Sizes& sizes, const int32_t* row_offsets, int cta, int ctas,
                     int tiles = kUncounted)
      : sizes_(sizes), row_offsets_(row_offsets), at_(cta), ctas_(ctas), cut_(tiles), end_(tiles) {
    if (tiles == kUncounted || !cuts_last_wave(tiles % ctas, ctas)) return;
    left_ = tiles % ctas;
    cut_ = tiles - left_;
    end_ = cut_ + kSplitParts * left_;
  }

  // The next tile of this CTA; false when there is none. A split one is its last.
  FP8MOE_HD bool next(Tile& tile) {
    if (at_ >= end_) return false;
    const bool split = at_ >= cut_;
    const int part = split ? (at_ - cut_) / left_ : 0, uncut = at_ - part * left_;
    int first = 0, rows = 0;
    RowTiles tiles;
    for (;; ++expert_) {
      if (expert_ >= sizes_.experts) return false;
      first = row_offsets_[expert_];
      rows = row_offsets_[expert_ + 1] - first;
      tiles = row_tiles(TileM, TileN, sizes_, rows);
      if (uncut < before_ + tiles.all()) break;
      before_ += tiles.all();
    }
    const int within = uncut - before_;
    Place place;  // in rows and columns
    if (within < tiles.whole) {
      rows = tiles.rows;
      place = place_in_raster_groups(sizes_.raster_group, within, (rows + TileM - 1) / TileM,
                                     tiles.wide);
      place = {place.row * TileM, place.column * TileN};
      tile.boxes_a = TileM / kBox;
    } else if (within < tiles.whole + tiles.tail_n) {
      rows = tiles.rows;
      place = {(within - tiles.whole) * kTailNRows, tiles.wide * TileN};
      tile.boxes_a = kTailNBoxes;
    } else {
      place = {tiles.rows, (within - tiles.whole - tiles.tail_n) * kTailMColumns};
      tile.boxes_a = kTailMBoxes;
    }
    tile.boxes = (TileM + TileN) / kBox;
    if (split) {
      const bool halves = tile.tail_m() || tile.tail_n();
      if (halves && part == 2) return false;
      const bool m192 = TileM == kTileM192 && !tile.tail_m();
      (tile.tail_n() || m192 ? place.row : place.column) += part * (halves ? 2 * kBox : kBox);
      if (place.row >= rows || place.column >= sizes_.n) return false;
      if (tile.tail_n()) tile.boxes_a = kTileM / kBox;
      if (m192) tile.boxes_a = kTailMBoxes;
      tile.boxes = kSplitBoxes;
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
  int left_ = 0;                 // tiles that are cut
  int cut_, end_;                // where in what is scheduled statically their parts begin, and end
  int expert_ = 0, before_ = 0;  // tiles of the experts before it
};

// Tiles of dw, [M, N] for each expert: scheduled statically, unless `jump_to` says which one is
// next.
template <Kind kKind, int TileM, int TileN>
class Schedule {
 public:
  FP8MOE_HD Schedule(const Sizes& sizes, const int32_t*, int cta, int ctas, int = kUncounted)
      : sizes_(sizes), at_(cta), ctas_(ctas) {}

  // The tiles of all experts.
  FP8MOE_HD int count() const { return sizes_.experts * tiles_m() * tiles_n(); }

  FP8MOE_HD void jump_to(int to) { at_ = to; }

  FP8MOE_HD bool next(Tile& tile) {
    const int each = tiles_m() * tiles_n();
    tile.expert = at_ / each;
    if (tile.expert >= sizes_.experts) return false;
    const Place place =
        place_in_raster_groups(sizes_.raster_group, at_ - tile.expert * each, tiles_m(), tiles_n());
    tile.row = place.row * TileM;
    tile.rows = sizes_.m - tile.row;
    tile.column = place.column * TileN;
    tile.boxes_a = TileM / kBox;
    tile.k_first = sizes_.col_offsets[tile.expert] / kBlockK;
    tile.k_blocks = (sizes_.tokens_per_expert[tile.expert] + kBlockK - 1) / kBlockK;
    at_ += ctas_;
    return true;
  }

 private:
  FP8MOE_HD int tiles_m() const { return (sizes_.m + TileM - 1) / TileM; }
  FP8MOE_HD int tiles_n() const { return (sizes_.n + TileN - 1) / TileN; }

  const Sizes& sizes_;
  int at_, ctas_;
};

}  // namespace fp8moe::cuda::gemm
