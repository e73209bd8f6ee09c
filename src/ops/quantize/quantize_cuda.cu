// q = Q(x), x [M, K], by 1x128 tiles: 16 lanes a tile, 8 values a lane, 4 rows a warp in flight.
#include "common/dispatch.h"
#include "device/eight.cuh"
#include "device/runtime.h"
#include "device/tile.cuh"
#include "ops/backends.h"

namespace fp8moe::cuda {
namespace {

// A block's 8 warps take 8 rows of 8 tiles: scales of 8 rows (gemm layout) or of 8 tiles (row
// layout) fill whole 32-byte sectors.
constexpr int kWarps = 8;
constexpr int kRows = 4;  // of a warp, at 2 tiles
constexpr int kBlockRows = 8;
constexpr int kBlockTiles = 8;

template <typename T, typename Rule>
struct Params {
  const T* x;  // [M, K]
  RowsOut q;   // [M, K] e4m3 or e5m2
  int64_t m;
  int k, tiles, blocks_of_row;
  uint64_t read_policy;
  Rule scaling;
};

template <typename F, typename T, typename Rule>
__global__ void __launch_bounds__(32 * kWarps)
    quantize_rows(const __grid_constant__ Params<T, Rule> p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 16;
  const int tile =
      blockIdx.x % p.blocks_of_row * kBlockTiles + warp / 2 * 2 + threadIdx.x % 32 / 16;
  const int64_t row = int64_t{kBlockRows} * (blockIdx.x / p.blocks_of_row) + warp % 2 * kRows;
  const int column = 128 * tile + 8 * lane;
  const bool inside = column < p.k;

  Vec8<T> x[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    x[j].clear();
    if (inside && row + j < p.m) x[j].load(p.x + (row + j) * p.k + column, p.read_policy);
  }
  float scale_inv[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    float v[8];
    x[j].values(v);
    const TileScale s = p.scaling.template of<F>(lanes_max<16>(amax(v)));
    scale_inv[j] = s.scale_inv;
    const uint2 codes = fp8_encode8<F, Rule::kDivides>(v, s.scale);
    if (inside && row + j < p.m) store(p.q.data + (row + j) * p.k + column, codes);
  }
  if (lane != 0 || tile >= p.tiles || row >= p.m) return;
  float* to = p.q.scale + row * p.q.scale_row + tile * p.q.scale_tile;
  if (p.q.scale_tile != 1) {  // gemm layout: 4 neighbours, the row's end padded to 4
    store(to, float4{scale_inv[0], scale_inv[1], scale_inv[2], scale_inv[3]});
    return;
  }
#pragma unroll
  for (int j = 0; j < kRows; ++j)
    if (row + j < p.m) to[j * p.q.scale_row] = scale_inv[j];
}

}  // namespace

template <>
void run(const Quantize& p, Stream stream) {
  const int64_t m = p.x.shape[0], k = p.x.shape[1];
  if (m == 0 || k == 0) return;
  const DeviceGuard guard(p.x.device);
  const int64_t tiles = cdiv(k, kTile), blocks_of_row = cdiv(tiles, kBlockTiles);
  dispatch_fp8(p.q.data.dtype, [&]<typename F>() {
    dispatch_float(p.x.dtype, [&]<typename T>() {
      dispatch_scaling(p.rule, max_finite(p.x.dtype), [&]<typename Rule>(Rule scaling) {
        const Params<T, Rule> params = {.x = p.x.as<T>(),
                                        .q = rows_out(p.q),
                                        .m = m,
                                        .k = static_cast<int>(k),
                                        .tiles = static_cast<int>(tiles),
                                        .blocks_of_row = static_cast<int>(blocks_of_row),
                                        .read_policy = read_once_policy(p.q.data),
                                        .scaling = scaling};
        launch("quantize", quantize_rows<F, T, Rule>,
               static_cast<unsigned>(cdiv(m, kBlockRows) * blocks_of_row), 32 * kWarps, 0,
               stream_of(stream), params);
      });
    });
  });
}

}  // namespace fp8moe::cuda
