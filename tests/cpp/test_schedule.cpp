// The order of the grouped GEMM's tiles, over random problems: every element of D in one tile of
// one CTA of one launch, and CTAs in step: each has as many tiles of a launch as any other, or one
// fewer. Tiles that CTAs claim as they come free are claimed once, too, and the queue is as it was.
#include "gemm/schedule.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"

using namespace fp8moe::cuda::gemm;

namespace {

constexpr int kBlocks = 3;  // K-blocks of every tile of Kind::fprop
int tails = 0;              // tail tiles met

// Walks all CTAs of one launch. d_row [E+1]: where the experts' rows of D begin; seen: how many
// tiles 16 columns of a row are in.
template <Kind kKind, int TileM, int TileN>
void walk_launch(const Sizes& sizes, int ctas, const std::vector<int>& d_row,
                 std::vector<int>& seen) {
  int most = 0, least = 0;
  for (int cta = 0; cta < ctas; ++cta) {
    Schedule<kKind, TileM, TileN> schedule(sizes, sizes.row_offsets, cta, ctas);
    int tiles = 0, last = sizes.first_expert;
    for (Tile tile; schedule.next(tile); ++tiles) {
      CHECK(tile.expert >= last && tile.expert < sizes.experts);  // an expert after the other
      last = tile.expert;
      tails += tile.tail;
      CHECK(!tile.tail || kKind == Kind::fprop);
      const int width = tile.tail ? kTailColumns : TileN;
      const int end = std::min(sizes.n, tile.column + width);
      CHECK(tile.column % width == 0 && tile.column < end);
      const int rows = std::min(tile.tail ? kBox : TileM, tile.rows);
      const int first = kKind == Kind::fprop ? tile.row : d_row[tile.expert] + tile.row;
      CHECK(rows > 0 && first >= d_row[tile.expert] && first + rows <= d_row[tile.expert + 1]);
      for (int r = first; r < first + rows; ++r)
        for (int c = tile.column; c < end; c += 16)
          ++seen[(static_cast<size_t>(r) * sizes.n + c) / 16];
      if (kKind == Kind::fprop) {
        CHECK(tile.k_first == 0 && tile.k_blocks == kBlocks);
      } else {
        CHECK(tile.k_first == sizes.col_offsets[tile.expert] / kBlockK);
        CHECK(tile.k_blocks == (sizes.tokens_per_expert[tile.expert] + kBlockK - 1) / kBlockK);
      }
    }
    most = std::max(most, tiles);
    least = cta == 0 ? tiles : std::min(least, tiles);
  }
  CHECK(most - least <= 1);
}

// One launch, and several of ranges of experts.
template <Kind kKind, int TileM, int TileN>
void walk(const Sizes& sizes, int ctas, const std::vector<int>& d_row) {
  for (const int launches : {1, 3}) {
    std::vector<int> seen(static_cast<size_t>(d_row.back()) * sizes.n / 16);
    Sizes part = sizes;
    for (int i = 1; i <= launches; ++i, part.first_expert = part.experts) {
      part.experts = sizes.experts * i / launches;
      walk_launch<kKind, TileM, TileN>(part, ctas, d_row, seen);
    }
    CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
  }
}

// Tiles taken from a queue (produce.cuh), by CTAs that come free in any order.
template <Kind kKind, int TileM, int TileN>
void claim_next_tile(const Sizes& sizes, int ctas, std::mt19937& random) {
  std::vector<Schedule<kKind, TileM, TileN>> schedules;
  for (int cta = 0; cta < ctas; ++cta) schedules.emplace_back(sizes, nullptr, cta, ctas);
  std::vector<std::array<int, 3>> dealt, taken;
  Schedule<kKind, TileM, TileN> all(sizes, nullptr, 0, 1);
  for (Tile tile; all.next(tile);) dealt.push_back({tile.expert, tile.row, tile.column});
  CHECK(static_cast<int>(dealt.size()) == all.count());
  int queue = 0;
  std::vector<int> running(ctas);
  std::iota(running.begin(), running.end(), 0);
  while (!running.empty()) {
    int& one = running[random() % running.size()];
    Tile tile;
    if (schedules[one].next(tile)) {
      taken.push_back({tile.expert, tile.row, tile.column});
      CHECK(taken.size() <= dealt.size());  // else it might never end
      schedules[one].jump_to(ctas + queue);
      if (++queue == all.count()) queue = 0;
    } else {
      one = running.back();
      running.pop_back();
    }
  }
  std::sort(dealt.begin(), dealt.end());
  std::sort(taken.begin(), taken.end());
  CHECK(taken == dealt && queue == 0);
}

std::vector<int> offsets_of(const std::vector<int>& counts) {
  std::vector<int> offsets{0};
  for (int rows : counts) offsets.push_back(offsets.back() + rows);
  return offsets;
}

Sizes sizes_of_rows(const std::vector<int>& offsets, int n, int raster_group) {
  Sizes sizes{};
  sizes.row_offsets = offsets.data();
  sizes.experts = static_cast<int>(offsets.size()) - 1;
  sizes.n = n;
  sizes.k_blocks = kBlocks;
  sizes.raster_group = raster_group;
  return sizes;
}

template <int TileM, int TileN>
void rows(const std::vector<int>& counts, int n, int raster_group, int ctas) {
  const std::vector<int> offsets = offsets_of(counts);
  const Sizes sizes = sizes_of_rows(offsets, n, raster_group);
  walk<Kind::fprop, TileM, TileN>(sizes, ctas, offsets);
}

template <int TileM, int TileN>
void tokens(const std::vector<int>& counts, int m, int n, int raster_group, int ctas,
            std::mt19937& random) {
  std::vector<int> columns{0}, d_row{0};
  for (int tokens : counts) {
    columns.push_back(columns.back() + (tokens + 127) / 128 * 128);
    d_row.push_back(d_row.back() + m);
  }
  Sizes sizes{};
  sizes.tokens_per_expert = counts.data();
  sizes.col_offsets = columns.data();
  sizes.experts = static_cast<int>(counts.size());
  sizes.m = m;
  sizes.n = n;
  sizes.raster_group = raster_group;
  walk<Kind::wgrad_128x128, TileM, TileN>(sizes, ctas, d_row);
  for (const int first : {0, sizes.experts / 2}) {
    sizes.first_expert = first;
    claim_next_tile<Kind::wgrad_128x128, TileM, TileN>(sizes, ctas, random);
  }
}

// The tiles of 128x192 of experts of `counts` rows that CTA `cta` of `ctas` has.
std::vector<Tile> tiles_of(const std::vector<int>& counts, int n, int cta, int ctas) {
  const std::vector<int> offsets = offsets_of(counts);
  const Sizes sizes = sizes_of_rows(offsets, n, 4);
  Schedule<Kind::fprop, 128, 192> schedule(sizes, offsets.data(), cta, ctas);
  std::vector<Tile> tiles;
  for (Tile tile; schedule.next(tile);) tiles.push_back(tile);
  return tiles;
}

// Of few rows tail tiles lie beside the whole ones of the same 768 columns, of more behind all.
void tails_lie_beside_whole_tiles() {
  for (const int whole : {1, 3, 4}) {
    int columns = 0;  // of whole tiles so far
    for (const Tile& tile : tiles_of({128 * whole + 5, 128}, 4096, 0, 1)) {
      if (tile.expert > 0) break;
      if (tile.tail)
        CHECK(whole < 4 ? columns / 768 == tile.column / 768 : columns == 4096);
      else
        columns = std::max(columns, std::min(tile.column + 192, 4096) - (whole < 4));
    }
    CHECK(columns >= 4095);
  }
}

// A last wave of a few whole tiles is one of tail tiles, where one wave holds them.
void the_last_wave_is_filled() {
  const auto longest = [](const std::vector<int>& counts, int n) {
    double most = 0;
    for (int cta = 0; cta < 132; ++cta) {
      double all = 0;
      for (const Tile& tile : tiles_of(counts, n, cta, 132)) all += tile.tail ? 0.75 : 1;
      most = std::max(most, all);
    }
    return most;
  };
  CHECK(longest({4096}, 4096) == 5.75);
  CHECK(longest({256, 3840}, 4096) == 5.75);
  CHECK(longest({6 * 128}, 22 * 192) == 1);   // a whole wave
  CHECK(longest({11 * 128}, 22 * 192) == 2);  // its tail tiles would take two
}

}  // namespace

int main() {
  tails_lie_beside_whole_tiles();
  the_last_wave_is_filled();
  std::mt19937 random(7);
  const auto below = [&](int end) { return static_cast<int>(random() % end); };
  for (int problem = 0; problem < 500; ++problem) {
    std::vector<int> counts(1 + below(problem % 10 == 0 ? 40 : 8));
    // Around the tiles' edges as often as anywhere.
    for (int& count : counts)
      count = below(3) == 0 ? std::max(0, 64 * below(14) + below(3) - 1) : below(500);
    if (below(4) == 0) counts[below(static_cast<int>(counts.size()))] = 0;
    const int n = 16 * (1 + below(below(8) == 0 ? 100 : 30)), m = 16 * (1 + below(30));
    const int raster_group = 1 + below(32);
    const int ctas = std::array{1, 3, 20, 132}[below(4)];
    for (const TileShape& shape : kTiles)
      with_tile(shape, [&]<int TileM, int TileN>() {
        rows<TileM, TileN>(counts, n, raster_group, ctas);
        tokens<TileM, TileN>(counts, m, n, raster_group, ctas, random);
      });
  }
  CHECK(tails > 1000);
}
