// The choice of policy.h, and a walk over its tiles. Plain C++, which builds without the CUDA
// backend compile, too.
#include "fp8moe/explain.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/backends.h"
#include "common/check.h"
#include "gemm/policy.h"
#include "gemm/schedule.h"
#include "gemm/stage.h"

namespace fp8moe {
namespace {

using namespace cuda::gemm;

void check(const GemmQuery& q) {
  constexpr const char* kOp = "explain_grouped_gemm";
  FP8MOE_CHECK(q.m >= 0 && q.n >= 0 && q.k >= 0 && q.experts > 0 && q.sm_count > 0, "[", kOp,
               "] sizes must not be negative, experts and SMs positive; got M ", q.m, ", N ", q.n,
               ", K ", q.k, ", ", q.experts, " experts, ", q.sm_count, " SMs");
  constexpr int64_t kMost = 1 << 30;  // of what a kernel counts in 32 bits
  FP8MOE_CHECK(std::max({q.m, q.n, q.k, q.experts}) <= kMost, "[", kOp, "] sizes must be at most ",
               kMost, "; got M ", q.m, ", N ", q.n, ", K ", q.k, ", ", q.experts, " experts");
  FP8MOE_CHECK(q.out == DType::bf16 || q.out == DType::f32, "[", kOp,
               "] out must be bfloat16 or float32; got ", name_of(q.out));
  FP8MOE_CHECK(q.columns == ScaleLayout::block || q.columns == ScaleLayout::gemm, "[", kOp,
               "] columns must have scale layout block or gemm; got ", name_of(q.columns));
  FP8MOE_CHECK(q.pass == GemmPass::wgrad || (!q.accumulate && q.columns == ScaleLayout::block), "[",
               kOp, "] accumulate and columns are of wgrad alone; got them with another pass");
}

// Multiply-adds for one K-block of a tile. A warpgroup multiplies 64 rows, or of a tail tile 128
// columns. Below the last row it multiplies all the same, but with 1x128 scales on both sides.
template <Kind kKind, int TileM, int TileN>
int64_t work(const Tile& tile, int64_t n) {
  int64_t elements = 0;
  for (int consumer_index = 0; consumer_index < TileM / kBox; ++consumer_index) {
    if (tile.tail)
      elements +=
          consumer_index < 2 && n - tile.column > 2 * kBox * consumer_index ? kBox * 2 * kBox : 0;
    else if (kKind != Kind::wgrad_1x128 || tile.rows > kBox * consumer_index)
      elements += kBox * TileN;
  }
  return elements * kBlockK;
}

// Walks the tiles of an evenly routed batch as one CTA would, which has no last wave to fill.
template <Kind kKind, int TileM, int TileN>
GemmChoice walk(const Candidate& candidate, int64_t m, int64_t n, int64_t k, int64_t experts) {
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
  GemmChoice choice{};
  static_cast<Candidate&>(choice) = candidate;
  choice.stages = kStages;
  choice.shared_bytes = Stage<kKind, TileM, TileN>::kBytes;
  double done = 0;
  Schedule<kKind, TileM, TileN> schedule(sizes, sizes.row_offsets, 0, 1);
  for (Tile tile; n > 0 && k > 0 && schedule.next(tile); ++choice.tiles)
    done += static_cast<double>(work<kKind, TileM, TileN>(tile, sizes.n)) * tile.k_blocks;
  const double useful = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  choice.waste = done > 0 ? 1 - useful / done : 0;
  return choice;
}

// What the host would know of the launch. K-blocks of wgrad: those of the plan's capacity.
Problem problem_of(const GemmQuery& q) {
  const bool swap = q.pass == GemmPass::dgrad, bf16 = q.out == DType::bf16;
  if (q.pass != GemmPass::wgrad)
    return {.m = q.m,
            .n = swap ? q.k : q.n,
            .k_blocks = cdiv(swap ? q.n : q.k, kBlockK),
            .experts = q.experts,
            .bf16 = bf16};
  const RoutingPlan plan{.buffer = {}, .tokens = q.m, .experts = q.experts, .capacity = q.m};
  return {.kind = q.columns == ScaleLayout::block ? Kind::wgrad_128x128 : Kind::wgrad_1x128,
          .m = q.n,
          .n = q.k,
          .k_blocks = plan.columns() / kBlockK,
          .experts = q.experts,
          .bf16 = bf16,
          .add = q.accumulate};
}

}  // namespace

GemmChoice explain_grouped_gemm(const GemmQuery& q) {
  check(q);
  const Problem problem = problem_of(q);
  const Candidate candidate = choose(problem, q.sm_count);
  const bool swap = q.pass == GemmPass::dgrad;
  const int64_t n = swap ? q.k : q.n, k = swap ? q.n : q.k;
  GemmChoice choice = with_tile(shape_of(candidate), [&]<int TileM, int TileN>() {
    if (problem.kind == Kind::fprop)
      return walk<Kind::fprop, TileM, TileN>(candidate, q.m, n, k, q.experts);
    if (problem.kind == Kind::wgrad_128x128)
      return walk<Kind::wgrad_128x128, TileM, TileN>(candidate, q.m, n, k, q.experts);
    return walk<Kind::wgrad_1x128, TileM, TileN>(candidate, q.m, n, k, q.experts);
  });
  choice.waves = static_cast<double>(choice.tiles) / static_cast<double>(q.sm_count);
  const double waves = std::ceil(choice.waves);
  choice.idle = waves > 0 ? 1 - choice.waves / waves : 0;
  return choice;
}

std::vector<GemmCandidate> grouped_gemm_candidates(const GemmQuery& q) {
  check(q);
  return candidates(problem_of(q), q.sm_count);
}

int64_t sm_count(int device) { return cuda::sm_count({DeviceType::cuda, device}); }

void force_grouped_gemm(const GemmCandidate* candidate) { force(candidate); }

}  // namespace fp8moe
