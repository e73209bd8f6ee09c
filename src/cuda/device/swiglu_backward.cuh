// The one-pass kernels of swiglu_quantize_backward: bf16 z and dh, I a multiple of 128.
#pragma once

#include "cuda/device/swiglu_rows.cuh"

namespace fp8moe::cuda {

struct SwigluBackward {
  const uint16_t* z;   // [R, 2I] bf16
  const uint16_t* dh;  // [R, I] bf16
  const float* probs;  // [R] or nullptr: 1
  float clamp;
  int rows, intermediate, tiles;  // tiles: I / 128
  PlanView plan;
  RowsOut dz;     // [R, 2I]
  float* dprobs;  // [R] or nullptr
  Scaling scaling;
  int rows_per_block = 0;  // of backward_rows
};

// dgate, dup and the terms of dprob of N elements.
template <bool kClamp, int N>
__device__ __forceinline__ void gradient(const float (&gate)[N], const float (&up)[N],
                                         const float (&dh)[N], float prob, float clamp,
                                         float (&dgate)[N], float (&dup)[N], float (&term)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const SwigluInput in = clamp_swiglu(gate[i], up[i], kClamp ? clamp : 0.0f);
    const SwigluGrad g = swiglu_grad(in, pinned_sigmoid(in.gate), prob, dh[i]);
    dgate[i] = g.dgate, dup[i] = g.dup, term[i] = g.dprob;
  }
}

// rows_per_block rows a block, all their tiles: 32 / rows_per_block sets of lanes take the tiles in
// turn, and their sums of dprob meet in shared memory, to be added in order.
template <typename F, bool kClamp>
__global__ __launch_bounds__(256, 2) void backward_rows(const __grid_constant__ SwigluBackward p) {
  extern __shared__ float tile_sums[];  // [tiles][rows_per_block]
  const int group = threadIdx.x / 8;
  const int r = group % p.rows_per_block;
  const int64_t row = int64_t{blockIdx.x} * p.rows_per_block + r;
  const RowKind kind = row_kind(p.plan, row, p.rows);
  const float prob = p.probs != nullptr && kind.token ? p.probs[row] : 1.0f;
  const uint16_t* gates = p.z + row * 2 * p.intermediate;
  const uint16_t* grads = p.dh + row * p.intermediate;
  RowsOut to = p.dz;
  if (!kind.written) to.data = nullptr;

  const int step = 32 / p.rows_per_block;
  const int rounds = (p.tiles + step - 1) / step;  // the same for all lanes of a warp
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const int tile = round * step + group / p.rows_per_block;
    const bool in = tile < p.tiles;
    Packed16 packed_gate, packed_up, packed_dh;
    if (kind.token && in) {
      packed_gate.load(gates + 128 * tile);
      packed_up.load(gates + p.intermediate + 128 * tile);
      packed_dh.load(grads + 128 * tile);
    } else {
      packed_gate.clear(), packed_up.clear(), packed_dh.clear();
    }
    float gate[16], up[16], dh[16], dgate[16], dup[16], term[16];
    packed_gate.unpack16(gate), packed_up.unpack16(up), packed_dh.unpack16(dh);
    gradient<kClamp>(gate, up, dh, prob, p.clamp, dgate, dup, term);
    RowsOut here = to;
    if (!in) here.data = nullptr;
    Tile<8>::quantize_row<F>(here, row, tile, 2 * p.intermediate, dgate, !kind.token, p.scaling);
    Tile<8>::quantize_row<F>(here, row, p.tiles + tile, 2 * p.intermediate, dup, !kind.token,
                             p.scaling);
    if (p.dprobs != nullptr) {
      float (&low)[8] = *reinterpret_cast<float (*)[8]>(&term[0]);
      float (&high)[8] = *reinterpret_cast<float (*)[8]>(&term[8]);
      const float sum = lanes_tree_sum<8>(tree_sum<8>(low)) + lanes_tree_sum<8>(tree_sum<8>(high));
      if (in && Tile<8>::lane() == 0) tile_sums[tile * p.rows_per_block + r] = sum;
    }
  }
  if (p.dprobs == nullptr) return;
  __syncthreads();
  if (threadIdx.x < p.rows_per_block) {
    const int64_t mine = int64_t{blockIdx.x} * p.rows_per_block + threadIdx.x;
    if (!row_kind(p.plan, mine, p.rows).written) return;
    float sum = 0.0f;
    for (int tile = 0; tile < p.tiles; ++tile)
      sum += tile_sums[tile * p.rows_per_block + threadIdx.x];
    p.dprobs[mine] = sum;
  }
}

}  // namespace fp8moe::cuda
