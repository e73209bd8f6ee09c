// Promotion: the tensor core's sums of one K-block, times the scales, into fp32.
#pragma once

#include "cuda/gemm/params.h"
#include "cuda/gemm/schedule.cuh"

namespace fp8moe::cuda::gemm {

constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

// The scales of B by blocks of 128 columns, times those of A where A has one a block too. A tile
// touches at most two blocks of columns; the boundary is at a multiple of kStep columns. Each lane
// reads the scales of one K-block in 32, and a shuffle hands them out.
template <int TileN, bool BlocksOfA>
class BlockScales {
 public:
  static constexpr int kStep = gcd(TileN, 128);
  static constexpr int kGroups = TileN / kStep;
  static_assert(TileN <= 128 + kStep, "a tile must not touch three blocks");

  __device__ BlockScales(const Params& params, const Tile& tile)
      : k_blocks_(tile.k_blocks), boundary_(128 - tile.column % 128) {
    const int blocks = (params.n + 127) / 128;
    const int block = tile.column / 128;
    const int64_t row = BlocksOfA ? block : int64_t{tile.expert} * blocks + block;
    first_ = params.block_scale_b + row * params.k_blocks + tile.k_first;
    to_second_ = block + 1 < blocks ? params.k_blocks : 0;
    if constexpr (BlocksOfA)
      a_ = params.block_scale_a + int64_t{tile.row / kTileM} * params.k_blocks + tile.k_first;
  }

  // Takes the scales of K-block k; k ascends by one.
  __device__ __forceinline__ void take(int k) {
    if (k % 32 == 0) {
      const int mine = k + static_cast<int>(threadIdx.x) % 32;
      if (mine < k_blocks_) {
        const float a = BlocksOfA ? __ldg(a_ + mine) : 1.0f;
        mine_[0] = a * __ldg(first_ + mine);
        mine_[1] = a * __ldg(first_ + to_second_ + mine);
      }
    }
    // threadIdx.y is 0; it keeps the results out of the uniform registers, a detour of 20 cycles.
    const int lane = k % 32 + static_cast<int>(threadIdx.y);
    scale_[0] = __shfl_sync(0xffffffffu, mine_[0], lane);
    scale_[1] = __shfl_sync(0xffffffffu, mine_[1], lane);
  }

  // Of columns [kStep group, kStep (group + 1)) of the tile.
  __device__ __forceinline__ float of(int group) const {
    if (group == 0) return scale_[0];
    return kStep * group >= 128 || kStep * group >= boundary_ ? scale_[1] : scale_[0];
  }

 private:
  const float* first_;
  const float* a_ = nullptr;
  int to_second_;
  int k_blocks_;
  int boundary_;
  float mine_[2] = {};
  float scale_[2];
};

template <bool First>
__device__ __forceinline__ void accumulate(float& sum, float part, float scale) {
  sum = First ? part * scale : fmaf(part, scale, sum);
}

// sum (+)= part * scale of its row half and column group.
template <bool First, int TileN, int Groups>
__device__ __forceinline__ void add_scaled(const float (&part)[TileN / 2], float (&sum)[TileN / 2],
                                           const float (&scale)[2][Groups]) {
  constexpr int kPerGroup = TileN / 8 / Groups;  // instructions' column groups of 8
#pragma unroll
  for (int i = 0; i < TileN / 2; ++i)
    accumulate<First>(sum[i], part[i], scale[i / 2 % 2][i / 4 / kPerGroup]);
}

template <Kind kKind, int TileN>
class Promoter;

// A by rows of 1x128, B by blocks of 128x128.
template <int TileN>
class Promoter<Kind::rows, TileN> {
  using Scales = BlockScales<TileN, false>;

 public:
  static constexpr bool kReadsStage = false;

  __device__ Promoter(const Params& params, const Tile& tile, int half)
      : blocks_(params, tile),
        row_(tile.row % 4 + 64 * half + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) {}

  __device__ __forceinline__ void load(const float* scale_a, int k) {
    const float upper = scale_a[row_], lower = scale_a[row_ + 8];
    blocks_.take(k);
#pragma unroll
    for (int g = 0; g < Scales::kGroups; ++g) {
      scale_[0][g] = upper * blocks_.of(g);
      scale_[1][g] = lower * blocks_.of(g);
    }
  }
  template <bool First>
  __device__ __forceinline__ void add(const float (&part)[TileN / 2], float (&sum)[TileN / 2],
                                      const float*) const {
    add_scaled<First, TileN>(part, sum, scale_);
  }

 private:
  Scales blocks_;
  int row_;
  float scale_[2][Scales::kGroups];
};

// Blocks of 128x128 on both sides: one scale for a column group.
template <int TileN>
class Promoter<Kind::tokens_block, TileN> {
  using Scales = BlockScales<TileN, true>;

 public:
  static constexpr bool kReadsStage = false;

  __device__ Promoter(const Params& params, const Tile& tile, int) : blocks_(params, tile) {}

  __device__ __forceinline__ void load(const float*, int k) {
    blocks_.take(k);
#pragma unroll
    for (int g = 0; g < Scales::kGroups; ++g) scale_[0][g] = scale_[1][g] = blocks_.of(g);
  }
  template <bool First>
  __device__ __forceinline__ void add(const float (&part)[TileN / 2], float (&sum)[TileN / 2],
                                      const float*) const {
    add_scaled<First, TileN>(part, sum, scale_);
  }

 private:
  Scales blocks_;
  float scale_[2][Scales::kGroups];
};

// 1x128 along the contracted dimension on both sides: a scale for each row and each column, read
// from the stage while it is added, which therefore is released afterwards.
template <int TileN>
class Promoter<Kind::tokens_column, TileN> {
 public:
  static constexpr bool kReadsStage = true;

  __device__ Promoter(const Params&, const Tile&, int half)
      : row_(64 * half + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) {}

  __device__ __forceinline__ void load(const float* scale_a, int) {
    upper_ = scale_a[row_];
    lower_ = scale_a[row_ + 8];
  }
  template <bool First>
  __device__ __forceinline__ void add(const float (&part)[TileN / 2], float (&sum)[TileN / 2],
                                      const float* scale_b) const {
    const float4* fours = reinterpret_cast<const float4*>(scale_b) + threadIdx.x % 4;
#pragma unroll
    for (int g = 0; g < TileN / 16; ++g) {
      const float4 b = fours[4 * g];
      const float of_column[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int i = 8 * g + 4 * (c / 2) + c % 2;
        accumulate<First>(sum[i], part[i] * of_column[c], upper_);
        accumulate<First>(sum[i + 2], part[i + 2] * of_column[c], lower_);
      }
    }
  }

 private:
  int row_;
  float upper_ = 0.0f, lower_ = 0.0f;
};

}  // namespace fp8moe::cuda::gemm
