// q = Q(w) by 128x128 tiles of w [E, N, K], in E4M3, and q_t, the same codes transposed: one block
// per tile, w read once and kept packed in registers.
#include "common/dispatch.h"
#include "device/eight.cuh"
#include "device/runtime.h"
#include "device/tile.cuh"
#include "device/transposed_codes.cuh"
#include "ops/backends.h"

namespace fp8moe::cuda {
namespace {

template <typename T, typename Rule>
struct Params {
  const T* w;      // [E, N, K]
  uint8_t* q;      // [E, N, K], or nullptr
  uint8_t* q_t;    // [E, K, N], or nullptr
  float* scale;    // [E, cdiv(N, 128), cdiv(K, 128)]
  float* scale_t;  // its transpose
  int n, k, n_tiles, k_tiles;
  Rule scaling;
};

constexpr int kThreads = 256;
template <typename T>
constexpr int kBlocksPerSm = sizeof(T) == 4 ? 2 : 3;

struct Shared {
  TransposedCodes codes;
  float amax[kThreads / 32];
};

// 16 lanes share a row: a warp stores whole lines of 128 codes. A thread holds rows
// 64 half + 4 group + j at columns 8 lane, 8 of them.
template <typename T, typename Rule>
__global__ __launch_bounds__(kThreads, kBlocksPerSm<T>) void quantize_tiles(
    const __grid_constant__ Params<T, Rule> p) {
  __shared__ Shared shared;
  const int n_tile = blockIdx.x / p.k_tiles % p.n_tiles, k_tile = blockIdx.x % p.k_tiles;
  const int64_t expert = blockIdx.x / p.k_tiles / p.n_tiles;
  const int lane = threadIdx.x % 16, group = threadIdx.x / 16;
  const int row = 128 * n_tile + 4 * group, column = 128 * k_tile + 8 * lane;
  const int64_t base = expert * p.n * p.k;

  Vec8<T> x[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[half][j].clear();
      if (row + 64 * half + j < p.n && column < p.k)
        x[half][j].load(p.w + base + int64_t{row + 64 * half + j} * p.k + column);
    }
  float top = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float v[8];
      x[half][j].values(v);
      top = fmaxf(top, amax(v));
    }
  top = lanes_max<32>(top);
  if (threadIdx.x % 32 == 0) shared.amax[threadIdx.x / 32] = top;
  __syncthreads();
#pragma unroll
  for (float m : shared.amax) top = fmaxf(top, m);
  const TileScale s = p.scaling.template of<E4M3>(top);
  if (threadIdx.x == 0) {
    if (p.q != nullptr) p.scale[(expert * p.n_tiles + n_tile) * p.k_tiles + k_tile] = s.scale_inv;
    if (p.q_t != nullptr)
      p.scale_t[(expert * p.k_tiles + k_tile) * p.n_tiles + n_tile] = s.scale_inv;
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t codes[2][4];  // [four columns][row]
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float v[8];
      x[half][j].values(v);
      const uint2 eight = fp8_encode8<E4M3, Rule::kDivides>(v, s.scale);
      codes[0][j] = eight.x, codes[1][j] = eight.y;
      const int i = row + 64 * half + j;
      if (p.q != nullptr && i < p.n && column < p.k)
        store(p.q + base + int64_t{i} * p.k + column, eight);
    }
    if (p.q_t == nullptr) continue;
#pragma unroll
    for (int four = 0; four < 2; ++four)
      shared.codes.put(8 * lane + 4 * four, 16 * half + group, codes[four]);
  }
  if (p.q_t == nullptr) return;
  __syncthreads();
  shared.codes.store_to(p.q_t + base + int64_t{128} * k_tile * p.n + 128 * n_tile, p.n,
                        p.k - 128 * k_tile, p.n - 128 * n_tile);
}

}  // namespace

template <>
void run(const QuantizeWeight& p, Stream stream) {
  if (p.w.numel() == 0) return;
  const DeviceGuard guard(p.w.device);
  const int64_t n = p.w.shape[1], k = p.w.shape[2];
  const int64_t n_tiles = cdiv(n, kTile), k_tiles = cdiv(k, kTile);
  dispatch_float(p.w.dtype, [&]<typename T>() {
    dispatch_scaling(p.rule, max_finite(p.w.dtype), [&]<typename Rule>(Rule scaling) {
      const Params<T, Rule> params = {.w = p.w.as<T>(),
                                      .q = p.q.data.as<uint8_t>(),
                                      .q_t = p.q_t.data.as<uint8_t>(),
                                      .scale = p.q.scale_inv.as<float>(),
                                      .scale_t = p.q_t.scale_inv.as<float>(),
                                      .n = static_cast<int>(n),
                                      .k = static_cast<int>(k),
                                      .n_tiles = static_cast<int>(n_tiles),
                                      .k_tiles = static_cast<int>(k_tiles),
                                      .scaling = scaling};
      launch("quantize_weight", quantize_tiles<T, Rule>,
             static_cast<unsigned>(p.w.shape[0] * n_tiles * k_tiles), kThreads, 0,
             stream_of(stream), params);
    });
  });
}

}  // namespace fp8moe::cuda
