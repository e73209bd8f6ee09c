// A 128x128 tile of values in the registers of one block, quantized along its rows (1x128 tiles)
// and, transposed, along its columns (128x128, or 128x1 tiles) by the scale rule of common/scale.h.
//
// kLanes lanes (8 or 16) share a row; the block has 32 kLanes threads. Thread t holds rows
// 4 (t / kLanes) + j, j < 4, at the 8 columns from 64 half + 8 (t % kLanes) on, half < 16 / kLanes.
// A warp's access is then 64 to 256 consecutive bytes of each row, and a thread's 4 rows are 4
// consecutive bytes of a transposed row.
#pragma once

#include "device/convert.cuh"
#include "device/memory.cuh"
#include "device/outputs.cuh"
#include "device/plan.cuh"
#include "device/reduce.cuh"

namespace fp8moe::cuda {

template <int kLanes>
struct Tile {
  static constexpr int kThreads = 32 * kLanes;
  static constexpr int kWarps = kLanes;
  static constexpr int kHalves = 16 / kLanes;
  static constexpr int kValues = 8 * kHalves;  // of a thread in one row
  using Row = float[kValues];

  struct Shared {
    // Codes of column c: tokens 4 g ... 4 g + 3 are word g ^ (4 (c / 8 % 8) + 2 (c / 64)). Writes
    // have no bank conflicts, and 4 aligned words stay together for the reads, or swap by twos.
    alignas(16) uint32_t codes[128][32];
  };
  // Maxima by warp and place of the column, or by warp, and scales by place: here or elsewhere.
  struct Maxima {
    float* columns;  // of warp w from w * stride on
    int stride;
    float* warps;
    float* scale;
  };
  struct alignas(16) Amax {
    float of[kWarps][128];
    float scale[128];
    __device__ __forceinline__ operator Maxima() { return {of[0], 128, of[0], scale}; }
  };

  // This thread's place.
  static __device__ __forceinline__ int thread() { return threadIdx.x; }
  static __device__ __forceinline__ int lane() { return thread() % kLanes; }
  static __device__ __forceinline__ int group() { return thread() / kLanes; }
  static __device__ __forceinline__ int row() { return 4 * group(); }
  static __device__ __forceinline__ int column(int half) { return 64 * half + 8 * lane(); }
  // Of the columns from column(half) on.
  static __device__ __forceinline__ int swizzle(int half) {
    return 4 * (lane() % 8) + 2 * (half + lane() / 8);
  }

  // Words of columns: where those of a lane's four values from 4 quad on begin, side by side with
  // those of the lanes of a group, and whose word is the place-th.
  static __device__ __forceinline__ int place_of_quad(int quad) {
    return 4 * (kLanes * quad + lane());
  }
  static __device__ __forceinline__ int column_at(int place) {
    const int quad = place / (4 * kLanes);
    return 64 * (quad / 2) + 8 * (place / 4 % kLanes) + 4 * (quad % 2) + place % 4;
  }

  // Codes of a thread's values of one row of a full tile; `codes` is where its first column goes.
  template <typename F>
  static __device__ __forceinline__ void store_codes(uint8_t* codes, const Row& v, float scale) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      store(codes + 64 * half, fp8_encode8<F>(v + 8 * half, scale));
    }
  }

  // The same of any tile: columns past `columns` are not there.
  template <typename F, bool kDivides>
  static __device__ __forceinline__ void store_row(const RowsOut& out, int64_t row, int tile,
                                                   int columns, const Row& v, float scale) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int at = 128 * tile + column(half);
      const uint2 codes = fp8_encode8<F, kDivides>(v + 8 * half, scale);
      if (at < columns) store(out.data + row * out.ld + at, codes);
    }
  }

  // Quantizes one row of a tile, or zeroes it (padding: data 0, scale 0). Returns the row's amax.
  template <typename F, typename Rule>
  static __device__ __forceinline__ float quantize_row(const RowsOut& out, int64_t row, int tile,
                                                       int columns, const Row& v, bool padding,
                                                       const Rule& rule) {
    const float row_amax = lanes_max<kLanes>(amax(v));
    if (out.data == nullptr) return row_amax;
    TileScale s = rule.template of<F>(row_amax);
    if (padding) s.scale_inv = 0.0f;
    store_row<F, Rule::kDivides>(out, row, tile, columns, v, s.scale);
    if (lane() == 0) out.scale[row * out.scale_row + tile * out.scale_tile] = s.scale_inv;
    return row_amax;
  }

  // Three steps, a barrier between each two: the maxima of the tile's columns (or of all of it;
  // tile_amax is this thread's), its codes, and their way out, transposed. The values are v times
  // the weights of their rows, zero past the block's tokens.
  template <ColumnKind kKind>
  static __device__ __forceinline__ void columns_amax(const Row (&v)[4], const float (&weight)[4],
                                                      float tile_amax, const Maxima& shared) {
    const int warp = thread() / 32, warp_lane = thread() % 32;
    if constexpr (kKind == ColumnKind::block) {
      const float m = warp_max(tile_amax);
      if (warp_lane == 0) shared.warps[warp] = m;
    } else {
      Row m;
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        m[i] = fmaxf(fmaxf(fabsf(v[0][i] * weight[0]), fabsf(v[1][i] * weight[1])),
                     fmaxf(fabsf(v[2][i] * weight[2]), fabsf(v[3][i] * weight[3])));
      float* to = shared.columns + warp * shared.stride;
      *reinterpret_cast<float4*>(to + place_of_quad(warp_lane / kLanes)) =
          groups_max_each<kLanes>(m);
    }
  }

  // The maximum of the place-th column, by whole warps. kTogether neighbouring lanes find those of
  // as many columns, a share of the warps each and side by side: fewer reads, where a lack of
  // registers has each wait for the last.
  template <int kTogether = 1>
  static __device__ __forceinline__ float column_amax(const Maxima& shared, int place) {
    struct alignas(4 * kTogether) Columns {
      float of[kTogether];
    };
    const float* first = shared.columns + place % kTogether * (shared.stride - 1) + place;
    float most[kTogether] = {};
#pragma unroll
    for (int w = 0; w < kWarps; w += kTogether) {
      const auto m = *reinterpret_cast<const Columns*>(first + w * shared.stride);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) most[i] = fmaxf(most[i], m.of[i]);
    }
    return lanes_max_each<kTogether>(most);
  }
  static __device__ __forceinline__ void column_scale_store(const ColumnsOut& out, int tile,
                                                            int block, int columns, int place,
                                                            float scale_inv) {
    const int at = column_at(place);
    if (128 * tile + at < columns)
      out.scale[strides(tile, out.scale_tile) + strides(block, out.scale_block) + at] = scale_inv;
  }

  // Only for a scale per column, before columns_encode and another barrier: that of the place-th.
  template <typename F, typename Rule>
  static __device__ __forceinline__ void columns_scale(const ColumnsOut& out, int tile, int block,
                                                       int columns, const Maxima& shared,
                                                       const Rule& rule, int place) {
    const TileScale s = rule.template of<F>(column_amax(shared, place));
    shared.scale[place] = s.scale;
    column_scale_store(out, tile, block, columns, place, s.scale_inv);
  }

  // Returns what block_scale_store stores, where a tile has one scale.
  template <typename F, ColumnKind kKind, typename Rule>
  static __device__ __forceinline__ float columns_encode(const Row (&v)[4],
                                                         const float (&weight)[4],
                                                         const Maxima& shared, const Rule& rule,
                                                         Shared& codes) {
    float scale = 0.0f, scale_inv = 0.0f;
    if constexpr (kKind == ColumnKind::block) {
      const TileScale s = rule.template of<F>(warp_max(shared.warps[thread() % kWarps]));
      scale = s.scale, scale_inv = s.scale_inv;
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      // Vec8 neighbouring columns have one swizzle: one address, written as such.
      uint32_t* word = &codes.codes[column(half)][group() ^ swizzle(half)];
      float4 scales;
#pragma unroll
      for (int i = 8 * half; i < 8 * half + 8; ++i, word += 32) {
        if constexpr (kKind == ColumnKind::column) {
          if (i % 4 == 0)
            scales = *reinterpret_cast<const float4*>(shared.scale + place_of_quad(i / 4));
          scale = (&scales.x)[i % 4];
        }
        const auto scaled_row = [&](int j) {
          return Rule::kDivides ? scaled<true>(v[j][i] * weight[j], scale)
                                : v[j][i] * (scale * weight[j]);
        };
        *word = fp8_encode4<F>(scaled_row(0), scaled_row(1), scaled_row(2), scaled_row(3));
      }
    }
    return scale_inv;
  }

  // By one thread, when others need not wait for it.
  static __device__ __forceinline__ void block_scale_store(const ColumnsOut& out, int tile,
                                                           int block, float scale_inv) {
    out.scale[strides(tile, out.scale_tile) + strides(block, out.scale_block)] = scale_inv;
  }

  // 8 threads per column, 16 tokens each; all of a thread's are read before the first is stored.
  using Words = uint4[1024 / kThreads];
  static __device__ __forceinline__ void columns_read(const Shared& codes, Words& words) {
#pragma unroll
    for (int i = 0; i < 1024 / kThreads; ++i) {
      const int at = kThreads / 8 * i + thread() / 8, chunk = thread() % 8;
      const int swizzled = 4 * (at >> 3 & 7);  // and 2 from column 64 on, where words are swapped
      const uint4 w = *reinterpret_cast<const uint4*>(&codes.codes[at][4 * chunk ^ swizzled]);
      words[i] = kThreads / 8 * i >= 64 ? uint4{w.z, w.w, w.x, w.y} : w;
    }
  }
  static __device__ __forceinline__ void columns_write(const ColumnsOut& out, int tile, int block,
                                                       int columns, const Words& words) {
    int at = 128 * tile + thread() / 8;
    uint8_t* to = out.data + strides(at, out.ld) + (128 * block + 16 * (thread() % 8));
#pragma unroll
    for (int i = 0; i < 1024 / kThreads; ++i, at += kThreads / 8, to += kThreads / 8 * out.ld)
      store_if(at < columns, to, words[i]);
  }
  static __device__ __forceinline__ void columns_store(const ColumnsOut& out, int tile, int block,
                                                       int columns, const Shared& codes) {
    Words words;
    columns_read(codes, words);
    columns_write(out, tile, block, columns, words);
  }
};

// Quantizes tile `tile` of the rows of a token block, whose values come from source(row, column,
// v[8]).
template <typename F, ColumnKind kKind, typename Source, typename Rule>
__device__ __forceinline__ void quantize_tile(const Source& source, TokenBlock rows_of_tile,
                                              int tile, int block, int columns,
                                              const RowsOut& rows_to, const ColumnsOut& columns_to,
                                              const Rule& scaling) {
  using T = Tile<8>;
  typename T::Row v[4];
  float tile_amax = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int r = T::row() + j;
#pragma unroll
    for (int half = 0; half < T::kHalves; ++half) {
      const int column = 128 * tile + T::column(half);
      float (&eight)[8] = *reinterpret_cast<float (*)[8]>(&v[j][8 * half]);
      if (r < rows_of_tile.tokens && column < columns) {
        source(rows_of_tile.first_row + int64_t{r}, column, eight);
      } else {
#pragma unroll
        for (float& x : eight) x = 0.0f;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int r = T::row() + j;
    RowsOut to = rows_to;
    if (r >= rows_of_tile.rows) to.data = nullptr;
    tile_amax = fmaxf(
        tile_amax, T::template quantize_row<F>(to, rows_of_tile.first_row + int64_t{r}, tile,
                                               columns, v[j], r >= rows_of_tile.tokens, scaling));
  }
  if constexpr (kKind != ColumnKind::none) {
    __shared__ typename T::Shared codes;
    __shared__ typename T::Amax maxima;
    const float unit[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    T::template columns_amax<kKind>(v, unit, tile_amax, maxima);
    __syncthreads();
    if constexpr (kKind == ColumnKind::column) {
      if (threadIdx.x < 128)
        T::template columns_scale<F>(columns_to, tile, block, columns, maxima, scaling,
                                     threadIdx.x);
      __syncthreads();
    }
    const float scale_inv = T::template columns_encode<F, kKind>(v, unit, maxima, scaling, codes);
    __syncthreads();
    if (kKind == ColumnKind::block && threadIdx.x == 0)
      T::block_scale_store(columns_to, tile, block, scale_inv);
    T::columns_store(columns_to, tile, block, columns, codes);
  }
}

}  // namespace fp8moe::cuda
