// The one-pass kernels of act_quantize_backward: bf16 z and dh, I a multiple of 128,
// power-of-two scales.
#pragma once

#include "ops/activation/swiglu_rows.cuh"

namespace fp8moe::cuda {

struct SwigluBackward {
  const uint16_t* z;   // [R, 2I] bf16
  const uint16_t* dh;  // [R, I] bf16
  const float* probs;  // [R] or nullptr: 1
  float limit, sigmoid_of_limit;
  int rows, intermediate, tiles;  // tiles: I / 128
  PlanView plan;
  RowsOut dz;     // [R, 2I]
  float* dprobs;  // [R] or nullptr
  Pow2Scaling scaling;
  int rows_per_block = 0;           // of backward_rows
  unsigned* carry_ready = nullptr;  // of backward_tiles, with dprobs: a zero word per range
};

// dgate and dup without prob, which the scale of the codes takes in, and the terms of dprob.
template <bool kClamp, int N>
__device__ __forceinline__ void gradient(const float (&gate)[N], const float (&up)[N],
                                         const float (&dh)[N], float limit, float (&dgate)[N],
                                         float (&dup)[N], float (&term)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const SwigluInput in = clamp_swiglu(gate[i], up[i], kClamp ? limit : 0.0f);
    const SwigluGrad g = swiglu_grad(in, pinned_sigmoid(in.gate), 1.0f, dh[i]);
    dgate[i] = g.dgate, dup[i] = g.dup, term[i] = g.dprob;
  }
}

constexpr int kStages = 3;

// A lane's 6 vectors of a tile of its row (gate, up, dh), in a place of shared memory that is only
// its own: no barrier between the copy and the reads.
struct BackwardRowsShared {
  uint4 vector[kStages][6][256];
};

__device__ __forceinline__ void stage_row(const uint16_t* gate, const uint16_t* up,
                                          const uint16_t* dh, int bytes, uint4 (&vector)[6][256]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    copy_async(&vector[half][threadIdx.x], gate + 64 * half, bytes);
    copy_async(&vector[2 + half][threadIdx.x], up + 64 * half, bytes);
    copy_async(&vector[4 + half][threadIdx.x], dh + 64 * half, bytes);
  }
}

// A tile's row of dgate or dup, by the 8 lanes that share it.
template <typename F>
__device__ __forceinline__ void store_gradient(uint8_t* codes, float* scale, const float (&v)[16],
                                               float prob, bool written, bool token,
                                               Pow2Scaling scaling) {
  const TileScale s = scaling.of<F>(lanes_max<8>(weighted_amax(v, prob)));
  if (!written) return;
  Tile<8>::store_codes<F>(codes, v, s.scale * prob);
  if (Tile<8>::lane() == 0) *scale = token ? s.scale_inv : 0.0f;
}

// rows_per_block rows a block, all their tiles: 32 / rows_per_block sets of lanes take the tiles in
// turn, and their sums of dprob meet in shared memory, to be added in order.
template <typename F, bool kClamp>
__global__ __launch_bounds__(256, kClamp ? 2 : 3) void backward_rows(
    const __grid_constant__ SwigluBackward p) {
  extern __shared__ __align__(128) unsigned char bytes[];
  auto& shared = *reinterpret_cast<BackwardRowsShared*>(bytes);
  auto* tile_sums = reinterpret_cast<float*>(bytes + sizeof(BackwardRowsShared));  // [tiles][rows]
  const int group = threadIdx.x / 8, r = group % p.rows_per_block;
  const int64_t row = int64_t{blockIdx.x} * p.rows_per_block + r;
  const RowKind kind = row_kind(p.plan, row, p.rows);
  const float prob = p.probs != nullptr && kind.token ? p.probs[row] : 1.0f;
  const int step = 32 / p.rows_per_block, mine = group / p.rows_per_block;
  const int rounds = (p.tiles + step - 1) / step;  // the same for all lanes of a warp
  const int64_t readable = kind.token ? row : 0;
  const int64_t column = 128 * int64_t{mine} + Tile<8>::column(0);
  const uint16_t* gates = p.z + 2 * readable * p.intermediate + column;
  const uint16_t* grads = p.dh + readable * p.intermediate + column;
  const int bytes_read = kind.token ? 16 : 0;
  int staged = mine;  // the next tile to ask for
  const auto stage = [&](int at) {
    if (staged < p.tiles)
      stage_row(gates, gates + p.intermediate, grads, bytes_read, shared.vector[at]);
    copy_commit();
    staged += step, gates += 128 * step, grads += 128 * step;
  };
#pragma unroll
  for (int ahead = 0; ahead < kStages - 1; ++ahead) stage(ahead);
  uint8_t* codes = p.dz.data + row * p.dz.ld + column;
  float* scale = p.dz.scale + row * p.dz.scale_row + mine * p.dz.scale_tile;
  float* const sums = tile_sums + mine * p.rows_per_block + r;
  int at = 0;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const int tile = round * step + mine;
    const auto& vector = shared.vector[at];
    stage(at == 0 ? kStages - 1 : at - 1);
    at = at == kStages - 1 ? 0 : at + 1;
    copy_wait<kStages - 1>();
    float gate[16], up[16], dh[16], dgate[16], dup[16], term[16];
    unpack16(vector[0][threadIdx.x], vector[1][threadIdx.x], gate);
    unpack16(vector[2][threadIdx.x], vector[3][threadIdx.x], up);
    unpack16(vector[4][threadIdx.x], vector[5][threadIdx.x], dh);
    gradient<kClamp>(gate, up, dh, p.limit, dgate, dup, term);
    const bool written = kind.written && tile < p.tiles;
    store_gradient<F>(codes, scale, dgate, prob, written, kind.token, p.scaling);
    store_gradient<F>(codes + p.intermediate, scale + p.tiles * p.dz.scale_tile, dup, prob, written,
                      kind.token, p.scaling);
    codes += 128 * step, scale += step * p.dz.scale_tile;
    if (p.dprobs != nullptr) {
      float (&low)[8] = *reinterpret_cast<float (*)[8]>(&term[0]);
      float (&high)[8] = *reinterpret_cast<float (*)[8]>(&term[8]);
      const float sum = lanes_tree_sum<8>(tree_sum<8>(low)) + lanes_tree_sum<8>(tree_sum<8>(high));
      if (tile < p.tiles && Tile<8>::lane() == 0) sums[32 * round] = sum;
    }
  }
  if (p.dprobs == nullptr) return;
  __syncthreads();
  if (threadIdx.x < p.rows_per_block) {
    const int64_t last = int64_t{blockIdx.x} * p.rows_per_block + threadIdx.x;
    if (!row_kind(p.plan, last, p.rows).written) return;
    float sum = 0.0f;
    for (int tile = 0; tile < p.tiles; ++tile)
      sum += tile_sums[tile * p.rows_per_block + threadIdx.x];
    p.dprobs[last] = sum;
  }
}

}  // namespace fp8moe::cuda
