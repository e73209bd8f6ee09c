// Promotion: the tensor core's sums of one K-block, times the scales, into fp32.
#pragma once

#include <type_traits>

#include "gemm/params.h"
#include "gemm/schedule.h"
#include "gemm/stage.h"

namespace fp8moe::cuda::gemm {

constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

// Groups of a tile's rows or columns that lie in one block of 128 each, whatever the tile: a side
// of 192 starts at a multiple of 64 and touches two blocks, so its groups are its first, middle and
// last third. One of 128 has one group.
template <int Side>
inline constexpr int kGroups = Side / gcd(Side, 128);

// The scales of the blocks that a side of a tile touches, for its K-blocks.
template <int Side>
class SideScales {
 public:
  // scales [blocks, stride]; the side starts at row or column `begin`, with K-block k_first.
  __device__ SideScales(const float* scales, int blocks, int stride, int begin, int k_first) {
    const int block = begin / 128;
    first_ = scales + int64_t{block} * stride + k_first;
    if constexpr (kGroups<Side> > 1) {
      last_ = block + 1 < blocks ? first_ + stride : first_;
      middle_ = begin % 128 != 0 ? last_ : first_;
    }
  }

  __device__ float first(int k) const { return first_[k]; }
  // Of each group, times `scale`.
  __device__ float4 operator()(int k, float scale) const {
    float4 scales{first_[k] * scale, 0.0f, 0.0f, 0.0f};
    if constexpr (kGroups<Side> > 1) {
      scales.y = middle_[k] * scale;
      scales.z = last_[k] * scale;
    }
    return scales;
  }

 private:
  const float *first_, *middle_, *last_;
};

// The scales by blocks of a tile's K-blocks: of each group of B's columns, times A's where A has
// blocks, too; of a 192x128 tile, of each group of A's rows, times B's.
template <Kind kKind, int TileM, int TileN>
class BlockScales {
 public:
  __device__ BlockScales(const Params& params, const Tile& tile)
      : b_(params.block_scale_b + (kKind == Kind::fprop ? int64_t{tile.expert} * blocks(params.n) *
                                                              params.first_k_blocks
                                                        : 0),
           blocks(params.n), kKind == Kind::fprop ? params.first_k_blocks : params.k_blocks,
           tile.column, tile.k_first),
        a_(params.block_scale_a, blocks(params.m), params.k_blocks, tile.row, tile.k_first) {}

  __device__ float4 operator()(int k) const {
    if constexpr (kKind != Kind::fprop && kGroups<TileM> > 1) return a_(k, b_.first(k));
    return b_(k, kKind == Kind::wgrad_128x128 ? a_.first(k) : 1.0f);
  }

  // Of fprop's second pair, which has one K-block.
  __device__ static float4 second(const Params& params, const Tile& tile) {
    const int all = blocks(params.n);
    return SideScales<kSideN>(params.block_scale_b2 + tile.expert * all, all, 1, tile.column, 0)(
        0, 1.0f);
  }

 private:
  static constexpr int kSideN =
      kKind == Kind::fprop ? tile_shape(TileM, TileN).scale_columns : TileN;

  __device__ static int blocks(int side) { return (side + 127) / 128; }

  SideScales<kSideN> b_;
  SideScales<TileM> a_;  // of wgrad_128x128
};

// Two sums of adjacent columns, the right one in the lower word. wgmma fixes part[i] in a register
// of i's parity, and 64 bits lie in an even register and the odd one after it: so a sum and its
// part are in different register banks, and a multiply-add of them takes one cycle.
using BoundPair = uint64_t;

// With scales of columns every sum takes two operations, and the moves that bound pairs bring cost
// more than the banks (docs/notes).
template <Kind kKind>
using SumPair = std::conditional_t<kKind == Kind::wgrad_1x128, float2, BoundPair>;

__device__ __forceinline__ float2 columns(float2 pair) { return pair; }

__device__ __forceinline__ float2 columns(BoundPair pair) {
  float2 v;
  asm("mov.b64 {%0, %1}, %2;" : "=f"(v.y), "=f"(v.x) : "l"(pair));
  return v;
}

// pair (+)= {x * scale_x, y * scale_y}.
template <bool First>
__device__ __forceinline__ void accumulate(float2& pair, float x, float y, float scale_x,
                                           float scale_y) {
  pair.x = First ? x * scale_x : fmaf(x, scale_x, pair.x);
  pair.y = First ? y * scale_y : fmaf(y, scale_y, pair.y);
}

template <bool First>
__device__ __forceinline__ void accumulate(BoundPair& pair, float x, float y, float scale) {
  float2 v = First ? float2{} : columns(pair);
  accumulate<First>(v, x, y, scale, scale);
  asm("mov.b64 %0, {%1, %2};" : "=l"(pair) : "f"(v.y), "f"(v.x));
}

// sums (+)= part * scale of its row half and column group.
template <bool First, int Groups, int Parts, int Pairs>
__device__ __forceinline__ void add_scaled(const float (&part)[Parts], BoundPair (&sums)[Pairs],
                                           const float (&scale)[2][Groups]) {
  constexpr int kPerGroup = Parts / 4 / Groups;  // instructions' column groups of 8
#pragma unroll
  for (int i = 0; i < Parts / 2; ++i)
    accumulate<First>(sums[i], part[2 * i], part[2 * i + 1], scale[i % 2][i / 2 / kPerGroup]);
}

// Where the scale of a thread's upper row stands behind a box's first.
__device__ __forceinline__ int row_in_box() {
  return static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
}

// What a warpgroup multiplies: 64 rows of a whole tile, 64x128 of a tail tile (kTailColumns), of
// which a third warpgroup has none.
enum class Shape { whole, tail };
template <int TileN>
constexpr int part_columns(Shape shape) {
  return shape == Shape::whole ? TileN : 2 * kBox;
}

// The consumers' side, for a warpgroup's share of a tile. `load` reads a K-block's scales before
// its multiply is issued (but for a tile's first one where tiles begin at once): ptxas would sink
// what comes later below the wait. Those of columns are read in `prepare`, under the multiply, and
// `add`. of_rows, of_columns: Ring::scale_a, scale_b; of_blocks: of the K-block in its batch.
template <Kind kKind, int TileM, int TileN, Shape kShape>
class Promoter;

// A by rows of 1x128, B by blocks of 128x128.
template <int TileM, int TileN>
class Promoter<Kind::fprop, TileM, TileN, Shape::whole> {
  static constexpr int kColumnGroups = kGroups<TileN>;

 public:
  __device__ Promoter(const Tile& tile, int consumer_index)
      : row_(tile.row % 4 + kScaleStride * consumer_index + row_in_box()) {}

  __device__ __forceinline__ void load(const float* of_rows, const float4* of_blocks) {
    const float upper = of_rows[row_], lower = of_rows[row_ + 8];
    float4 b;
    if constexpr (kColumnGroups == 1)
      b.x = of_blocks->x;
    else
      b = *of_blocks;
    const float blocks[3] = {b.x, b.y, b.z};
#pragma unroll
    for (int g = 0; g < kColumnGroups; ++g) {
      scale_[0][g] = upper * blocks[g];
      scale_[1][g] = lower * blocks[g];
    }
  }
  template <bool First>
  __device__ __forceinline__ void add(const float (&part)[TileN / 2], BoundPair (&sums)[TileN / 4],
                                      const float*) const {
    add_scaled<First>(part, sums, scale_);
  }

 private:
  int row_;
  float scale_[2][kColumnGroups];
};

// The same for a tail tile: a warpgroup's 128 columns lie in one block of B.
template <int TileM, int TileN>
class Promoter<Kind::fprop, TileM, TileN, Shape::tail> {
 public:
  __device__ Promoter(const Tile& tile, int consumer_index)
      : row_(tile.row % 4 + row_in_box()), second_(consumer_index != 0) {}

  __device__ __forceinline__ void load(const float* of_rows, const float4* of_blocks) {
    const float4 b = *of_blocks;
    const float block = second_ ? b.z : b.x;
    scale_[0][0] = of_rows[row_] * block;
    scale_[1][0] = of_rows[row_ + 8] * block;
  }
  template <bool First>
  __device__ __forceinline__ void add(const float (&part)[kBox], BoundPair (&sums)[TileN / 4],
                                      const float*) const {
    add_scaled<First>(part, sums, scale_);
  }

 private:
  int row_;
  bool second_;  // its block of B is the second of the tile
  float scale_[2][1];
};

// Blocks of 128x128 on both sides: one scale for a column group, or for all of a warpgroup's 64
// rows of a 192x128 tile.
template <int TileM, int TileN>
class Promoter<Kind::wgrad_128x128, TileM, TileN, Shape::whole> {
  static constexpr bool kOfRows = kGroups<TileM> > 1;
  static constexpr int kColumnGroups = kOfRows ? 1 : kGroups<TileN>;

 public:
  __device__ Promoter(const Tile&, int consumer_index) : consumer_index_(consumer_index) {}

  __device__ __forceinline__ void load(const float*, const float4* of_blocks) {
    if constexpr (kOfRows) {
      scale_[0][0] = scale_[1][0] = reinterpret_cast<const float*>(of_blocks)[consumer_index_];
    } else {
      const float4 b = *of_blocks;
      const float blocks[3] = {b.x, b.y, b.z};
#pragma unroll
      for (int g = 0; g < kColumnGroups; ++g) scale_[0][g] = scale_[1][g] = blocks[g];
    }
  }
  template <bool First>
  __device__ __forceinline__ void add(const float (&part)[TileN / 2], BoundPair (&sums)[TileN / 4],
                                      const float*) const {
    add_scaled<First>(part, sums, scale_);
  }

 private:
  int consumer_index_;
  float scale_[2][kColumnGroups];
};

// 1x128 along the contracted dimension on both sides: a scale for each row and each column, whose
// products are made while parts are added. The columns' first scales are read under the multiply.
template <int TileM, int TileN>
class Promoter<Kind::wgrad_1x128, TileM, TileN, Shape::whole> {
 public:
  __device__ Promoter(const Tile&, int consumer_index)
      : row_(kScaleStride * consumer_index + row_in_box()) {}

  __device__ __forceinline__ void load(const float* of_rows, const float4*) {
    upper_ = of_rows[row_];
    lower_ = of_rows[row_ + 8];
  }
  __device__ __forceinline__ void prepare(const float* of_columns) {
#pragma unroll
    for (int g = 0; g < kRead; g += 2) {
      const float2 v = read_[g] = scales(of_columns, g);
      const float2 w = read_[g + 1] = scales(of_columns, g + 1);
      // Never stored, but ptxas has to know it here, and would else sink it below the wait. No
      // branch, which would let it read twice.
      asm volatile(
          "{\n .reg .pred never;\n setp.lt.s32 never, %0, 0;\n"
          " @never st.volatile.shared.v4.f32 [%1], {%2, %3, %4, %5};\n}" ::"r"(row_),
          "r"(16 * g), "f"(v.x), "f"(v.y), "f"(w.x), "f"(w.y));
    }
  }
  template <bool First>
  __device__ __forceinline__ void add(const float (&part)[TileN / 2], float2 (&sums)[TileN / 4],
                                      const float* of_columns) const {
#pragma unroll
    for (int g = 0; g < TileN / 8; ++g) {
      const float2 b = !First && g < kRead ? read_[g] : scales(of_columns, g);
      const float* p = &part[4 * g];
      accumulate<First>(sums[2 * g], p[0], p[1], upper_ * b.x, upper_ * b.y);
      accumulate<First>(sums[2 * g + 1], p[2], p[3], lower_ * b.x, lower_ * b.y);
    }
  }

 private:
  // Of a thread's two columns in instruction's column group g.
  __device__ __forceinline__ static float2 scales(const float* of_columns, int g) {
    return reinterpret_cast<const float2*>(of_columns)[4 * g + threadIdx.x % 4];
  }

  static constexpr int kRead = 4;  // column groups; by measurement (docs/notes)
  float2 read_[kRead];
  int row_;
  float upper_ = 0.0f, lower_ = 0.0f;
};

}  // namespace fp8moe::cuda::gemm
