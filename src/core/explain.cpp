#include "fp8moe/explain.h"

#include <algorithm>

#include "core/check.h"
#include "cuda/gemm/stage.h"

namespace fp8moe {
namespace {

using cuda::gemm::Kind;

template <Kind kKind>
GemmChoice describe(const cuda::gemm::Config& config) {
  GemmChoice choice{};
  choice.tile_m = cuda::gemm::kTileM;
  choice.tile_n = config.tile_n;
  choice.stages = cuda::gemm::kStages;
  choice.shared_bytes = config.tile_n == 128 ? cuda::gemm::Stage<kKind, 128>::kBytes
                                             : cuda::gemm::Stage<kKind, 192>::kBytes;
  return choice;
}

double padded(int64_t n, int64_t to) { return static_cast<double>(cdiv(n, to) * to); }

}  // namespace

GemmChoice explain_grouped_gemm(GemmPass pass, int64_t m, int64_t n, int64_t k, int64_t experts,
                                int64_t sm_count) {
  FP8MOE_CHECK(
      m >= 0 && n >= 0 && k >= 0 && experts > 0 && sm_count > 0,
      "[explain_grouped_gemm] sizes must not be negative, experts and SMs positive; got M ", m,
      ", N ", n, ", K ", k, ", ", experts, " experts, ", sm_count, " SMs");
  const bool tokens = pass == GemmPass::wgrad;
  if (pass == GemmPass::dgrad) std::swap(n, k);
  // D is [rows of an expert, n], or for wgrad [n, k] over the rows of an expert.
  const int64_t columns = tokens ? k : n;
  const Kind kind = tokens ? Kind::tokens_block : Kind::rows;
  const auto config = cuda::gemm::choose_config(kind, columns, true);
  GemmChoice choice = tokens ? describe<Kind::tokens_block>(config) : describe<Kind::rows>(config);

  // A warpgroup multiplies 64 rows; one that has none is idle, not wasted.
  constexpr int kWarpgroupRows = 64, kDepth = cuda::gemm::kBlockK;
  const int64_t tiles_n = cdiv(columns, choice.tile_n);
  const bool narrow = !tokens && cuda::gemm::has_narrow_columns(choice.tile_n, columns, m, experts);
  // Columns that the last tiles leave out where two of them are one below the other.
  const int64_t cut = narrow ? choice.tile_n - cuda::gemm::kNarrow : 0;
  double done = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t rows = m / experts + (e < m % experts);
    const int64_t height = tokens ? n : rows, depth = tokens ? rows : k;
    choice.tiles += cdiv(height, choice.tile_m) * tiles_n;
    const int64_t pairs = cdiv(height, choice.tile_m) / 2;
    const double left_out =
        std::min(padded(height, kWarpgroupRows), static_cast<double>(2 * pairs * choice.tile_m)) *
        static_cast<double>(cut);
    done +=
        (padded(height, kWarpgroupRows) * static_cast<double>(tiles_n * choice.tile_n) - left_out) *
        padded(depth, kDepth);
  }
  const double useful = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  choice.waste = done > 0 ? 1 - useful / done : 0;
  choice.waves = static_cast<double>(choice.tiles) / static_cast<double>(sm_count);
  const int64_t whole = cdiv(choice.tiles, sm_count);
  choice.idle = whole > 0 ? 1 - choice.waves / static_cast<double>(whole) : 0;
  return choice;
}

}  // namespace fp8moe
