// x = decode(q) * scale_inv in f32, rounded to x's dtype; q [M, K], or [E, M, K] in block layout.
#include "common/dispatch.h"
#include "cpu/multiversion.h"
#include "cpu/tile.h"
#include "ops/backends.h"

namespace fp8moe::cpu {
namespace {

// One row [k] with its scales `scale_stride` apart.
template <typename F, typename T>
FP8MOE_CLONES void dequantize_row(const uint8_t* __restrict q, int64_t k, const float* scale_inv,
                                  int64_t scale_stride, T* __restrict x) {
  for (int64_t c = 0; c < k; c += kTile) {
    const float s = scale_inv[c / kTile * scale_stride];
    const int64_t end = std::min(c + kTile, k);
    for (int64_t i = c; i < end; ++i) x[i] = from_float<T>(fp8_decode<F>(q[i]) * s);
  }
}

}  // namespace

template <>
void run(const Dequantize& p, Stream) {
  const int64_t k = p.x.shape[p.x.ndim - 1];
  const int64_t m = p.x.shape[p.x.ndim - 2];
  const int64_t rows = p.x.numel() / k;
  const int64_t k_tiles = cdiv(k, kTile);
  const int64_t m_tiles = cdiv(m, kTile);
  const auto scales_of_row = [&](int64_t i) {
    switch (p.q.layout) {
      case ScaleLayout::row: return i * k_tiles;
      case ScaleLayout::gemm: return i;
      default: return (i / m * m_tiles + i % m / kTile) * k_tiles;
    }
  };
  dispatch_fp8(p.q.data.dtype, [&]<typename F>() {
    dispatch_float(p.x.dtype, [&]<typename T>() {
#pragma omp parallel for schedule(static)
      for (int64_t i = 0; i < rows; ++i)
        dequantize_row<F>(p.q.data.as<uint8_t>() + i * k, k,
                          p.q.scale_inv.as<float>() + scales_of_row(i),
                          p.q.layout == ScaleLayout::gemm ? pad4(m) : 1, p.x.as<T>() + i * k);
    });
  });
}

}  // namespace fp8moe::cpu
