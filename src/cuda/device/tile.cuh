// A 128x128 tile of values in the registers of 256 threads, quantized along its rows (1x128 tiles)
// and, transposed, along its columns (128x128, or 128x1 tiles) by the scale rule of common/scale.h.
//
// Eight lanes share a row: thread t holds rows 4 (t/8) + j, j < 4, at columns 8 (t%8) + i and
// 64 + 8 (t%8) + i, i < 8. A warp's access is then 64 to 256 consecutive bytes of each of 4 rows,
// and a thread's 4 rows are 4 consecutive bytes of a transposed row.
#pragma once

#include "common/scale.h"
#include "cuda/device/convert.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/device/plan.cuh"
#include "cuda/device/reduce.cuh"
#include "fp8moe/ops.h"

namespace fp8moe::cuda {

constexpr int kTileThreads = 256;
constexpr float kMaxFloat = 0x1.fffffep127f;

struct Scaling {
  bool pow2;
  float eps;
  float overflow;  // the largest finite value of what is quantized
};

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
// scale[t scale_tile + b scale_block + (c % 128) scale_column].
struct ColumnsOut {
  uint8_t* data = nullptr;
  float* scale = nullptr;
  int64_t ld = 0;
  int64_t scale_tile = 0;
  int64_t scale_block = 0;
  int64_t scale_column = 0;  // 0: one scale a 128x128 tile
};

inline ColumnsOut columns_out(const Fp8Tensor& t) {
  if (!t.defined()) return {};
  const int64_t c = t.data.shape[0], ld = t.data.shape[1];
  const bool block = t.layout == ScaleLayout::block;
  return {.data = t.data.as<uint8_t>(),
          .scale = t.scale_inv.as<float>(),
          .ld = ld,
          .scale_tile = block ? ld / kTile : kTile,
          .scale_block = block ? 1 : pad4(c),
          .scale_column = block ? 0 : 1};
}

// This thread's place in a tile.
__device__ __forceinline__ int tile_lane() { return threadIdx.x & 7; }
__device__ __forceinline__ int tile_row() { return threadIdx.x / 8 * 4; }
__device__ __forceinline__ int tile_column(int half) { return 64 * half + 8 * tile_lane(); }

// 16 values of a row (columns tile_column(0) and tile_column(1) of `tile`, those past `columns`
// unwritten).
template <typename F>
__device__ __forceinline__ void store_row(const RowsOut& out, int64_t row, int tile, int columns,
                                          const float (&v)[16], float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = 128 * tile + tile_column(half);
    const float* x = v + 8 * half;
    const uint2 codes = {fp8_encode4<F>(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale),
                         fp8_encode4<F>(x[4] * scale, x[5] * scale, x[6] * scale, x[7] * scale)};
    if (column < columns) store(out.data + row * out.ld + column, codes);
  }
}

// Quantizes one row of a tile, or zeroes it (padding: data 0, scale 0). Returns the row's amax.
template <typename F>
__device__ __forceinline__ float quantize_row(const RowsOut& out, int64_t row, int tile,
                                              int columns, const float (&v)[16], bool padding,
                                              Scaling scaling) {
  const float row_amax = lanes_max<8>(amax(v));
  if (out.data == nullptr) return row_amax;
  TileScale s = tile_scale(row_amax, F::kMax, scaling.pow2, scaling.eps, scaling.overflow);
  if (padding) s.scale_inv = 0.0f;
  store_row<F>(out, row, tile, columns, v, s.scale);
  if (tile_lane() == 0) out.scale[row * out.scale_row + tile * out.scale_tile] = s.scale_inv;
  return row_amax;
}

struct TileShared {
  // Codes of column c: tokens 4 g ... 4 g + 3 are word g ^ swizzle(c). Free of bank conflicts both
  // ways.
  alignas(16) uint32_t codes[128][32];
  float amax[8][128];  // one row a warp: of its columns, or [warp][0] of all it holds
};

__device__ __forceinline__ int tile_swizzle(int column) { return 4 * (column >> 3 & 7); }

// Quantizes the columns of the tile v[j][i] (zero past the block's tokens) and stores them
// transposed. tile_amax: this thread's max over v. All 256 threads; begins and ends without a
// barrier of its own, so the caller puts one between two uses of `shared`.
template <typename F>
__device__ __forceinline__ void quantize_columns(const ColumnsOut& out, int tile, int block,
                                                 int columns, const float (&v)[4][16],
                                                 float tile_amax, Scaling scaling,
                                                 TileShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool per_column = out.scale_column != 0;
  if (per_column) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float m = fmaxf(fmaxf(fabsf(v[0][i]), fabsf(v[1][i])), fmaxf(fabsf(v[2][i]), fabsf(v[3][i])));
      m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, 8));
      m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, 16));
      if (lane < 8) shared.amax[warp][tile_column(i / 8) + i % 8] = m;
    }
  } else {
    const float m = lanes_max<32>(tile_amax);
    if (lane == 0) shared.amax[warp][0] = m;
  }
  __syncthreads();
  TileScale s{};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int column = tile_column(i / 8) + i % 8;
    if (per_column || i == 0) {
      float m = 0.0f;
#pragma unroll
      for (int w = 0; w < 8; ++w) m = fmaxf(m, shared.amax[w][per_column ? column : 0]);
      s = tile_scale(m, F::kMax, scaling.pow2, scaling.eps, scaling.overflow);
      const bool writes = per_column ? warp == i / 2 && lane < 8 : threadIdx.x == 0;
      if (writes && 128 * tile + column < columns)
        out.scale[tile * out.scale_tile + block * out.scale_block + column * out.scale_column] =
            s.scale_inv;
    }
    shared.codes[column][threadIdx.x / 8 ^ tile_swizzle(column)] =
        fp8_encode4<F>(v[0][i] * s.scale, v[1][i] * s.scale, v[2][i] * s.scale, v[3][i] * s.scale);
  }
  __syncthreads();
  // 8 threads a column, 16 tokens each.
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    const int column = 32 * pass + threadIdx.x / 8, chunk = tile_lane();
    const uint4 codes =
        *reinterpret_cast<const uint4*>(&shared.codes[column][4 * chunk ^ tile_swizzle(column)]);
    if (128 * tile + column < columns)
      store(out.data + (128 * int64_t{tile} + column) * out.ld + 128 * int64_t{block} + 16 * chunk,
            codes);
  }
}

// Quantizes tile `tile` of the rows of `block`, whose values come from source(row, column, v[8]).
template <typename F, bool kColumns, typename Source>
__device__ __forceinline__ void quantize_tile(const Source& source, TokenBlock rows_of_tile,
                                              int tile, int block, int columns,
                                              const RowsOut& rows_to, const ColumnsOut& columns_to,
                                              Scaling scaling, TileShared* shared) {
  float v[4][16];
  float tile_amax = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int r = tile_row() + j;
    const int64_t row = rows_of_tile.first_row + int64_t{r};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = 128 * tile + tile_column(half);
      float (&eight)[8] = *reinterpret_cast<float (*)[8]>(&v[j][8 * half]);
      if (r < rows_of_tile.tokens && column < columns) {
        source(row, column, eight);
      } else {
#pragma unroll
        for (float& x : eight) x = 0.0f;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int r = tile_row() + j;
    RowsOut to = rows_to;
    if (r >= rows_of_tile.rows) to.data = nullptr;
    tile_amax = fmaxf(tile_amax, quantize_row<F>(to, rows_of_tile.first_row + int64_t{r}, tile,
                                                 columns, v[j], r >= rows_of_tile.tokens, scaling));
  }
  if constexpr (kColumns)
    quantize_columns<F>(columns_to, tile, block, columns, v, tile_amax, scaling, *shared);
}

}  // namespace fp8moe::cuda
