// Which tile a CTA works on next: a static persistent order, computed by the producer.
#pragma once

#include "cuda/gemm/params.h"

namespace fp8moe::cuda::gemm {

// The operand whose two halves the CTAs of a pair load for each other.
enum class Shared : int { none, a, b };

inline constexpr int kNoMore = -1;  // as Tile::k_blocks: the last tile was the last

struct alignas(16) Tile {
  int expert = 0;
  int row = 0;      // first row of A
  int rows = 0;     // rows of D in this tile, at most kTileM; none or less: nothing to store
  int column = 0;   // first column of D
  int k_first = 0;  // first K-block
  int k_blocks = 0;
  Shared shared = Shared::none;
};

// Units of work of a cluster within an expert of tiles_m x tiles_n tiles. A pair of CTAs takes two
// tiles of one column, which share B; an odd last row of tiles is taken two columns at a time,
// which share A. So a pair never spans two experts and only an odd corner idles a CTA.
template <int Cluster>
__host__ __device__ inline int units_of(int tiles_m, int tiles_n) {
  if constexpr (Cluster == 1) return tiles_m * tiles_n;
  return tiles_m / 2 * tiles_n + tiles_m % 2 * ((tiles_n + 1) / 2);
}

// Fills first_unit [E+1] in shared memory with the prefix sums of the units of each expert's rows.
// One warp.
template <int Cluster, int TileN>
__device__ void scan_units(const Params& params, int* first_unit) {
  const int tiles_n = (params.n + TileN - 1) / TileN;
  const int lane = static_cast<int>(threadIdx.x);
  int before = 0;
  for (int base = 0; base < params.experts; base += 32) {
    const int e = base + lane;
    int sum = 0;
    if (e < params.experts) {
      const int rows = params.row_offsets[e + 1] - params.row_offsets[e];
      sum = units_of<Cluster>((rows + kTileM - 1) / kTileM, tiles_n);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (e < params.experts) first_unit[e + 1] = before + sum;
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  if (lane == 0) first_unit[0] = 0;
  __syncwarp();
}

template <Kind kKind, int TileN, int Cluster>
class Schedule {
 public:
  __device__ Schedule(const Params& params, const int* first_unit)
      : params_(params), first_unit_(first_unit), unit_(static_cast<int>(blockIdx.x) / Cluster) {}

  // The next tile of this CTA; false when there is none (then for the whole cluster).
  __device__ bool next(Tile& tile) {
    const int tiles_n = (params_.n + TileN - 1) / TileN;
    if constexpr (kKind == Kind::rows) {
      while (expert_ < params_.experts && unit_ >= first_unit_[expert_ + 1]) ++expert_;
      if (expert_ >= params_.experts) return false;
      const int first = params_.row_offsets[expert_];
      const int rows = params_.row_offsets[expert_ + 1] - first;
      place(tile, unit_ - first_unit_[expert_], (rows + kTileM - 1) / kTileM, tiles_n);
      tile.rows = rows - tile.row;
      tile.row += first;
      tile.k_first = 0;
      tile.k_blocks = params_.k_blocks;
    } else {
      const int tiles_m = (params_.m + kTileM - 1) / kTileM;
      const int units = units_of<Cluster>(tiles_m, tiles_n);
      expert_ = unit_ / units;
      if (expert_ >= params_.experts) return false;
      place(tile, unit_ - expert_ * units, tiles_m, tiles_n);
      tile.rows = params_.m - tile.row;
      tile.k_first = params_.col_offsets[expert_] / kBlockK;
      tile.k_blocks = (params_.tokens_per_expert[expert_] + kBlockK - 1) / kBlockK;
    }
    tile.expert = expert_;
    unit_ += static_cast<int>(gridDim.x) / Cluster;
    return true;
  }

 private:
  // Tiles in bands of kBand columns, rows of tiles outside: what the SMs work on at one time stays
  // near square, so it reads few distinct bytes and finds them in L2.
  static constexpr int kBand = 8;

  __device__ static void place(Tile& tile, int within, int tiles_m, int tiles_n) {
    const int rank = static_cast<int>(blockIdx.x) % Cluster;  // of this CTA in its cluster
    const int steps = Cluster == 1 ? tiles_m : tiles_m / 2;
    const int whole = steps * tiles_n;
    if (Cluster == 1 || within < whole) {
      const int band = within / (steps * kBand);
      const int in_band = within - band * steps * kBand;
      const int width = min(kBand, tiles_n - band * kBand);
      const int step = in_band / width;
      tile.row = (step * Cluster + rank) * kTileM;
      tile.column = (band * kBand + in_band - step * width) * TileN;
      tile.shared = Cluster == 1 ? Shared::none : Shared::b;
    } else {
      tile.row = (tiles_m - 1) * kTileM;
      tile.column = (2 * (within - whole) + rank) * TileN;
      tile.shared = Shared::a;
    }
  }

  const Params& params_;
  const int* first_unit_;
  int unit_;
  int expert_ = 0;
};

}  // namespace fp8moe::cuda::gemm
