// Promotion: the tensor core's sums of one K-block, times the scales, into fp32.
#pragma once

#include "cuda/gemm/params.h"
#include "cuda/gemm/schedule.cuh"

namespace fp8moe::cuda::gemm {

constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

// The scales of B by blocks of 128 columns: a tile touches at most two blocks, and the boundary
// between them is at a multiple of kStep columns.
template <int TileN>
class BlockScalesB {
 public:
  static constexpr int kStep = gcd(TileN, 128);
  static constexpr int kGroups = TileN / kStep;
  static_assert(TileN <= 128 + kStep, "a tile must not touch three blocks");

  __device__ BlockScalesB(const Params& params, const Tile& tile, int64_t row_length,
                          bool by_expert)
      : boundary_(128 - tile.column % 128) {
    const int blocks = (params.n + 127) / 128;
    const int block = tile.column / 128;
    const int64_t row = by_expert ? int64_t{tile.expert} * blocks + block : block;
    first_ = params.block_scale_b + row * row_length + tile.k_first;
    second_ = first_ + (block + 1 < blocks ? row_length : 0);
    scale_[0] = __ldg(first_);
    scale_[1] = __ldg(second_);
  }
  __device__ void next() {  // prefetches the following K-block's
    ++first_;
    ++second_;
    scale_[0] = __ldg(first_);
    scale_[1] = __ldg(second_);
  }
  // Of columns [kStep group, kStep (group + 1)) of the tile.
  __device__ float of(int group) const { return kStep * group < boundary_ ? scale_[0] : scale_[1]; }

 private:
  const float* first_;
  const float* second_;
  int boundary_;
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
 public:
  static constexpr bool kReadsStage = false;

  __device__ Promoter(const Params& params, const Tile& tile, int half)
      : scale_b_(params, tile, params.k_blocks, true),
        row_(tile.row % 4 + 64 * half + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4),
        left_(tile.k_blocks) {}

  __device__ void load(const float* scale_a) {
    const float upper = scale_a[row_], lower = scale_a[row_ + 8];
#pragma unroll
    for (int g = 0; g < BlockScalesB<TileN>::kGroups; ++g) {
      scale_[0][g] = upper * scale_b_.of(g);
      scale_[1][g] = lower * scale_b_.of(g);
    }
    if (--left_ > 0) scale_b_.next();
  }
  template <bool First>
  __device__ void add(const float (&part)[TileN / 2], float (&sum)[TileN / 2], const float*) const {
    add_scaled<First, TileN>(part, sum, scale_);
  }

 private:
  BlockScalesB<TileN> scale_b_;
  int row_;
  int left_;  // K-blocks to go
  float scale_[2][BlockScalesB<TileN>::kGroups];
};

// Blocks of 128x128 on both sides: one scale for a column group.
template <int TileN>
class Promoter<Kind::tokens_block, TileN> {
 public:
  static constexpr bool kReadsStage = false;

  __device__ Promoter(const Params& params, const Tile& tile, int)
      : scale_b_(params, tile, params.k_blocks, false),
        scale_a_(params.block_scale_a + int64_t{tile.row / kTileM} * params.k_blocks +
                 tile.k_first),
        next_a_(__ldg(scale_a_)),
        left_(tile.k_blocks) {}

  __device__ void load(const float*) {
#pragma unroll
    for (int g = 0; g < BlockScalesB<TileN>::kGroups; ++g)
      scale_[0][g] = scale_[1][g] = next_a_ * scale_b_.of(g);
    if (--left_ > 0) {
      scale_b_.next();
      next_a_ = __ldg(++scale_a_);
    }
  }
  template <bool First>
  __device__ void add(const float (&part)[TileN / 2], float (&sum)[TileN / 2], const float*) const {
    add_scaled<First, TileN>(part, sum, scale_);
  }

 private:
  BlockScalesB<TileN> scale_b_;
  const float* scale_a_;
  float next_a_;
  int left_;  // K-blocks to go
  float scale_[2][BlockScalesB<TileN>::kGroups];
};

// 1x128 along the contracted dimension on both sides: a scale for each row and each column, read
// from the stage while it is added, which therefore is released afterwards.
template <int TileN>
class Promoter<Kind::tokens_column, TileN> {
 public:
  static constexpr bool kReadsStage = true;

  __device__ Promoter(const Params&, const Tile&, int half)
      : row_(64 * half + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) {}

  __device__ void load(const float* scale_a) {
    upper_ = scale_a[row_];
    lower_ = scale_a[row_ + 8];
  }
  template <bool First>
  __device__ void add(const float (&part)[TileN / 2], float (&sum)[TileN / 2],
                      const float* scale_b) const {
    const float2* pairs = reinterpret_cast<const float2*>(scale_b) + threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < TileN / 8; ++j) {
      const float2 b = pairs[4 * j];
      accumulate<First>(sum[4 * j + 0], part[4 * j + 0] * b.x, upper_);
      accumulate<First>(sum[4 * j + 1], part[4 * j + 1] * b.y, upper_);
      accumulate<First>(sum[4 * j + 2], part[4 * j + 2] * b.x, lower_);
      accumulate<First>(sum[4 * j + 3], part[4 * j + 3] * b.y, lower_);
    }
  }

 private:
  int row_;
  float upper_ = 0.0f, lower_ = 0.0f;
};

}  // namespace fp8moe::cuda::gemm
