// What explain_grouped_gemm says: the choice of config.h, and a walk over its tiles. Plain C++,
// which builds without the CUDA backend compile, too.
#include <utility>
#include <vector>

#include "gemm/schedule.h"
#include "gemm/stage.h"
#include "ops/backends.h"

namespace fp8moe::cuda {
namespace {

using namespace gemm;

// Multiply-adds for one K-block of a tile. A warpgroup multiplies 64 rows, or of a tail tile in M
// 128 columns; one that has none is idle, not wasted.
int64_t work(const Tile& tile, int tile_m, int tile_n, int64_t n) {
  int64_t elements = 0;
  for (int consumer_index = 0; consumer_index < tile_m / kBox; ++consumer_index) {
    if (tile.tail_m())
      elements +=
          consumer_index < 2 && n - tile.column > 2 * kBox * consumer_index ? kBox * 2 * kBox : 0;
    else if (tile.rows > kBox * consumer_index)
      elements += tile.tail_n() ? 2 * kBox * kBox : kBox * tile_n;
  }
  return elements * kBlockK;
}

// Walks the tiles of an evenly routed batch as one CTA would.
template <Kind kKind, int TileM, int TileN>
GemmChoice walk(int64_t m, int64_t n, int64_t k, int64_t experts) {
  std::vector<int32_t> row_offsets(experts + 1), tokens(experts), col_offsets(experts + 1);
  for (int64_t e = 0; e < experts; ++e) {
    tokens[e] = static_cast<int32_t>(m / experts + (e < m % experts));
    row_offsets[e + 1] = row_offsets[e] + tokens[e];
    col_offsets[e + 1] = col_offsets[e] + static_cast<int32_t>(cdiv(tokens[e], kBlockK) * kBlockK);
  }
  const bool rows = kKind == Kind::fprop;
  Sizes sizes{};
  sizes.row_offsets = row_offsets.data();
  sizes.tokens_per_expert = tokens.data();
  sizes.col_offsets = col_offsets.data();
  sizes.experts = static_cast<int>(experts);
  sizes.m = static_cast<int>(n);
  sizes.n = static_cast<int>(rows ? n : k);
  sizes.k_blocks = static_cast<int>(cdiv(k, kBlockK));
  sizes.raster_group = 1;
  sizes.tail_n = rows && has_tail_n(TileN, n, m, experts);
  GemmChoice choice{};
  choice.tile_m = TileM;
  choice.tile_n = TileN;
  choice.stages = kStages;
  choice.shared_bytes = Stage<kKind, TileM, TileN>::kBytes;
  double done = 0;
  Schedule<kKind, TileM, TileN> schedule(sizes, sizes.row_offsets, 0, 1);
  for (Tile tile; n > 0 && k > 0 && schedule.next(tile); ++choice.tiles)
    done += static_cast<double>(work(tile, TileM, TileN, sizes.n)) * tile.k_blocks;
  const double useful = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  choice.waste = done > 0 ? 1 - useful / done : 0;
  return choice;
}

template <Kind kKind>
GemmChoice walk(const Config& config, int64_t m, int64_t n, int64_t k, int64_t experts) {
  if (config.tile_m == kTileM192) return walk<kKind, kTileM192, 128>(m, n, k, experts);
  return config.tile_n == 128 ? walk<kKind, kTileM, 128>(m, n, k, experts)
                              : walk<kKind, kTileM, 192>(m, n, k, experts);
}

}  // namespace

GemmChoice explain_grouped_gemm(const GemmQuery& q) {
  const bool wgrad = q.pass == GemmPass::wgrad, bf16 = q.out == DType::bf16;
  int64_t n = q.n, k = q.k;
  if (q.pass == GemmPass::dgrad) std::swap(n, k);
  // D is [rows of an expert, n], or for wgrad [n, k] over the rows of an expert.
  const RoutingPlan plan{.buffer = {}, .tokens = q.m, .experts = q.experts, .capacity = q.m};
  const int64_t k_blocks = plan.columns() / kTile;
  const Kind kind = !wgrad                            ? Kind::fprop
                    : q.columns == ScaleLayout::block ? Kind::wgrad_128x128
                                                      : Kind::wgrad_1x128;
  const Config config = wgrad ? wgrad_config(kind, n, k, k_blocks, q.experts, bf16, q.accumulate)
                              : fprop_config(n, q.m, cdiv(k, kTile), q.experts, bf16, q.sm_count);
  GemmChoice choice = kind == Kind::fprop ? walk<Kind::fprop>(config, q.m, n, k, q.experts)
                      : kind == Kind::wgrad_128x128
                          ? walk<Kind::wgrad_128x128>(config, q.m, n, k, q.experts)
                          : walk<Kind::wgrad_1x128>(config, q.m, n, k, q.experts);
  choice.raster_group = config.raster_group;
  choice.waves = static_cast<double>(choice.tiles) / static_cast<double>(q.sm_count);
  choice.dynamic = wgrad && dynamic_schedule(k_blocks, q.experts, q.accumulate && !bf16);
  const double time = tiles_time(choice.tiles, 1, config.split, q.sm_count);
  choice.idle = time > 0 ? 1 - choice.waves / time : 0;
  return choice;
}

}  // namespace fp8moe::cuda
