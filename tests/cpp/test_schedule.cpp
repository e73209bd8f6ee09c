// The order of the grouped GEMM's tiles: every element of D in one tile of one CTA, and CTAs in
// step: each has as many tiles as any other, or one fewer. split tiles are the last of their CTAs,
// where what is left for a last wave is little. Tiles that are taken as CTAs come free are taken
// once, too, and the queue is as it was.
#include "gemm/schedule.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "device/launch_numbers.h"

using namespace fp8moe::cuda::gemm;
using fp8moe::cuda::kNoNumber;
using fp8moe::cuda::LaunchNumbers;

namespace {

constexpr int kBlocks = 3;  // K-blocks of every tile of Kind::fprop
int split_tail_m = 0, split_tail_n = 0, split_whole = 0, split_m192 = 0;  // met

// Walks all CTAs. d_row [E+1]: where the experts' rows of D begin. uncut: the tiles, where the last
// wave is to be cut.
template <Kind kKind, int TileM, int TileN>
void walk(const Sizes& sizes, int ctas, const std::vector<int>& d_row, int uncut = kUncounted) {
  std::vector<int> seen(  // tiles that 16 columns of a row are in
      static_cast<size_t>(d_row.back()) * sizes.n / 16);
  int most = 0, least = 0;
  for (int cta = 0; cta < ctas; ++cta) {
    Schedule<kKind, TileM, TileN> schedule(sizes, sizes.row_offsets, cta, ctas, uncut);
    int tiles = 0, last = 0;
    bool split = false;
    for (Tile tile; schedule.next(tile);) {
      CHECK(tile.expert >= last && tile.expert < sizes.experts);  // an expert after the other
      last = tile.expert;
      CHECK(!split);
      split = tile.split();
      if (kKind == Kind::fprop) {
        const bool cut = uncut != kUncounted && tiles == uncut / ctas && 3 * (uncut % ctas) <= ctas;
        CHECK(split == cut && tile.boxes == (cut ? kSplitBoxes : (TileM + TileN) / kBox));
      }
      const int width = kKind == Kind::fprop ? kBox * (tile.boxes - tile.boxes_a) : TileN;
      CHECK(tile.column % (tile.tail_n() ? TileN : width) == 0);
      const int end = std::min(sizes.n, tile.column + width);
      CHECK(tile.column < end && (!tile.tail_n() || end == sizes.n));
      const bool third =
          split && TileM == kTileM192 && tile.rows > kBox;  // of a 192x128 tile, or more
      CHECK(!tile.tail_m() || tile.rows <= kBox || third);
      if (kKind == Kind::fprop && !split)
        CHECK(tile.tail_m() == (TileM + TileN == 5 * kBox && tile.rows <= kBox));
      if (split)
        ++(third                            ? split_m192
           : tile.tail_m()                  ? split_tail_m
           : sizes.tail_n && end == sizes.n ? split_tail_n
                                            : split_whole);
      const int rows = std::min(kBox * tile.boxes_a, tile.rows);
      const int first = kKind == Kind::fprop ? tile.row : d_row[tile.expert] + tile.row;
      CHECK(rows > 0 && first >= d_row[tile.expert] && first + rows <= d_row[tile.expert + 1]);
      for (int r = first; r < first + rows; ++r)
        for (int c = tile.column; c < end; c += 16)
          ++seen[(static_cast<size_t>(r) * sizes.n + c) / 16];
      ++tiles;
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
  CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
  CHECK(most - least <= 1);
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

void launch_numbers() {
  LaunchNumbers numbers(3);
  const int first = numbers.of_stream(7), captured = numbers.of_capture();
  CHECK(first != captured && numbers.of_stream(7) == first);
  const int other = numbers.of_stream(8);
  CHECK(other != first && other != captured && std::max({first, captured, other}) < 3);
  CHECK(numbers.of_capture() == kNoNumber && numbers.of_stream(9) == kNoNumber);
  CHECK(numbers.of_stream(8) == other && numbers.of_stream(9) == kNoNumber);
}

template <int TileM, int TileN>
void rows(const std::vector<int>& counts, int n, int ctas) {
  std::vector<int> offsets{0};
  for (int rows : counts) offsets.push_back(offsets.back() + rows);
  Sizes sizes{};
  sizes.row_offsets = offsets.data();
  sizes.experts = static_cast<int>(counts.size());
  sizes.n = n;
  sizes.k_blocks = kBlocks;
  sizes.raster_group = fprop_raster_group(TileN, n, ctas);
  sizes.tail_n = has_tail_n(TileN, n, 256, 1);
  walk<Kind::fprop, TileM, TileN>(sizes, ctas, offsets);
  if (!has_tail_m(TileM, TileN)) return;  // no split tiles
  using Schedule = Schedule<Kind::fprop, TileM, TileN>;
  const int uncut = Schedule::count(sizes, offsets.data(), 0, 1);
  int shared = 0;
  for (int lane = 0; lane < 32; ++lane) shared += Schedule::count(sizes, offsets.data(), lane, 32);
  CHECK(shared == uncut);
  walk<Kind::fprop, TileM, TileN>(sizes, ctas, offsets, uncut);
}

template <int TileM, int TileN>
void tokens(const std::vector<int>& counts, int m, int n, int ctas, std::mt19937& random) {
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
  sizes.raster_group = 2;
  walk<Kind::wgrad_128x128, TileM, TileN>(sizes, ctas, d_row);
  claim_next_tile<Kind::wgrad_128x128, TileM, TileN>(sizes, ctas, random);
}

// Which tiles wgrad takes of dw [m, n], by the K-blocks of an expert.
void wgrad_tiles() {
  const int64_t experts = 64;
  const auto is = [&](Kind kind, int64_t m, int64_t n, double each, bool bf16, bool add, int tile_m,
                      int tile_n) {
    const auto k_blocks = static_cast<int64_t>(each * experts);
    const Config config = wgrad_config(kind, m, n, k_blocks, experts, bf16, add);
    return config.tile_m == tile_m && config.tile_n == tile_n;
  };
  constexpr Kind kBlock = Kind::wgrad_128x128, kColumn = Kind::wgrad_1x128;
  // 192x128 where f32 sums outside of dw are fewer so, not in short tiles, nor in long ones added
  // to.
  CHECK(is(kBlock, 7168, 2048, 8, false, false, 192, 128));
  CHECK(is(kBlock, 7168, 2048, 8, false, true, 192, 128));
  CHECK(is(kBlock, 7168, 2048, 32, false, false, 192, 128));
  CHECK(is(kBlock, 7168, 2048, 12, false, true, 128, 192));
  CHECK(is(kBlock, 7168, 2048, 4.9, false, false, 128, 192));
  CHECK(is(kBlock, 7168, 2048, 8, true, false, 128, 192));
  CHECK(is(kBlock, 4096, 7168, 8, false, false, 128, 192));
  // f32 takes 128 columns under three K-blocks an expert, if nothing is added.
  CHECK(is(kBlock, 1536, 1920, 2.9, false, false, 128, 128));
  CHECK(is(kBlock, 1536, 1920, 3, false, false, 128, 192));
  CHECK(is(kBlock, 1536, 1920, 2.9, true, false, 128, 192));
  CHECK(is(kBlock, 1536, 1920, 2.9, false, true, 128, 192));
  for (const bool bf16 : {false, true})
    for (const double each : {1, 3, 8, 40})
      CHECK(is(kColumn, 4096, 7168, each, bf16, bf16, 192, 128));
}

// Which tiles fprop takes of [rows, n].
void fprop_tiles() {
  const auto tile = [](int64_t n, int64_t rows, int64_t k_blocks, int64_t experts, bool bf16) {
    const Config config = fprop_config(n, rows, k_blocks, experts, bf16, 132);
    CHECK(!config.split || has_tail_m(config.tile_m, config.tile_n));
    return std::array<int, 3>{config.tile_m, config.tile_n, config.split};
  };
  using Expected = std::array<int, 3>;
  // 192x128 where experts have rows enough, the sooner the longer tiles are, or where 192 columns
  // hold more outside of D (in tail tiles in N they do not), and not where they hold less.
  CHECK((tile(4096, 32768, 56, 8, true) == Expected{192, 128, false}));
  CHECK((tile(128, 1 << 20, 56, 8, true) == Expected{192, 128, false}));
  CHECK((tile(4096, 3000 * 64, 31, 64, true) == Expected{192, 128, false}));
  CHECK((tile(4096, 3000 * 64 - 1, 31, 64, true) == Expected{128, 192, false}));
  CHECK((tile(4096, 1000 * 64, 32, 64, true) == Expected{192, 128, false}));
  CHECK((tile(4096, 1000 * 64 - 1, 32, 64, true) == Expected{128, 192, false}));
  CHECK((tile(2048, 350 * 64, 1, 64, true) == Expected{192, 128, false}));
  CHECK((tile(2048, 350 * 64 - 1, 56, 64, true) == Expected{128, 192, false}));
  CHECK((tile(2880, 32768, 56, 8, true) == Expected{128, 192, false}));
  CHECK((tile(4096, 32768, 56, 8, false) == Expected{128, 128, false}));
  // Few waves are of the tiles that take least time: 5.545 of 128x192 where that takes 5.67; not
  // 5.85 but 5.67; 0.75 and not 0.975; 0.67 and not 0.75. Of few rows they are wide.
  CHECK((tile(4096, 4096, 56, 1, true) == Expected{192, 128, true}));
  CHECK((tile(4096, 4096, 56, 8, true) == Expected{128, 192, true}));
  CHECK((tile(4096, 512, 56, 1, true) == Expected{128, 128, false}));
  CHECK((tile(2048, 512, 56, 1, true) == Expected{128, 192, true}));
  CHECK((tile(128, 4096, 56, 1, true) == Expected{128, 192, true}));
  CHECK((tile(1536, 96 * 8, 56, 8, true) == Expected{128, 128, false}));
  CHECK((tile(1536, 96 * 8 - 1, 56, 8, true) == Expected{128, 192, true}));
  CHECK((tile(2048, 0, 56, 8, true) == Expected{128, 192, true}));
  CHECK((tile(4096, 512, 56, 1, false) == Expected{128, 128, false}));
}

}  // namespace

int main() {
  wgrad_tiles();
  fprop_tiles();
  std::mt19937 random(7);
  launch_numbers();
  const std::vector<std::vector<int>> fixed{{5, 0, 130, 1, 64, 65, 257},
                                            {0, 0, 700, 0},
                                            {300},
                                            {2400, 65},
                                            {0, 0},
                                            {128, 128, 128},
                                            {64}};
  for (int n : {16, 64, 80, 96, 112, 128, 144, 192, 208, 256, 1408, 2048, 4096}) {
    for (const auto& counts : fixed)
      for (int ctas : {1, 3, 20, 132}) {
        rows<kTileM, 128>(counts, n, ctas);
        rows<kTileM, 192>(counts, n, ctas);
        rows<kTileM192, 128>(counts, n, ctas);
        tokens<kTileM, 128>(counts, 272, n, ctas, random);
        tokens<kTileM, 192>(counts, 272, n, ctas, random);
        tokens<kTileM192, 128>(counts, 272, n, ctas, random);
      }
    for (int experts : {2, 9, 40}) {
      std::vector<int> counts(experts);
      for (int& count : counts) count = static_cast<int>(random() % 400);
      rows<kTileM, 128>(counts, n, 132);
      rows<kTileM, 192>(counts, n, 132);
      rows<kTileM192, 128>(counts, n, 132);
    }
  }
  CHECK(split_tail_m > 0 && split_tail_n > 0 && split_whole > 0 && split_m192 > 0);
}
