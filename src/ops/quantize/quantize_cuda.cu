// quantize, quantize_weight and dequantize: by tiles of 1x128 or 128x128.
#include "common/backends.h"
#include "common/dispatch.h"
#include "device/convert.cuh"
#include "device/eight.cuh"
#include "device/memory.cuh"
#include "device/runtime.h"
#include "device/tile.cuh"
#include "device/transposed_codes.cuh"

namespace fp8moe::cuda {

// ---- quantize -----------------------------------------------------------------------------------
// q = Q(x), x [M, K], by 1x128 tiles: 16 lanes per tile, 8 values per lane, 4 rows per warp in
// flight.

namespace {

// A block's 8 warps take 8 rows of 8 tiles: scales of 8 rows (gemm layout) or of 8 tiles (row
// layout) fill whole 32-byte sectors.
constexpr int kWarps = 8;
constexpr int kRows = 4;  // of a warp, at 2 tiles
constexpr int kBlockRows = 8;
constexpr int kBlockTiles = 8;

template <typename T, typename Rule>
struct RowsParams {
  const T* x;  // [M, K]
  RowsOut q;   // [M, K] e4m3 or e5m2
  int64_t m;
  int k, tiles, blocks_of_row;
  uint64_t read_policy;
  Rule scaling;
};

template <typename F, typename T, typename Rule>
__global__ void __launch_bounds__(32 * kWarps)
    quantize_rows(const __grid_constant__ RowsParams<T, Rule> p) {
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
        const RowsParams<T, Rule> params = {.x = p.x.as<T>(),
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

// ---- quantize_weight ----------------------------------------------------------------------------
// q = Q(w) by 128x128 tiles of w [E, N, K], in E4M3, and q_t, the same codes transposed: one block
// per tile, w read once and kept packed in registers.

namespace {

template <typename T, typename Rule>
struct TilesParams {
  const T* w;      // [E, upper, K]
  const T* below;  // [E, N - upper, K], or nullptr
  uint8_t* q;      // [E, N, K], or nullptr
  uint8_t* q_t;    // [E, K, N], or nullptr
  float* scale;    // [E, cdiv(N, 128), cdiv(K, 128)]
  float* scale_t;  // its transpose
  int n, k, n_tiles, k_tiles;
  int upper;  // rows of an expert in w: N, or a multiple of 128
  Rule scaling;
};

constexpr int kTilesThreads = 256;
template <typename T>
constexpr int kBlocksPerSm = sizeof(T) == 4 ? 2 : 3;

struct TilesShared {
  TransposedCodes codes;
  float amax[kTilesThreads / 32];
};

// 16 lanes share a row: a warp stores whole lines of 128 codes. A thread holds rows
// 64 half + 4 group + j at columns 8 lane, 8 of them.
template <typename T, typename Rule>
__global__ __launch_bounds__(kTilesThreads, kBlocksPerSm<T>) void quantize_tiles(
    const __grid_constant__ TilesParams<T, Rule> p) {
  __shared__ TilesShared shared;
  const int n_tile = blockIdx.x / p.k_tiles % p.n_tiles, k_tile = blockIdx.x % p.k_tiles;
  const int64_t expert = blockIdx.x / p.k_tiles / p.n_tiles;
  const int lane = threadIdx.x % 16, group = threadIdx.x / 16;
  const int row = 128 * n_tile + 4 * group, column = 128 * k_tile + 8 * lane;
  const int64_t base = expert * p.n * p.k;
  const bool above = 128 * n_tile < p.upper;
  const int64_t first = above ? expert * p.upper : expert * (p.n - p.upper) - p.upper;
  const T* in = (above ? p.w : p.below) + (first + row) * p.k + column;

  Vec8<T> x[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[half][j].clear();
      if (row + 64 * half + j < p.n && column < p.k)
        x[half][j].load(in + (64 * half + j) * p.k);  // 128 K elements are within an int
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
  const int64_t n = p.rows(), k = p.w.shape[2];
  if (p.w.shape[0] * n * k == 0) return;
  const DeviceGuard guard(p.w.device);
  const int64_t n_tiles = cdiv(n, kTile), k_tiles = cdiv(k, kTile);
  dispatch_float(p.w.dtype, [&]<typename T>() {
    dispatch_scaling(p.rule, max_finite(p.w.dtype), [&]<typename Rule>(Rule scaling) {
      const TilesParams<T, Rule> params = {.w = p.w.as<T>(),
                                           .below = p.below.as<T>(),
                                           .q = p.q.data.as<uint8_t>(),
                                           .q_t = p.q_t.data.as<uint8_t>(),
                                           .scale = p.q.scale_inv.as<float>(),
                                           .scale_t = p.q_t.scale_inv.as<float>(),
                                           .n = static_cast<int>(n),
                                           .k = static_cast<int>(k),
                                           .n_tiles = static_cast<int>(n_tiles),
                                           .k_tiles = static_cast<int>(k_tiles),
                                           .upper = static_cast<int>(p.w.shape[1]),
                                           .scaling = scaling};
      launch("quantize_weight", quantize_tiles<T, Rule>,
             static_cast<unsigned>(p.w.shape[0] * n_tiles * k_tiles), kTilesThreads, 0,
             stream_of(stream), params);
    });
  });
}

// ---- dequantize ---------------------------------------------------------------------------------
// x = decode(q) * scale_inv in f32, rounded to x's dtype: 8 codes of 4 rows per thread.

namespace {

template <typename T>
struct DequantizeParams {
  const uint8_t* q;  // [rows, K]
  const float* scale_inv;
  T* x;  // [rows, K]
  int m, k;
  unsigned blocks_across, blocks_down;  // of an expert
  // Scale of row r of expert e and tile t: e per_expert + r / high per_row + t per_tile.
  int64_t per_expert, per_row, per_tile;
  int high;
  uint64_t read_policy;
};

constexpr int kMostThreads = 256;
constexpr int kRowsInFlight = 4;  // of a thread

// A block takes kRowsInFlight rows of one expert at a chunk of 8 codes a thread, which reads 8
// bytes and writes 16 (of 16-bit x): whole lines of a warp.
template <typename F, typename T>
__global__ __launch_bounds__(kMostThreads) void dequantize_rows(
    const __grid_constant__ DequantizeParams<T> p) {
  const unsigned across = blockIdx.x % p.blocks_across;
  const unsigned down = blockIdx.x / p.blocks_across;
  const int64_t expert = down / p.blocks_down;
  const int first = static_cast<int>(down % p.blocks_down) * kRowsInFlight;  // within the expert
  const int column = static_cast<int>(across * blockDim.x + threadIdx.x) * 8;
  if (column >= p.k) return;
  const float* scale = p.scale_inv + expert * p.per_expert + column / 128 * p.per_tile;
  const int64_t at = (expert * p.m + first) * p.k + column;
  uint2 codes[kRowsInFlight];
  float s[kRowsInFlight];
#pragma unroll
  for (int j = 0; j < kRowsInFlight; ++j) {
    if (first + j >= p.m) break;
    codes[j] = load<uint2>(p.q + at + int64_t{j} * p.k, p.read_policy);
    s[j] = __ldg(scale +
                 (p.high == 1 ? first + j : (first + j) / static_cast<int>(kTile)) * p.per_row);
  }
#pragma unroll
  for (int j = 0; j < kRowsInFlight; ++j) {
    if (first + j >= p.m) return;
    float v[8];
    fp8_decode4<F>(codes[j].x, v), fp8_decode4<F>(codes[j].y, v + 4);
#pragma unroll
    for (float& x : v) x *= s[j];
    constexpr int kPerStore = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < 8; i += kPerStore)
      store(p.x + at + int64_t{j} * p.k + i,
            pack<T>(*reinterpret_cast<float (*)[kPerStore]>(&v[i])));
  }
}

}  // namespace

template <>
void run(const Dequantize& p, Stream stream) {
  const int64_t k = p.x.shape[p.x.ndim - 1], m = p.x.shape[p.x.ndim - 2];
  if (p.x.numel() == 0) return;
  const DeviceGuard guard(p.x.device);
  const int64_t experts = p.x.numel() / k / m, tiles = cdiv(k, kTile);
  const int64_t across = cdiv(k / 8, kMostThreads), down = cdiv(m, kRowsInFlight);
  const auto threads = static_cast<unsigned>(round_up(cdiv(k / 8, across), 32));
  const bool gemm = p.q.layout == ScaleLayout::gemm, block = p.q.layout == ScaleLayout::block;
  dispatch_fp8(p.q.data.dtype, [&]<typename F>() {
    dispatch_float(p.x.dtype, [&]<typename T>() {
      const DequantizeParams<T> params = {.q = p.q.data.as<uint8_t>(),
                                          .scale_inv = p.q.scale_inv.as<float>(),
                                          .x = p.x.as<T>(),
                                          .m = static_cast<int>(m),
                                          .k = static_cast<int>(k),
                                          .blocks_across = static_cast<unsigned>(across),
                                          .blocks_down = static_cast<unsigned>(down),
                                          .per_expert = cdiv(m, kTile) * tiles,
                                          .per_row = gemm ? 1 : tiles,
                                          .per_tile = gemm ? pad4(m) : 1,
                                          .high = block ? static_cast<int>(kTile) : 1,
                                          .read_policy = read_once_policy(p.x)};
      launch("dequantize", dequantize_rows<F, T>, static_cast<unsigned>(experts * across * down),
             threads, 0, stream_of(stream), params);
    });
  });
}

}  // namespace fp8moe::cuda
