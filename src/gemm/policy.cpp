#include "gemm/policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include "fp8moe/error.h"
#include "gemm/schedule.h"

namespace fp8moe::cuda::gemm {
namespace {

// Fitted to the record docs/benchmarks/gemm-candidates-h100.json, as TileShape::k_block_ns is.
constexpr double kTileNs = 330;  // a tile's start and end, beside its K-blocks
constexpr double kSpread = 0.5;  // of fprop's rows per expert, in standard deviations
// What a GEMM gets of an H100's memory. Not the board's own bandwidth: by an H200's the choice took
// up to 1.10 of the time (docs/notes).
constexpr double kBytesPerNs = 2814;
// A static schedule: fast CTAs run ahead, and slow ones read again what has left L2.
constexpr double kStaticBytes = 1.013;  // times the bytes
constexpr double kClaimNs = 1800;       // of a launch whose CTAs claim their tiles
constexpr double kReducedBytes = 1.07;  // per byte of D that is reduced into, where a load counts 1
constexpr double kLoadNs = 840;         // a tile's wait for what D holds

// Rows of tiles in a raster group. Other heights gain nothing on an H100 (docs/notes).
constexpr int raster_group(Kind kind, bool dynamic) {
  return kind == Kind::fprop || dynamic ? 4 : 8;
}

// K-blocks of a CTA in one launch, at most. CTAs drift apart, and what they share leaves L2
// (docs/notes): 22,000 in one launch take up to 1.2 of the time of several.
constexpr double kLaunchKBlocks = 4000;

std::optional<Candidate>& forced() {
  static thread_local std::optional<Candidate> candidate;
  return candidate;
}

bool is_legal(const Problem& p, const Candidate& c) {
  for (const TileShape& shape : kTiles)
    if (shape.m == c.tile_m && shape.n == c.tile_n)
      return shape.writes(p.kind, p.bf16) && c.raster_group > 0 && c.launches > 0 &&
             (p.kind != Kind::fprop || !c.dynamic) && (!c.load_d || (p.add && !p.bf16));
  return false;
}

constexpr double ceil_div(double a, double b) { return std::ceil(a / b); }

struct Tiles {
  double count, depth;  // of all experts; the K-blocks of one
};

// Rows of fprop are spread over the experts as a random routing does it, whose standard deviation
// is sqrt(rows per expert * (1 - 1 / experts)): where the mean fills whole tiles, half of the
// experts have a few rows more, and with them tail tiles. Beside whole tiles these cost what half
// of the experts' do; apart from them they hold up the others, and cost what all experts' would.
Tiles tiles_of(const Problem& p, const TileShape& shape) {
  const auto experts = static_cast<double>(p.experts), k_blocks = static_cast<double>(p.k_blocks);
  if (p.kind != Kind::fprop)
    return {experts * ceil_div(static_cast<double>(p.m), shape.m) *
                ceil_div(static_cast<double>(p.n), shape.n),
            k_blocks / experts};
  const double mean = ceil_div(static_cast<double>(p.m), experts);
  const auto tiles = [&](double rows) {
    return row_tiles(shape, static_cast<int>(p.n), static_cast<int>(rows));
  };
  const RowTiles more = tiles(mean + kSpread * std::sqrt(mean * (1 - 1 / experts)));
  const bool beside = tails_beside(shape, raster_group(p.kind, false), more);
  return {experts * (beside ? (tiles(mean).all() + more.all()) / 2.0 : more.all()), k_blocks};
}

int launches(const Problem& p, const TileShape& shape, int64_t sm_count) {
  const Tiles tiles = tiles_of(p, shape);
  const double k_blocks = tiles.count * tiles.depth / static_cast<double>(sm_count);
  return static_cast<int>(
      std::clamp(ceil_div(k_blocks, kLaunchKBlocks), 1.0, static_cast<double>(p.experts)));
}

}  // namespace

std::vector<Candidate> candidates(const Problem& p, int64_t sm_count) {
  std::vector<Candidate> legal;
  for (const TileShape& shape : kTiles)
    for (const bool dynamic : {false, true})
      for (const bool load_d : {false, true}) {
        const Candidate c{shape.m, shape.n, raster_group(p.kind, dynamic),
                          dynamic, load_d,  launches(p, shape, sm_count)};
        if (is_legal(p, c)) legal.push_back(c);
      }
  return legal;
}

double nanoseconds(const Problem& p, const Candidate& c, int64_t sm_count) {
  const TileShape& shape = shape_of(c);
  const auto m = static_cast<double>(p.m), n = static_cast<double>(p.n),
             experts = static_cast<double>(p.experts), k_blocks = static_cast<double>(p.k_blocks);
  const bool fprop = p.kind == Kind::fprop;
  const double operands = k_blocks * kBlockK * (m + (fprop ? experts : 1) * n);  // bytes
  double d = (fprop ? 1 : experts) * m * n * (p.bf16 ? 2 : 4);
  if (p.add) d *= 1 + (p.bf16 || c.load_d ? 1 : kReducedBytes);
  const Tiles tiles = tiles_of(p, shape);
  // SMs that the last wave leaves idle leave the others their power: half of it counts as whole.
  const double full = tiles.count / static_cast<double>(sm_count),
               waves = (std::ceil(full) + std::max(full, 1.0)) / 2;
  const double arithmetic =
      waves * (kTileNs + tiles.depth * shape.k_block_ns + (c.load_d ? kLoadNs : 0));
  const double bytes = (operands + d) * (c.dynamic ? 1 : kStaticBytes);
  const double memory = bytes / kBytesPerNs;
  // Near the larger of the two, as they overlap.
  const double both = std::sqrt(std::hypot(arithmetic * arithmetic, memory * memory));
  return both + (c.dynamic ? kClaimNs : 0);
}

Candidate choose(const Problem& p, int64_t sm_count) {
  if (const std::optional<Candidate>& given = forced()) {
    if (is_legal(p, *given)) return *given;
    throw InvalidArgument("the forced candidate is not legal for this grouped GEMM; got tile " +
                          std::to_string(given->tile_m) + "x" + std::to_string(given->tile_n));
  }
  Candidate cheapest;
  double least = std::numeric_limits<double>::infinity();
  for (const Candidate& c : candidates(p, sm_count)) {
    const double cost = nanoseconds(p, c, sm_count);
    if (cost < least) {
      cheapest = c;
      least = cost;
    }
  }
  return cheapest;
}

void force(const Candidate* candidate) {
  forced() = candidate ? std::optional(*candidate) : std::nullopt;
}

}  // namespace fp8moe::cuda::gemm
