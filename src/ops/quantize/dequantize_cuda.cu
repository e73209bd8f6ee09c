// x = decode(q) * scale_inv in f32, rounded to x's dtype: 8 codes of 4 rows a thread.
#include "common/dispatch.h"
#include "device/convert.cuh"
#include "device/memory.cuh"
#include "device/runtime.h"
#include "ops/backends.h"

namespace fp8moe::cuda {
namespace {

template <typename T>
struct Params {
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

constexpr int kThreads = 256;  // at most
constexpr int kRows = 4;       // of a thread, in flight together

// A block takes kRows rows of one expert at a chunk of 8 codes a thread, which reads 8 bytes and
// writes 16 (of 16-bit x): whole lines of a warp.
template <typename F, typename T>
__global__ __launch_bounds__(kThreads) void dequantize_rows(const __grid_constant__ Params<T> p) {
  const unsigned across = blockIdx.x % p.blocks_across;
  const unsigned down = blockIdx.x / p.blocks_across;
  const int64_t expert = down / p.blocks_down;
  const int first = static_cast<int>(down % p.blocks_down) * kRows;  // within the expert
  const int column = static_cast<int>(across * blockDim.x + threadIdx.x) * 8;
  if (column >= p.k) return;
  const float* scale = p.scale_inv + expert * p.per_expert + column / 128 * p.per_tile;
  const int64_t at = (expert * p.m + first) * p.k + column;
  uint2 codes[kRows];
  float s[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    if (first + j >= p.m) break;
    codes[j] = load<uint2>(p.q + at + int64_t{j} * p.k, p.read_policy);
    s[j] = __ldg(scale +
                 (p.high == 1 ? first + j : (first + j) / static_cast<int>(kTile)) * p.per_row);
  }
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
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
  const int64_t across = cdiv(k / 8, kThreads), down = cdiv(m, kRows);
  const auto threads = static_cast<unsigned>(round_up(cdiv(k / 8, across), 32));
  const bool gemm = p.q.layout == ScaleLayout::gemm, block = p.q.layout == ScaleLayout::block;
  dispatch_fp8(p.q.data.dtype, [&]<typename F>() {
    dispatch_float(p.x.dtype, [&]<typename T>() {
      const Params<T> params = {.q = p.q.data.as<uint8_t>(),
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
