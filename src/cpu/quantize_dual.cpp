// rows = Q(x) by 1x128 tiles; columns = Q(x^T) by 128x128 or 128x1 tiles of each expert's tokens.
#include "core/backends.h"
#include "core/dispatch.h"
#include "cpu/clones.h"
#include "cpu/columns.h"
#include "cpu/row_scales.h"

namespace fp8moe::cpu {
namespace {

template <typename F, typename T>
FP8MOE_CLONES void row(const T* x, int64_t c, ScaleRule rule, uint8_t* q, float* scale_inv,
                       int64_t scale_stride) {
  quantize_band<F>(x, 1, c, rule, q, scale_inv, scale_stride);
}

template <typename F, typename T>
FP8MOE_CLONES void column_tile(const T* x, int64_t stride, int tokens, int channels,
                               bool per_channel, ScaleRule rule, const ColumnsAt& out) {
  quantize_columns<F>(x, stride, tokens, channels, per_channel, rule, out);
}

// Data 0 and scale 0: what a padding row is everywhere.
void zero_row(int64_t c, uint8_t* q, float* scale_inv, int64_t scale_stride) {
  memset(q, 0, static_cast<size_t>(c));
  for (int64_t t = 0; t < cdiv(c, kTile); ++t) scale_inv[t * scale_stride] = 0.0f;
}

}  // namespace

void quantize_dual(const Tensor& x, const RoutingPlan& plan, const Fp8Tensor& rows,
                   const Fp8Tensor& columns, ScaleRule rule, Stream) {
  const int64_t c = x.shape[1];
  const bool per_channel = columns.layout == ScaleLayout::gemm;
  const RowScales scales(rows);
  const std::vector<TokenTile> tiles = token_tiles("quantize_dual", plan);
  uint8_t* codes = rows.data.as<uint8_t>();

  for (int64_t e = 0; e < plan.experts; ++e)
    for (int64_t i = plan.row_offsets()[e] + plan.tokens_per_expert()[e];
         i < plan.row_offsets()[e + 1]; ++i)
      zero_row(c, codes + i * c, scales.of(i), scales.tile);

  dispatch_fp8(rows.data.dtype, [&]<typename F>() {
    dispatch_float(x.dtype, [&]<typename T>() {
      const T* data = x.as<T>();
#pragma omp parallel for schedule(dynamic)
      for (size_t n = 0; n < tiles.size(); ++n) {
        const TokenTile t = tiles[n];
        for (int64_t i = t.row; i < t.row + t.tokens; ++i)
          row<F>(data + i * c, c, rule, codes + i * c, scales.of(i), scales.tile);
        for (int64_t first = 0; first < c; first += kTile)
          column_tile<F>(data + t.row * c + first, c, t.tokens,
                         static_cast<int>(std::min(kTile, c - first)), per_channel, rule,
                         columns_at(columns, t, first));
        finish_lines();
      }
    });
  });
}

}  // namespace fp8moe::cpu
