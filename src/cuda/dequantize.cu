// x = decode(q) * scale_inv in f32, rounded to x's dtype: 16 codes a thread.
#include "core/backends.h"
#include "core/dispatch.h"
#include "cuda/device/convert.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {
namespace {

template <typename T>
struct Params {
  const uint8_t* q;  // [rows, K]
  const float* scale_inv;
  T* x;          // [rows, K]
  int64_t rows;  // E M
  int m, k;
  // Scale of row r of expert e and tile t: e per_expert + r / high per_row + t per_tile.
  int64_t per_expert, per_row, per_tile;
  int high;
};

template <typename F, typename T>
__global__ __launch_bounds__(256) void dequantize_rows(const __grid_constant__ Params<T> p) {
  const int64_t index = blockIdx.x * int64_t{256} + threadIdx.x;
  const int chunks = p.k / 16;
  const int64_t row = index / chunks;
  if (row >= p.rows) return;
  const int column = static_cast<int>(index % chunks) * 16;
  const uint4 codes = load_once<uint4>(p.q + row * p.k + column);
  const float s = p.scale_inv[row / p.m * p.per_expert + row % p.m / p.high * p.per_row +
                              column / 128 * p.per_tile];
  float v[16];
  fp8_decode4<F>(codes.x, v), fp8_decode4<F>(codes.y, v + 4);
  fp8_decode4<F>(codes.z, v + 8), fp8_decode4<F>(codes.w, v + 12);
#pragma unroll
  for (float& x : v) x *= s;
  constexpr int kPerStore = 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < 16; i += kPerStore)
    store(p.x + row * p.k + column + i, pack<T>(*reinterpret_cast<float (*)[kPerStore]>(&v[i])));
}

}  // namespace

void dequantize(const Fp8Tensor& q, const Tensor& x, Stream stream) {
  const int64_t k = x.shape[x.ndim - 1], m = x.shape[x.ndim - 2];
  if (x.numel() == 0) return;
  const DeviceGuard guard(x.device);
  const int64_t rows = x.numel() / k, tiles = cdiv(k, kTile);
  const bool gemm = q.layout == ScaleLayout::gemm, block = q.layout == ScaleLayout::block;
  dispatch_fp8(q.data.dtype, [&]<typename F>() {
    dispatch_float(x.dtype, [&]<typename T>() {
      const Params<T> params = {.q = q.data.as<uint8_t>(),
                                .scale_inv = q.scale_inv.as<float>(),
                                .x = x.as<T>(),
                                .rows = rows,
                                .m = static_cast<int>(m),
                                .k = static_cast<int>(k),
                                .per_expert = cdiv(m, kTile) * tiles,
                                .per_row = gemm ? 1 : tiles,
                                .per_tile = gemm ? pad4(m) : 1,
                                .high = block ? static_cast<int>(kTile) : 1};
      launch("dequantize", dequantize_rows<F, T>, static_cast<unsigned>(cdiv(rows * (k / 16), 256)),
             256, 0, stream_of(stream), params);
    });
  });
}

}  // namespace fp8moe::cuda
