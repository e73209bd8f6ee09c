// q = Q(x): x [M, K], one scale per tile of 1x128.
#include "common/dispatch.h"
#include "cpu/multiversion.h"
#include "cpu/tile.h"
#include "ops/backends.h"

namespace fp8moe::cpu {
namespace {

template <typename F, typename T>
FP8MOE_CLONES void quantize_row(const T* x, int64_t k, ScaleRule rule, uint8_t* q, float* scale_inv,
                                int64_t scale_stride) {
  quantize_tiles<F>(x, k, rule, q, scale_inv, scale_stride);
}

}  // namespace

template <>
void run(const Quantize& p, Stream) {
  const int64_t m = p.x.shape[0];
  const int64_t k = p.x.shape[1];
  const int64_t tiles = cdiv(k, kTile);
  const bool gemm = p.q.layout == ScaleLayout::gemm;
  dispatch_fp8(p.q.data.dtype, [&]<typename F>() {
    dispatch_float(p.x.dtype, [&]<typename T>() {
#pragma omp parallel for schedule(static)
      for (int64_t i = 0; i < m; ++i)
        quantize_row<F>(p.x.as<T>() + i * k, k, p.rule, p.q.data.as<uint8_t>() + i * k,
                        p.q.scale_inv.as<float>() + (gemm ? i : i * tiles), gemm ? pad4(m) : 1);
    });
  });
}

}  // namespace fp8moe::cpu
