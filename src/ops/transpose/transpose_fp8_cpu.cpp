// columns = the rows of q transposed expert by expert: codes shifted to one scale a tile, or, under
// requantize, dequantized to f32 and quantized again along the tokens.
#include "common/dispatch.h"
#include "cpu/columns.h"
#include "cpu/multiversion.h"
#include "cpu/row_scales.h"
#include "ops/backends.h"
#include "ops/transpose/shift_columns_cpu.h"

namespace fp8moe::cpu {
namespace {

// One tile of codes [tokens, channels] with a scale a row, by way of f32.
template <typename F>
FP8MOE_CLONES void requantize_tile(const uint8_t* q, int64_t stride, const float* scale_inv,
                                   int64_t scale_stride, int tokens, int channels, bool per_channel,
                                   ScaleRule rule, const ColumnsAt& out) {
  alignas(64) float value[kTile][kTile];
  for (int t = 0; t < tokens; ++t)
    for (int c = 0; c < channels; ++c)
      value[t][c] = fp8_decode<F>(q[t * stride + c]) * scale_inv[t * scale_stride];
  quantize_columns<F>(value[0], kTile, tokens, channels, per_channel, rule, out);
}

void requantize_columns(const Fp8Tensor& q, const RoutingPlan& plan, const Fp8Tensor& columns,
                        ScaleRule rule) {
  const int64_t c = q.data.shape[1];
  const bool per_channel = columns.layout == ScaleLayout::gemm;
  const RowScales scales(q);
  const std::vector<TokenTile> tiles = token_tiles("transpose_fp8", plan);
  dispatch_fp8(q.data.dtype, [&]<typename F>() {
#pragma omp parallel for schedule(dynamic)
    for (size_t n = 0; n < tiles.size(); ++n) {
      const TokenTile t = tiles[n];
      for (int64_t first = 0; first < c; first += kTile)
        requantize_tile<F>(q.data.as<uint8_t>() + t.row * c + first, c,
                           scales.of(t.row) + first / kTile * scales.tile, scales.row, t.tokens,
                           static_cast<int>(std::min(kTile, c - first)), per_channel, rule,
                           columns_at(columns, t, first));
      finish_lines();
    }
  });
}

}  // namespace

template <>
void run(const TransposeFp8& p, Stream) {
  if (p.requantize) return requantize_columns(p.q, p.plan, p.columns, p.rule);
  shift_columns("transpose_fp8", p.q, p.plan, nullptr, p.columns);
}

}  // namespace fp8moe::cpu
