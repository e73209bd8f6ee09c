// Promotion: the tensor core's sums of one K-block, times the scales, into fp32.
#pragma once

#include <cutlass/arch/barrier.h>

#include "cuda/gemm/params.h"
#include "cuda/gemm/schedule.cuh"
#include "cuda/gemm/stage.h"

namespace fp8moe::cuda::gemm {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;

constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

// Column groups of a tile that lie in one block of 128 columns of B each, whatever the tile.
template <int TileN>
inline constexpr int kColumnGroups = TileN / gcd(TileN, 128);

// The producer's side of scales by blocks: which four floats of a stage come from where. A tile of
// 192 columns starts at a multiple of 64 and touches two blocks of B: {first, middle, last third of
// the columns, A's}. One of 128 touches one: {B's, -, -, A's}.
template <Kind kKind, int TileN>
class BlockScales {
 public:
  __device__ BlockScales(const Params& params, const Tile& tile) {
    const int blocks = (params.n + 127) / 128, block = tile.column / 128;
    const int64_t row = kKind == Kind::rows ? int64_t{tile.expert} * blocks + block : block;
    first_ = params.block_scale_b + row * params.k_blocks + tile.k_first;
    if constexpr (kColumnGroups<TileN> > 1) {
      last_ = block + 1 < blocks ? first_ + params.k_blocks : first_;
      middle_ = tile.column % 128 != 0 ? last_ : first_;
    }
    if constexpr (kKind == Kind::tokens_block)
      of_rows_ = params.block_scale_a + int64_t{tile.row / 128} * params.k_blocks + tile.k_first;
  }

  // Asynchronously; `full` waits for them, too. A load would hold the producer up: under the
  // traffic of TMA it takes as long as a K-block.
  __device__ __forceinline__ void copy(int k, float* to, FullBarrier& full) const {
    const uint32_t at = cute::cast_smem_ptr_to_uint(to);
    fetch(at, first_ + k);
    if constexpr (kColumnGroups<TileN> > 1) {
      fetch(at + 4, middle_ + k);
      fetch(at + 8, last_ + k);
    }
    if constexpr (kKind == Kind::tokens_block) fetch(at + 12, of_rows_ + k);
    cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t*>(&full));
  }

 private:
  static __device__ __forceinline__ void fetch(uint32_t to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
  }

  const float *first_, *middle_, *last_, *of_rows_;
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

// The consumers' side. `load` reads a stage's scales before its multiply is issued: ptxas would
// sink what comes later below the wait. of_rows, of_others: the parts of Ring::scale_a, scale_b.
template <Kind kKind, int TileN>
class Promoter;

// A by rows of 1x128, B by blocks of 128x128.
template <int TileN>
class Promoter<Kind::rows, TileN> {
  static constexpr int kGroups = kColumnGroups<TileN>;

 public:
  __device__ Promoter(const Tile& tile, int half)
      : row_(tile.row % 4 + 64 * half + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) {}

  __device__ __forceinline__ void load(const float* of_rows, const float* of_blocks) {
    const float upper = of_rows[row_], lower = of_rows[row_ + 8];
    float4 b;
    if constexpr (kGroups == 1)
      b.x = *of_blocks;
    else
      b = *reinterpret_cast<const float4*>(of_blocks);
    const float blocks[3] = {b.x, b.y, b.z};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      scale_[0][g] = upper * blocks[g];
      scale_[1][g] = lower * blocks[g];
    }
  }
  template <bool First>
  __device__ __forceinline__ void add(const float (&part)[TileN / 2], float (&sum)[TileN / 2],
                                      const float*) const {
    add_scaled<First, TileN>(part, sum, scale_);
  }

 private:
  int row_;
  float scale_[2][kGroups];
};

// Blocks of 128x128 on both sides: one scale for a column group.
template <int TileN>
class Promoter<Kind::tokens_block, TileN> {
  static constexpr int kGroups = kColumnGroups<TileN>;

 public:
  __device__ Promoter(const Tile&, int) {}

  __device__ __forceinline__ void load(const float*, const float* of_blocks) {
    const float4 b = *reinterpret_cast<const float4*>(of_blocks);
    const float blocks[3] = {b.x, b.y, b.z};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) scale_[0][g] = scale_[1][g] = blocks[g] * b.w;
  }
  template <bool First>
  __device__ __forceinline__ void add(const float (&part)[TileN / 2], float (&sum)[TileN / 2],
                                      const float*) const {
    add_scaled<First, TileN>(part, sum, scale_);
  }

 private:
  float scale_[2][kGroups];
};

// 1x128 along the contracted dimension on both sides: a scale for each row and each column, read
// from the stage while it is added.
template <int TileN>
class Promoter<Kind::tokens_column, TileN> {
 public:
  __device__ Promoter(const Tile&, int half)
      : row_(64 * half + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) {}

  __device__ __forceinline__ void load(const float* of_rows, const float*) {
    upper_ = of_rows[row_];
    lower_ = of_rows[row_ + 8];
  }
  template <bool First>
  __device__ __forceinline__ void add(const float (&part)[TileN / 2], float (&sum)[TileN / 2],
                                      const float* of_columns) const {
    const auto* pairs = reinterpret_cast<const float2*>(of_columns) + threadIdx.x % 4;
#pragma unroll
    for (int g = 0; g < TileN / 8; ++g) {
      const float2 b = pairs[4 * g];
      accumulate<First>(sum[4 * g], part[4 * g] * b.x, upper_);
      accumulate<First>(sum[4 * g + 1], part[4 * g + 1] * b.y, upper_);
      accumulate<First>(sum[4 * g + 2], part[4 * g + 2] * b.x, lower_);
      accumulate<First>(sum[4 * g + 3], part[4 * g + 3] * b.y, lower_);
    }
  }

 private:
  int row_;
  float upper_ = 0.0f, lower_ = 0.0f;
};

}  // namespace fp8moe::cuda::gemm
