// Which tile a CTA works on next: a static persistent order, computed by whoever loads.
#pragma once

#include "cuda/gemm/params.h"

namespace fp8moe::cuda::gemm {

inline constexpr int kNoMore = -1;  // as Tile::k_blocks: the last tile was the last

struct alignas(16) Tile {
  int expert = 0;
  int row = 0;      // first row of A
  int rows = 0;     // rows of D from here on; none or less: nothing to store
  int column = 0;   // first column of D
  int k_first = 0;  // first K-block
  int k_blocks = 0;
};

// Fills first_tile [E+1] in shared memory with the prefix sums of the tiles of each expert's rows.
// One warp.
template <int TileN>
__device__ void scan_tiles(const Params& params, int* first_tile) {
  const int tiles_n = (params.n + TileN - 1) / TileN;
  const int lane = static_cast<int>(threadIdx.x);
  int before = 0;
  for (int base = 0; base < params.experts; base += 32) {
    const int e = base + lane;
    int sum = 0;
    if (e < params.experts) {
      const int rows = params.row_offsets[e + 1] - params.row_offsets[e];
      sum = (rows + kTileM - 1) / kTileM * tiles_n;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (e < params.experts) first_tile[e + 1] = before + sum;
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  if (lane == 0) first_tile[0] = 0;
  __syncwarp();
}

template <Kind kKind, int TileN>
class Schedule {
 public:
  __device__ Schedule(const Params& params, const int* first_tile)
      : params_(params), first_tile_(first_tile), at_(static_cast<int>(blockIdx.x)) {}

  // The next tile of this CTA; false when there is none.
  __device__ bool next(Tile& tile) {
    const int tiles_n = (params_.n + TileN - 1) / TileN;
    if constexpr (kKind == Kind::rows) {
      while (expert_ < params_.experts && at_ >= first_tile_[expert_ + 1]) ++expert_;
      if (expert_ >= params_.experts) return false;
      const int first = params_.row_offsets[expert_];
      const int rows = params_.row_offsets[expert_ + 1] - first;
      place(tile, at_ - first_tile_[expert_], (rows + kTileM - 1) / kTileM, tiles_n);
      tile.rows = rows - tile.row;
      tile.row += first;
      tile.k_first = 0;
      tile.k_blocks = params_.k_blocks;
    } else {
      const int tiles_m = (params_.m + kTileM - 1) / kTileM;
      expert_ = at_ / (tiles_m * tiles_n);
      if (expert_ >= params_.experts) return false;
      place(tile, at_ - expert_ * tiles_m * tiles_n, tiles_m, tiles_n);
      tile.rows = params_.m - tile.row;
      tile.k_first = params_.col_offsets[expert_] / kBlockK;
      tile.k_blocks = (params_.tokens_per_expert[expert_] + kBlockK - 1) / kBlockK;
    }
    tile.expert = expert_;
    at_ += static_cast<int>(gridDim.x);
    return true;
  }

 private:
  // Tiles in bands of kBand columns, rows of tiles outside: what the SMs work on at one time stays
  // near square, so it reads few distinct bytes and finds them in L2.
  static constexpr int kBand = 8;

  __device__ static void place(Tile& tile, int within, int tiles_m, int tiles_n) {
    const int band = within / (tiles_m * kBand);
    const int in_band = within - band * tiles_m * kBand;
    const int width = min(kBand, tiles_n - band * kBand);
    const int step = in_band / width;
    tile.row = step * kTileM;
    tile.column = (band * kBand + in_band - step * width) * TileN;
  }

  const Params& params_;
  const int* first_tile_;
  int at_;
  int expert_ = 0;
};

}  // namespace fp8moe::cuda::gemm
