// Rows and columns of a matrix computed from 16-bit operands, in one pass, at the speed of memory:
// full 128x128 tiles, power-of-two scales.
//
// One block an SM, of two teams that share a table, each with a contiguous share of the tiles. A
// tile's operands come to shared memory by cp.async, each to the thread that reads it, so no
// barrier stands between: once a warp has them in registers as f32, it asks for the next tile's,
// and while they are on their way the columns are encoded, transposed and stored.
#pragma once

#include "cuda/device/tile.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {

inline constexpr int kPlanes = 2;  // operands
inline constexpr int kTeams = 2;

// Source: kPlanes operands of 16 bits; row(plane, row) points to column 0 of an operand's row,
// stride() apart; values(table, packed, v) computes 8 values from 8 of each operand. Table: in
// shared memory. What is quantized is v times the weight of its row: a power-of-two scale times the
// weight is one factor, and no rounding is lost by it.
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

using StagedTile = Tile<16, kTeams>;

struct StagedShared {
  uint16_t operand[kPlanes][128][128];
  StagedTile::Shared codes;
  StagedTile::Amax amax;
  float weight[128];
};

template <typename Source>
struct StagedBlock {
  StagedShared team[kTeams];
  typename Source::Table table;
};

// A thread asks for what it reads itself, a warp for the weights of its rows.
template <typename Source>
__device__ __forceinline__ void stage_tile(const StagedTiles<Source>& p, TokenBlock b, int tile,
                                           StagedShared& shared) {
  using T = StagedTile;
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) {
    // Rows past the last token are not read.
    const uint16_t* from =
        p.source.row(plane, b.first_row + int64_t{T::row()}) + 128 * tile + T::column(0);
#pragma unroll
    for (int j = 0; j < 4; ++j, from += p.source.stride())
      copy_async(&shared.operand[plane][T::row() + j][T::column(0)], from,
                 T::row() + j < b.tokens ? 16 : 0);
  }
  const int r = 8 * (T::thread() / 32) + T::thread() % 32;
  if (p.weights != nullptr && T::thread() % 32 < 8)
    copy_async_word(&shared.weight[r], p.weights + b.first_row + (r < b.tokens ? r : 0),
                    r < b.tokens ? 4 : 0);
}

// The rows of a tile. Lanes 4 j ... 4 j + 3 of a group find the scale of its row j.
template <typename F, typename Source>
__device__ __forceinline__ void store_rows(const StagedTiles<Source>& p, TokenBlock b, int tile,
                                           const float (&v)[4][8], const float (&weight)[4],
                                           const float (&row_most)[4]) {
  using T = StagedTile;
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
    if (T::row() + j < b.rows) T::template store_codes<F>(codes, v[j], scale * weight[j]);
    codes += p.rows_to.ld;
  }
}

template <typename F, ColumnKind kKind, typename Source>
__global__ __launch_bounds__(512 * kTeams,
                             1) void staged_tiles(const __grid_constant__ StagedTiles<Source> p) {
  using T = StagedTile;
  extern __shared__ __align__(128) unsigned char bytes[];
  auto& of_block = *reinterpret_cast<StagedBlock<Source>*>(bytes);
  auto& shared = of_block.team[T::team()];
  const int64_t total = int64_t{p.plan.col_offsets[p.plan.experts] / 128} * p.tiles;
  const int teams = kTeams * gridDim.x, team = kTeams * blockIdx.x + T::team();
  const int64_t begin = total * team / teams, end = total * (team + 1) / teams;
  int block = static_cast<int>(begin / p.tiles), tile = static_cast<int>(begin % p.tiles);
  TokenBlock b;
  if (begin < end) b = token_block_of_warp(p.plan, block);
  if (T::thread() < 128) shared.weight[T::thread()] = 1.0f;
  T::sync();
  if (begin < end) stage_tile(p, b, tile, shared);
  copy_commit();
  of_block.table.fill();
  __syncthreads();
#pragma unroll 1
  for (int left = static_cast<int>(end - begin); left > 0; --left) {
    copy_wait<0>();
    __syncwarp();
    typename T::Row v[4];
    uint4 packed[4][kPlanes];
    float weight[4], row_most[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = T::row() + j;
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane)
        packed[j][plane] = *reinterpret_cast<const uint4*>(&shared.operand[plane][r][T::column(0)]);
      p.source.values(of_block.table, packed[j], v[j]);
      weight[j] = 1.0f;
      if constexpr (kKind == ColumnKind::block) {  // the scales take the weights in
        weight[j] = shared.weight[r];
        row_most[j] = weighted_amax(v[j], weight[j]);
      } else {  // each column has its scale: once a value is less than once a scale
        const float w = shared.weight[r];
#pragma unroll
        for (float& x : v[j]) x *= w;
        row_most[j] = amax(v[j]);
      }
    }
    store_rows<F>(p, b, tile, v, weight, row_most);
    const float most = fmaxf(fmaxf(row_most[0], row_most[1]), fmaxf(row_most[2], row_most[3]));
    T::template columns_amax<kKind>(v, weight, most, shared.amax);
    const int done_block = block, done_tile = tile;
    __syncwarp();  // the weights have been read
    if (left > 1) {
      if (++tile == p.tiles) {
        tile = 0;
        b = token_block_of_warp(p.plan, ++block);
      }
      stage_tile(p, b, tile, shared);
    }
    copy_commit();
    T::sync();  // the maxima are there, the last tile's codes are out
    if constexpr (kKind == ColumnKind::column) {
      T::template columns_scales<F>(p.columns_to, done_tile, done_block, p.columns, shared.amax,
                                    p.scaling);
      T::sync();
    }
    const float scale_inv =
        T::template columns_encode<F, kKind>(v, weight, shared.amax, p.scaling, shared.codes);
    T::sync();
    if (kKind == ColumnKind::block && T::thread() == 0)
      T::block_scale_store(p.columns_to, done_tile, done_block, scale_inv);
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
         persistent_grid(device, cdiv(items, kTeams), 1), 512 * kTeams, sizeof(StagedBlock<Source>),
         stream, params);
}

}  // namespace fp8moe::cuda
