#include "fp8moe/explain.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.h"
#include "cuda/gemm/schedule.h"
#include "cuda/gemm/stage.h"

namespace fp8moe {
namespace {

using cuda::gemm::Kind;

// Multiply-adds for one K-block of a tile. A warpgroup multiplies 64 rows, or of a low tile 128
// columns; one that has none is idle, not wasted.
int64_t work(const cuda::gemm::Tile& tile, int tile_m, int tile_n, int64_t n) {
  using namespace cuda::gemm;
  int64_t elements = 0;
  for (int half = 0; half < tile_m / kBox; ++half) {
    if (tile.low())
      elements += half < 2 && n - tile.column > 2 * kBox * half ? kBox * 2 * kBox : 0;
    else if (tile.rows > kBox * half)
      elements += tile.flank() ? 2 * kBox * kBox : kBox * tile_n;
  }
  return elements * kBlockK;
}

// Walks the tiles of an evenly routed batch as one CTA would.
template <Kind kKind, int TileM, int TileN>
GemmChoice walk(int64_t m, int64_t n, int64_t k, int64_t experts) {
  using namespace cuda::gemm;
  std::vector<int32_t> row_offsets(experts + 1), tokens(experts), col_offsets(experts + 1);
  for (int64_t e = 0; e < experts; ++e) {
    tokens[e] = static_cast<int32_t>(m / experts + (e < m % experts));
    row_offsets[e + 1] = row_offsets[e] + tokens[e];
    col_offsets[e + 1] = col_offsets[e] + static_cast<int32_t>(cdiv(tokens[e], kBlockK) * kBlockK);
  }
  const bool rows = kKind == Kind::rows;
  Sizes sizes{};
  sizes.row_offsets = row_offsets.data();
  sizes.tokens_per_expert = tokens.data();
  sizes.col_offsets = col_offsets.data();
  sizes.experts = static_cast<int>(experts);
  sizes.m = static_cast<int>(n);
  sizes.n = static_cast<int>(rows ? n : k);
  sizes.k_blocks = static_cast<int>(cdiv(k, kBlockK));
  sizes.band = 1;
  sizes.flank = has_flank(TileN, n, m, experts);
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
GemmChoice walk(const cuda::gemm::Config& config, int64_t m, int64_t n, int64_t k,
                int64_t experts) {
  using namespace cuda::gemm;
  if constexpr (kKind == Kind::rows) {
    if (config.tile_m == kTallM) return walk<kKind, kTallM, 128>(m, n, k, experts);
  }
  return config.tile_n == 128 ? walk<kKind, kTileM, 128>(m, n, k, experts)
                              : walk<kKind, kTileM, 192>(m, n, k, experts);
}

}  // namespace

GemmChoice explain_grouped_gemm(GemmPass pass, int64_t m, int64_t n, int64_t k, int64_t experts,
                                int64_t sm_count) {
  FP8MOE_CHECK(
      m >= 0 && n >= 0 && k >= 0 && experts > 0 && sm_count > 0,
      "[explain_grouped_gemm] sizes must not be negative, experts and SMs positive; got M ", m,
      ", N ", n, ", K ", k, ", ", experts, " experts, ", sm_count, " SMs");
  constexpr int64_t kMost = 1 << 30;  // of what a kernel counts in 32 bits
  FP8MOE_CHECK(std::max({m, n, k, experts}) <= kMost,
               "[explain_grouped_gemm] sizes must be at most ", kMost, "; got M ", m, ", N ", n,
               ", K ", k, ", ", experts, " experts");
  if (pass == GemmPass::dgrad) std::swap(n, k);
  // D is [rows of an expert, n], or for wgrad [n, k] over the rows of an expert.
  const bool wgrad = pass == GemmPass::wgrad;
  const RoutingPlan plan{.slab = {}, .tokens = m, .experts = experts, .capacity = m};
  const int64_t k_blocks = plan.columns() / kTile;
  const cuda::gemm::Config config =
      wgrad ? cuda::gemm::tokens_config(Kind::tokens_block, n, k, k_blocks, experts, true, false)
            : cuda::gemm::rows_config(n, m, cdiv(k, kTile), experts, true, sm_count);
  GemmChoice choice = wgrad ? walk<Kind::tokens_block>(config, m, n, k, experts)
                            : walk<Kind::rows>(config, m, n, k, experts);
  choice.band = config.band;
  choice.waves = static_cast<double>(choice.tiles) / static_cast<double>(sm_count);
  choice.taken = wgrad && cuda::gemm::takes_tiles(k_blocks, experts, false);
  const double time = cuda::gemm::tiles_time(choice.tiles, 1, config.thin, sm_count);
  choice.idle = time > 0 ? 1 - choice.waves / time : 0;
  return choice;
}

}  // namespace fp8moe
