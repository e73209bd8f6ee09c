// turn_weight: FP8 codes transposed by 128x128 tiles.
#include "common/backends.h"
#include "device/memory.cuh"
#include "device/runtime.h"
#include "device/transposed_codes.cuh"

namespace fp8moe::cuda {

// ---- turn_weight --------------------------------------------------------------------------------
// q_t [E, K, N] = q [E, N, K], codes and scales: one block per tile, which is turned in shared
// memory.

namespace {

struct TurnParams {
  const uint8_t* q;    // [E, N, K]
  uint8_t* q_t;        // [E, K, N]
  const float* scale;  // [E, cdiv(N, 128), cdiv(K, 128)]
  float* scale_t;      // its transpose
  int n, k, n_tiles, k_tiles;
};

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 8;

// 16 lanes share a row, 8 codes each. A thread takes rows 64 half + 4 group + j.
__global__ __launch_bounds__(kThreads,
                             kBlocksPerSm) void turn_tiles(const __grid_constant__ TurnParams p) {
  __shared__ TransposedCodes codes;
  const int n_tile = blockIdx.x / p.k_tiles % p.n_tiles, k_tile = blockIdx.x % p.k_tiles;
  const int64_t expert = blockIdx.x / p.k_tiles / p.n_tiles;
  const int lane = threadIdx.x % 16, group = threadIdx.x / 16;
  const int row = 128 * n_tile + 4 * group, column = 128 * k_tile + 8 * lane;
  const int64_t base = expert * p.n * p.k;

  uint2 rows[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = row + 64 * half + j;
      rows[half][j] = {};
      if (i < p.n && column < p.k)
        rows[half][j] = load<uint2>(p.q + base + int64_t{i} * p.k + column);
    }
  if (threadIdx.x == 0)
    p.scale_t[(expert * p.k_tiles + k_tile) * p.n_tiles + n_tile] =
        p.scale[(expert * p.n_tiles + n_tile) * p.k_tiles + k_tile];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t four[2][4];  // [four columns][row]
#pragma unroll
    for (int j = 0; j < 4; ++j) four[0][j] = rows[half][j].x, four[1][j] = rows[half][j].y;
    codes.put(8 * lane, 16 * half + group, four[0]);
    codes.put(8 * lane + 4, 16 * half + group, four[1]);
  }
  __syncthreads();
  codes.store_to(p.q_t + base + int64_t{128} * k_tile * p.n + 128 * n_tile, p.n, p.k - 128 * k_tile,
                 p.n - 128 * n_tile);
}

}  // namespace

template <>
void run(const TurnWeight& p, Stream stream) {
  if (p.q.data.numel() == 0) return;
  const DeviceGuard guard(p.q.data.device);
  const int64_t n = p.q.data.shape[1], k = p.q.data.shape[2];
  const int64_t n_tiles = cdiv(n, kTile), k_tiles = cdiv(k, kTile);
  const TurnParams params = {.q = p.q.data.as<const uint8_t>(),
                             .q_t = p.q_t.data.as<uint8_t>(),
                             .scale = p.q.scale_inv.as<const float>(),
                             .scale_t = p.q_t.scale_inv.as<float>(),
                             .n = static_cast<int>(n),
                             .k = static_cast<int>(k),
                             .n_tiles = static_cast<int>(n_tiles),
                             .k_tiles = static_cast<int>(k_tiles)};
  launch("turn_weight", turn_tiles, static_cast<unsigned>(p.q.data.shape[0] * n_tiles * k_tiles),
         kThreads, 0, stream_of(stream), params);
}

}  // namespace fp8moe::cuda
