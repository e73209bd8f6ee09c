// Rows and columns of a matrix computed from 16-bit operands, in one pass, at the speed of memory:
// full 128x128 tiles, power-of-two scales.
//
// One block an SM, of two teams that share a table, each with a contiguous share of the tiles. A
// tile's operands come to shared memory by cp.async, each to the thread that reads it, so no
// barrier stands between: a thread asks for two rows of the next tile as soon as it has read those
// of this one, so most of a tile is always on its way.
#pragma once

#include "cuda/device/tile.cuh"
#include "cuda/device/tile_item.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {

inline constexpr int kPlanes = 2;  // operands
inline constexpr int kTeams = 2;

// Source: kPlanes operands of 16 bits, operand i from first() + plane(i) on, their rows stride()
// elements apart; values(table, packed, v) computes 8 values from 8 of each operand. Table: in
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
  uint4 operand[4][kPlanes][StagedTile::kThreads];  // of row j; only a thread's own
  StagedTile::Shared codes;
  StagedTile::Amax amax;
  alignas(16) float weight[128];  // a warp's own 8
};

template <typename Source>
struct StagedBlock {
  StagedShared team[kTeams];
  typename Source::Table table;
};

// Where row 0 of this thread begins in an item.
template <typename Source>
__device__ __forceinline__ const uint16_t* first_row_of(const StagedTiles<Source>& p,
                                                        const TileItem& item) {
  using T = StagedTile;
  return p.source.first() + strides(item.first_row + T::row(), p.source.stride()) +
         (128 * item.tile + T::column(0));
}

// Asks for rows 2 pair and 2 pair + 1 of this thread in an item. With the first come the weights of
// the warp's rows.
template <typename Source>
__device__ __forceinline__ void stage_rows(const StagedTiles<Source>& p, const TileItem& item,
                                           int pair, const uint16_t* first_row,
                                           StagedShared& shared) {
  using T = StagedTile;
#pragma unroll
  for (int j = 2 * pair; j < 2 * pair + 2; ++j) {
    const int bytes = T::row() + j < item.tokens ? 16 : 0;  // rows past the last token are not read
    const uint16_t* row = first_row + strides(j, p.source.stride());
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      copy_async(&shared.operand[j][plane][T::thread()], row + p.source.plane(plane), bytes);
  }
  if (pair > 0 || p.weights == nullptr || T::thread() % 32 >= 8) return;
  const int of_weight = 8 * (T::thread() / 32) + T::thread() % 32;
  const bool token = of_weight < item.tokens;
  copy_async_word(&shared.weight[of_weight], p.weights + (item.first_row + (token ? of_weight : 0)),
                  token ? 4 : 0);
}

// The rows of a tile. Lanes 4 j ... 4 j + 3 of a group have the maximum of its row j.
template <typename F, typename Source>
__device__ __forceinline__ void store_rows(const StagedTiles<Source>& p, const TileItem& item,
                                           const float (&v)[4][8], const float (&weight)[4],
                                           float row_amax) {
  using T = StagedTile;
  const TileScale s = p.scaling.template of<F>(row_amax);
  const int mine = T::row() + T::lane() / 4, left = item.rows - T::row();
  if (T::lane() % 4 == 0 && mine < item.rows)
    p.rows_to.scale[strides(item.first_row + mine, p.rows_to.scale_row) +
                    strides(item.tile, p.rows_to.scale_tile)] =
        mine < item.tokens ? s.scale_inv : 0.0f;
  uint8_t* codes = p.rows_to.data + strides(item.first_row + T::row(), p.rows_to.ld) +
                   (128 * item.tile + T::column(0));
#pragma unroll
  for (int j = 0; j < 4; ++j, codes += p.rows_to.ld) {
    const float scale = __shfl_sync(kFullWarp, s.scale, 4 * j, 16);
    store_if(j < left, codes, fp8_encode8<F>(v[j], scale * weight[j]));
  }
}

template <typename F, ColumnKind kKind, typename Source>
__global__ __launch_bounds__(512 * kTeams,
                             1) void staged_tiles(const __grid_constant__ StagedTiles<Source> p) {
  using T = StagedTile;
  extern __shared__ __align__(128) unsigned char bytes[];
  auto& of_block = *reinterpret_cast<StagedBlock<Source>*>(bytes);
  const int team = of_warp(T::team());
  auto& shared = of_block.team[team];
  prefetch_plan(p.plan);
  const int total = p.plan.col_offsets[p.plan.experts] / 128 * p.tiles;
  const auto [begin, items] = share_of(total, kTeams * gridDim.x, blockIdx.x + team * gridDim.x);
  TileItem item{}, next{};
  if (items > 0) next = item_at(p.plan, p.tiles, begin);
  if (p.weights == nullptr && T::thread() < 128) shared.weight[T::thread()] = 1.0f;
  const uint16_t* staged = first_row_of(p, next);
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    if (items > 0) stage_rows(p, next, pair, staged, shared);
    copy_commit();
  }
  of_block.table.fill();
  __syncthreads();
#pragma unroll 1
  for (int n = 0; n < items; ++n) {
    item = next;
    const bool more = n + 1 < items;
    if (more) next = item_after(p.plan, p.tiles, item, 1);
    staged = first_row_of(p, next);
    typename T::Row v[4];
    float weight[4], row_most[4];
    copy_wait<1>();
    __syncwarp();
    const float4 weights = *reinterpret_cast<const float4*>(&shared.weight[T::row()]);
    weight[0] = weights.x, weight[1] = weights.y, weight[2] = weights.z, weight[3] = weights.w;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j == 2) {
        __syncwarp();  // the weights have been read
        if (more) stage_rows(p, next, 0, staged, shared);
        copy_commit();
        copy_wait<1>();
      }
      uint4 packed[kPlanes];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane)
        packed[plane] = shared.operand[j][plane][T::thread()];
      p.source.values(of_block.table, packed, v[j]);
      // The scales take the weights in, but where each column has its own: once a value is less
      // than once a scale.
      if constexpr (kKind == ColumnKind::column) {
#pragma unroll
        for (float& x : v[j]) x *= weight[j];
        weight[j] = 1.0f;
      }
      row_most[j] = weighted_amax_or_nan(v[j], weight[j]);
    }
    const float row_amax = fmaxf(lanes_max_each<16>(row_most), 0.0f);
    T::template columns_amax<kKind>(v, weight, row_amax, shared.amax);
    if (more) stage_rows(p, next, 1, staged, shared);
    copy_commit();
    store_rows<F>(p, item, v, weight, row_amax);
    T::sync();  // the maxima are there, the last tile's codes are out
    if constexpr (kKind == ColumnKind::column) {
      if (T::thread() < 128)
        T::template columns_scale<F>(p.columns_to, item.tile, item.block, p.columns, shared.amax,
                                     p.scaling, T::thread());
      T::sync();
    }
    const float scale_inv =
        T::template columns_encode<F, kKind>(v, weight, shared.amax, p.scaling, shared.codes);
    T::sync();
    if (kKind == ColumnKind::block && T::thread() == 0)
      T::block_scale_store(p.columns_to, item.tile, item.block, scale_inv);
    T::columns_store(p.columns_to, item.tile, item.block, p.columns, shared.codes);
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
