// swiglu_quantize_backward with columns, in one pass: bf16 z and dh, I a multiple of 128,
// power-of-two scales.
//
// A cluster takes a block of 128 tokens, its blocks a range of the tiles each. A tile's operands
// come to shared memory by cp.async while the tile before is computed; dgate, dup and h are then
// held as f32 (96 registers a thread) until the maxima of the tile are known, so every output is a
// single quantization. The sums of dprob meet over distributed shared memory, to be added in order:
// they are all that grows with I, and take the place of the sigmoid's table where I is large.
#pragma once

#include <cooperative_groups.h>

#include "cuda/device/sigmoid_table.cuh"
#include "cuda/device/swiglu_backward.cuh"

namespace fp8moe::cuda {

union BackwardStage {
  using T = Tile<16>;
  struct {
    uint16_t gate[128][128], up[128][128], dh[128][128];
  };
  struct {  // of dgate, dup, h, once the operands are in registers
    // A warp's maxima take the place of the gates that only it has read, so no barrier is needed
    // before they are written.
    float maxima[T::kWarps][4][128];
    T::Shared codes[3];
    float scale[3][128];
  };
};
static_assert(sizeof(BackwardStage) == 3 * 128 * 128 * sizeof(uint16_t));

// Sigmoids: SigmoidTable<14>, or PinnedSigmoids.
template <typename Sigmoids>
struct BackwardTilesShared {
  BackwardStage stage[2];
  Sigmoids sigmoids;
  float most[3][BackwardStage::T::kWarps];
  float prob[128];
  float tile_sums[1][128];  // [tiles of this block][128]
};

struct SwigluBackwardColumns {
  ColumnsOut dz;  // [2I, Kcap] of dz's format, or none
  ColumnsOut h;   // [I, Kcap] e4m3, or none; of the same kind
  int tiles_per_block;
};

// Bytes of shared memory for so many tiles a block.
template <typename Sigmoids>
constexpr size_t backward_tiles_bytes(int64_t tiles_per_block) {
  return sizeof(BackwardTilesShared<Sigmoids>) +
         static_cast<size_t>(tiles_per_block - 1) * 128 * sizeof(float);
}

__device__ __forceinline__ void load_stage(const SwigluBackward& p, TokenBlock b, int tile,
                                           BackwardStage& stage) {
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    const int r = 32 * pass + threadIdx.x / 16, column = 8 * (threadIdx.x % 16);
    const int bytes = r < b.tokens ? 16 : 0;
    const int64_t row = b.first_row + (r < b.tokens ? r : 0);
    const uint16_t* gate = p.z + row * 2 * p.intermediate + 128 * tile + column;
    copy_async(&stage.gate[r][column], gate, bytes);
    copy_async(&stage.up[r][column], gate + p.intermediate, bytes);
    copy_async(&stage.dh[r][column], p.dh + row * p.intermediate + 128 * tile + column, bytes);
  }
}

// Dgate, dup, h of this thread's rows of a tile, without prob, which their scales take in (where
// each column has its scale, kMultiplied, with it, and prob is 1). The rows of dz go out, the sums
// of dprob to tile_sum. Lane l of a group finds the scale of row l / 2 % 4, of dgate where l < 8,
// else of dup.
template <typename F, bool kClamp, bool kMultiplied, typename Sigmoids>
__device__ __forceinline__ void tile_gradient(const SwigluBackward& p, TokenBlock b, int tile,
                                              const BackwardStage& stage, const Sigmoids& sigmoids,
                                              const float (&probs)[128], float (&v)[3][4][8],
                                              float (&prob)[4], float (&most)[3], float* tile_sum) {
  using T = Tile<16>;
  float row_most[8], sum[4];
  most[2] = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int r = T::row() + j, column = T::column(0);
    prob[j] = probs[r];
    float gate[8], up[8], dh[8], of_gate[8], term[8];
    const uint4 g = *reinterpret_cast<const uint4*>(&stage.gate[r][column]);
    const uint4 u = *reinterpret_cast<const uint4*>(&stage.up[r][column]);
    const uint4 d = *reinterpret_cast<const uint4*>(&stage.dh[r][column]);
    unpack<Bf16>(&g.x, gate), unpack<Bf16>(&u.x, up), unpack<Bf16>(&d.x, dh);
    sigmoids.eight(g, of_gate);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const SwigluInput in = clamp_swiglu(gate[i], up[i], kClamp ? p.clamp : 0.0f);
      const float sigmoid = kClamp && !in.gate_open ? p.sigmoid_of_clamp : of_gate[i];
      const SwigluGrad grad = swiglu_grad(in, sigmoid, 1.0f, dh[i]);
      v[0][j][i] = grad.dgate, v[1][j][i] = grad.dup, term[i] = grad.dprob;
      v[2][j][i] = swiglu(in, sigmoid, 1.0f);
    }
    if constexpr (kMultiplied) {
#pragma unroll
      for (int o = 0; o < 3; ++o)
#pragma unroll
        for (float& x : v[o][j]) x *= prob[j];
      prob[j] = 1.0f;
    }
    row_most[j] = weighted_amax(v[0][j], prob[j]);
    row_most[4 + j] = weighted_amax(v[1][j], prob[j]);
    most[2] = fmaxf(most[2], weighted_amax(v[2][j], prob[j]));
    sum[j] = tree_sum<8>(term);
    __syncwarp();  // no read of the next row before: fewer registers
  }
#pragma unroll
  for (int o = 0; o < 2; ++o)
    most[o] = fmaxf(fmaxf(row_most[4 * o], row_most[4 * o + 1]),
                    fmaxf(row_most[4 * o + 2], row_most[4 * o + 3]));
  const float row_sum = lanes_tree_sum_each<16>(sum);
  if (T::lane() < 4) tile_sum[T::row() + 2 * (T::lane() % 2) + T::lane() / 2] = row_sum;

  const TileScale s = p.scaling.of<F>(lanes_max_each<16>(row_most));
  const int mine = T::row() + T::lane() / 2 % 4;
  const int scale_tile = T::lane() < 8 ? tile : p.tiles + tile;
  if (T::lane() % 2 == 0 && mine < b.rows)
    p.dz.scale[(b.first_row + int64_t{mine}) * p.dz.scale_row + scale_tile * p.dz.scale_tile] =
        mine < b.tokens ? s.scale_inv : 0.0f;
  uint8_t* codes =
      p.dz.data + (b.first_row + int64_t{T::row()}) * p.dz.ld + 128 * tile + T::column(0);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float gate_scale = __shfl_sync(kFullWarp, s.scale, 2 * j, 16);
    const float up_scale = __shfl_sync(kFullWarp, s.scale, 8 + 2 * j, 16);
    if (T::row() + j < b.rows) {
      T::store_codes<F>(codes, v[0][j], gate_scale * prob[j]);
      T::store_codes<F>(codes + p.intermediate, v[1][j], up_scale * prob[j]);
    }
    codes += p.dz.ld;
  }
}

template <typename F, ColumnKind kKind, bool kClamp, typename Sigmoids>
__global__ __launch_bounds__(512, 1) void backward_tiles(
    const __grid_constant__ SwigluBackward p, const __grid_constant__ SwigluBackwardColumns to) {
  namespace cg = cooperative_groups;
  using T = Tile<16>;
  extern __shared__ __align__(128) unsigned char bytes[];
  auto& shared = *reinterpret_cast<BackwardTilesShared<Sigmoids>*>(bytes);
  const cg::cluster_group cluster = cg::this_cluster();
  const int block = blockIdx.x / cluster.num_blocks();
  const TokenBlock b = token_block_of_warp(p.plan, block);
  if (b.expert < 0) return;  // of the whole cluster
  const int first = cluster.block_rank() * to.tiles_per_block,
            last = min(p.tiles, first + to.tiles_per_block);

  if (threadIdx.x < 128)
    shared.prob[threadIdx.x] = p.probs != nullptr && threadIdx.x < b.tokens
                                   ? p.probs[b.first_row + int64_t{threadIdx.x}]
                                   : 1.0f;
  if (first < last) load_stage(p, b, first, shared.stage[0]);
  copy_commit();
  shared.sigmoids.fill();
#pragma unroll 1
  for (int tile = first; tile < last; ++tile) {
    auto& stage = shared.stage[(tile - first) % 2];
    copy_wait<0>();
    __syncthreads();  // the tile is there, the last one's codes are out
    if (tile + 1 < last) load_stage(p, b, tile + 1, shared.stage[(tile + 1 - first) % 2]);
    copy_commit();
    float v[3][4][8], prob[4], most[3];
    tile_gradient<F, kClamp, kKind == ColumnKind::column>(p, b, tile, stage, shared.sigmoids,
                                                          shared.prob, v, prob, most,
                                                          shared.tile_sums[tile - first]);
    const ColumnsOut outs[3] = {to.dz, to.dz, to.h};
    const int tiles[3] = {tile, p.tiles + tile, tile};
    const int columns[3] = {2 * p.intermediate, 2 * p.intermediate, p.intermediate};
    const auto maxima = [&](int o) {
      return T::Maxima{stage.maxima[0][o], 512, shared.most[o], stage.scale[o]};
    };
#pragma unroll
    for (int o = 0; o < 3; ++o)
      if (outs[o].data != nullptr) T::columns_amax<kKind>(v[o], prob, most[o], maxima(o));
    __syncthreads();  // the maxima are there, the operands in registers
    if constexpr (kKind == ColumnKind::column) {
#pragma unroll
      for (int o = 0; o < 2; ++o)
        if (outs[o].data != nullptr)
          T::columns_scales<F>(outs[o], tiles[o], block, columns[o], maxima(o), p.scaling, o);
      if (to.h.data != nullptr)
        T::columns_scales<E4M3>(to.h, tile, block, p.intermediate, maxima(2), p.scaling, 2);
      __syncthreads();
    }
#pragma unroll
    for (int o = 0; o < 2; ++o)
      if (outs[o].data != nullptr)
        T::columns_encode<F, kKind>(outs[o], tiles[o], block, v[o], prob, maxima(o), p.scaling,
                                    stage.codes[o]);
    if (to.h.data != nullptr)
      T::columns_encode<E4M3, kKind>(to.h, tile, block, v[2], prob, maxima(2), p.scaling,
                                     stage.codes[2]);
    __syncthreads();
#pragma unroll
    for (int o = 0; o < 3; ++o)
      if (outs[o].data != nullptr)
        T::columns_store(outs[o], tiles[o], block, columns[o], stage.codes[o]);
  }
  if (p.dprobs == nullptr) return;
  cluster.sync();
  const int share = 128 / cluster.num_blocks(), r = cluster.block_rank() * share + threadIdx.x;
  if (threadIdx.x < share && r < b.rows) {
    float sum = 0.0f;
    for (int tile = 0; tile < p.tiles; ++tile) {
      const float* sums =
          cluster.map_shared_rank(&shared.tile_sums[0][0], tile / to.tiles_per_block);
      sum += sums[tile % to.tiles_per_block * 128 + r];
    }
    p.dprobs[b.first_row + int64_t{r}] = sum;
  }
  cluster.sync();  // no block leaves while its sums are read
}

}  // namespace fp8moe::cuda
