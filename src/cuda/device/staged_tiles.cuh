// Rows and columns of a matrix computed from 16-bit operands, in one pass, at the speed of memory:
// full 128x128 tiles, power-of-two scales.
//
// Two blocks an SM, each with a contiguous share of the tiles. A tile's operands come to shared
// memory by cp.async; once they are in registers as f32, the next tile's are asked for, and while
// they are on their way the columns are encoded, transposed and stored.
#pragma once

#include "cuda/device/tile.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {

// Source: kPlanes operands of 16 bits; row(plane, row) points to column 0 of an operand's row;
// values(packed, v) computes 8 values from 8 of each operand. What is quantized is v times the
// weight of its row: a power-of-two scale times the weight is one factor, and no rounding is lost
// by it.
template <typename Source>
struct StagedTiles {
  Source source;
  const float* weights;  // [R] or nullptr: 1
  PlanView plan;
  int columns, tiles;
  RowsOut rows_to;
  ColumnsOut columns_to;
  Pow2Scaling scaling;
};

template <int kPlanes>
struct StagedShared {
  uint16_t operand[kPlanes][128][128];
  Tile<16>::Shared codes;
  Tile<16>::Amax amax;
  float weight[128];
};

template <typename Source>
__device__ __forceinline__ void stage_tile(const StagedTiles<Source>& p, TokenBlock b, int tile,
                                           StagedShared<Source::kPlanes>& shared) {
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    const int r = 32 * pass + threadIdx.x / 16, column = 8 * (threadIdx.x % 16);
    const bool token = r < b.tokens;  // the rest is zero
    const int64_t row = b.first_row + (token ? r : 0);
#pragma unroll
    for (int plane = 0; plane < Source::kPlanes; ++plane)
      copy_async(&shared.operand[plane][r][column], p.source.row(plane, row) + 128 * tile + column,
                 token ? 16 : 0);
  }
  if (p.weights != nullptr && threadIdx.x < 128) {
    if (threadIdx.x < b.tokens)
      copy_async_word(&shared.weight[threadIdx.x], p.weights + b.first_row + threadIdx.x, 4);
    else
      shared.weight[threadIdx.x] = 1.0f;
  }
}

// The rows of a tile. Lanes 4 j ... 4 j + 3 of a group find the scale of its row j.
template <typename F, typename Source>
__device__ __forceinline__ void store_rows(const StagedTiles<Source>& p, TokenBlock b, int tile,
                                           const float (&v)[4][8], const float (&weight)[4],
                                           const float (&row_most)[4]) {
  using T = Tile<16>;
  const TileScale s = p.scaling.template of<F>(lanes_max_each<16>(row_most));
  const int mine = T::row() + T::lane() / 4;
  if (T::lane() % 4 == 0 && mine < b.rows)
    p.rows_to
        .scale[(b.first_row + int64_t{mine}) * p.rows_to.scale_row + tile * p.rows_to.scale_tile] =
        mine < b.tokens ? s.scale_inv : 0.0f;
  uint8_t* codes =
      p.rows_to.data + (b.first_row + int64_t{T::row()}) * p.rows_to.ld + 128 * tile + T::column(0);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float scale = __shfl_sync(kFullWarp, s.scale, 4 * j, 16);
    if (T::row() + j < b.rows) T::store_codes<F>(codes, v[j], scale * weight[j]);
    codes += p.rows_to.ld;
  }
}

template <typename F, ColumnKind kKind, typename Source>
__global__ __launch_bounds__(512,
                             2) void staged_tiles(const __grid_constant__ StagedTiles<Source> p) {
  using T = Tile<16>;
  extern __shared__ __align__(128) unsigned char bytes[];
  auto& shared = *reinterpret_cast<StagedShared<Source::kPlanes>*>(bytes);
  const int64_t total = int64_t{p.plan.col_offsets[p.plan.experts] / 128} * p.tiles;
  const int64_t begin = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x;
  if (begin >= end) return;
  int block = static_cast<int>(begin / p.tiles), tile = static_cast<int>(begin % p.tiles);
  TokenBlock b = token_block_of_warp(p.plan, block);
  if (threadIdx.x < 128) shared.weight[threadIdx.x] = 1.0f;
  __syncthreads();
  stage_tile(p, b, tile, shared);
  copy_commit();
#pragma unroll 1
  for (int64_t item = begin; item < end; ++item) {
    copy_wait<0>();
    __syncthreads();
    typename T::Row v[4];
    float weight[4], row_most[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = T::row() + j;
      uint4 packed[Source::kPlanes];
#pragma unroll
      for (int plane = 0; plane < Source::kPlanes; ++plane)
        packed[plane] = *reinterpret_cast<const uint4*>(&shared.operand[plane][r][T::column(0)]);
      p.source.values(packed, v[j]);
      weight[j] = shared.weight[r];
      row_most[j] = weighted_amax(v[j], weight[j]);
    }
    store_rows<F>(p, b, tile, v, weight, row_most);
    const float most = fmaxf(fmaxf(row_most[0], row_most[1]), fmaxf(row_most[2], row_most[3]));
    T::columns_amax<kKind>(v, weight, most, shared.amax);
    __syncthreads();  // the maxima are there, the operands in registers
    const int done_block = block, done_tile = tile;
    if (item + 1 < end) {
      if (++tile == p.tiles) {
        tile = 0;
        b = token_block_of_warp(p.plan, ++block);
      }
      stage_tile(p, b, tile, shared);
    }
    copy_commit();
    T::columns_encode<F, kKind>(p.columns_to, done_tile, done_block, p.columns, v, weight,
                                shared.amax, p.scaling, shared.codes);
    __syncthreads();
    T::columns_store(p.columns_to, done_tile, done_block, p.columns, shared.codes);
  }
}

template <typename F, typename Source>
void launch_staged_tiles(const char* op, Device device, const Source& source, const float* weights,
                         const RoutingPlan& plan, const Fp8Tensor& rows_to,
                         const Fp8Tensor& columns_to, float eps, cudaStream_t stream) {
  const int64_t columns = rows_to.data.shape[1], tiles = columns / kTile;
  const int64_t items = plan.columns() / kTile * tiles;
  if (items == 0) return;
  const StagedTiles<Source> params = {.source = source,
                                      .weights = weights,
                                      .plan = view_of(plan),
                                      .columns = static_cast<int>(columns),
                                      .tiles = static_cast<int>(tiles),
                                      .rows_to = rows_out(rows_to),
                                      .columns_to = columns_out(columns_to),
                                      .scaling = {eps}};
  launch(op,
         kind_of(columns_to) == ColumnKind::block ? staged_tiles<F, ColumnKind::block, Source>
                                                  : staged_tiles<F, ColumnKind::column, Source>,
         persistent_grid(device, items, 2), 512, sizeof(StagedShared<Source::kPlanes>), stream,
         params);
}

}  // namespace fp8moe::cuda
