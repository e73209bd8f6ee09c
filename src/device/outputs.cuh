// Where a kernel's quantized rows and columns go, and how a tile's scale follows from its amax.
#pragma once

#include "common/scale.h"
#include "fp8moe/ops.h"

namespace fp8moe::cuda {

constexpr float kMaxFloat = 0x1.fffffep127f;

// How a tile's scale follows from its amax, and whether values are multiplied or divided by it:
// by a kind that multiplies, pow2 alone (no division), or amax.
struct Scaling {
  static constexpr bool kDivides = false;
  ScaleKind kind;  // not amax
  float eps;
  float overflow;  // the largest finite value of what is quantized

  template <typename F>
  __device__ __forceinline__ TileScale of(float amax) const {
    return tile_scale(amax, F::kMax, kind, eps, overflow);
  }
};
struct Pow2Scaling {
  static constexpr bool kDivides = false;
  float eps;

  template <typename F>
  __device__ __forceinline__ TileScale of(float amax) const {
    return pow2_scale(amax, F::kMax, eps);
  }
};
struct AmaxScaling {
  static constexpr bool kDivides = true;
  float eps;

  template <typename F>
  __device__ __forceinline__ TileScale of(float amax) const {
    return amax_scale(amax, F::kMax, eps);
  }
};

// fn(the rule as a type). overflow: the largest finite value of what is quantized.
template <typename Fn>
void dispatch_scaling(ScaleRule rule, float overflow, Fn fn) {
  if (rule.kind == ScaleKind::amax)
    fn(AmaxScaling{rule.eps});
  else
    fn(Scaling{rule.kind, rule.eps, overflow});
}

// Columns a kernel makes: none, one scale a 128x128 tile, one a column of a tile.
enum class ColumnKind { none, block, column };

// So many strides of under 2^31: one instruction, where 64 bits times 64 are four. Written as such,
// for the compiler forgets that a stride it has widened outside of a loop has 32 bits.
__device__ __forceinline__ int64_t strides(int count, int64_t stride) {
  int64_t product;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(count), "r"(static_cast<int>(stride)));
  return product;
}

// Rows out, [M, C]; data == nullptr: none. Scale of tile t of row r: scale[r scale_row + t
// scale_tile].
struct RowsOut {
  uint8_t* data = nullptr;
  float* scale = nullptr;
  int64_t ld = 0;
  int64_t scale_row = 0;
  int64_t scale_tile = 0;
};

inline RowsOut rows_out(const Fp8Tensor& t) {
  if (!t.defined()) return {};
  const int64_t m = t.data.shape[0], k = t.data.shape[1];
  const bool row = t.layout == ScaleLayout::row;
  return {.data = t.data.as<uint8_t>(),
          .scale = t.scale_inv.as<float>(),
          .ld = k,
          .scale_row = row ? cdiv(k, kTile) : 1,
          .scale_tile = row ? 1 : pad4(m)};
}

// Columns out, [C, Kcap]; data == nullptr: none. Scale of column c of tile t, block b:
// scale[t scale_tile + b scale_block], and c % 128 words on where each column has its own.
struct ColumnsOut {
  uint8_t* data = nullptr;
  float* scale = nullptr;
  int64_t ld = 0;
  int64_t scale_tile = 0;
  int64_t scale_block = 0;
};

inline ColumnKind kind_of(const Fp8Tensor& columns) {
  if (!columns.defined()) return ColumnKind::none;
  return columns.layout == ScaleLayout::block ? ColumnKind::block : ColumnKind::column;
}

inline ColumnsOut columns_out(const Fp8Tensor& t) {
  if (!t.defined()) return {};
  const int64_t c = t.data.shape[0], ld = t.data.shape[1];
  const bool block = t.layout == ScaleLayout::block;
  return {.data = t.data.as<uint8_t>(),
          .scale = t.scale_inv.as<float>(),
          .ld = ld,
          .scale_tile = block ? ld / kTile : kTile,
          .scale_block = block ? 1 : pad4(c)};
}

}  // namespace fp8moe::cuda
