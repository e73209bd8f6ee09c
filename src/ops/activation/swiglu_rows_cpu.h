// The row kernels of act_quantize and its backward, on f32 rows, and where their results go.
#pragma once

#include <cstring>

#include "common/dispatch.h"
#include "common/swiglu.h"
#include "cpu/columns.h"
#include "cpu/multiversion.h"
#include "cpu/row_scales.h"
#include "cpu/tile.h"

namespace fp8moe::cpu {
namespace {

template <typename T>
FP8MOE_CLONES void widen_row(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

// q [n] and its scale_inv by 1x128 tiles; x's dtype decides the scale of an overflowing tile.
template <typename F, typename T>
FP8MOE_CLONES void quantize_row(const T* x, int64_t n, ScaleRule rule, uint8_t* q, float* scale_inv,
                                int64_t stride) {
  quantize_tiles<F>(x, n, rule, q, scale_inv, stride);
}

// h = silu(gate) up prob; z = [gate | up]
FP8MOE_CLONES void swiglu_row(const float* z, int64_t inner, float prob, float limit, float* h) {
  for (int64_t i = 0; i < inner; ++i) {
    const SwigluInput in = clamp_swiglu(z[i], z[inner + i], limit);
    h[i] = swiglu(in, pinned_sigmoid(in.gate), prob);
  }
}

template <typename F>
FP8MOE_CLONES void quantize_column_tile(const float* x, int64_t stride, int tokens, int channels,
                                        bool per_channel, ScaleRule rule, const ColumnsAt& out) {
  quantize_columns<F>(x, stride, tokens, channels, per_channel, rule, out);
}

// Row r of an FP8 tensor whose rows are quantized as they are computed.
struct RowSink {
  uint8_t* data = nullptr;
  RowScales scales;
  int64_t width = 0;
  DType dtype = DType::e4m3;

  explicit RowSink(const Fp8Tensor& t)
      : data(t.data.as<uint8_t>()), width(t.data.shape[1]), dtype(t.data.dtype) {
    if (t.defined()) scales = RowScales(t);
  }

  template <typename T>
  void put(int64_t r, const T* x, ScaleRule rule) const {
    dispatch_fp8(dtype, [&]<typename F>() {
      quantize_row<F, T>(x, width, rule, data + r * width, scales.of(r), scales.tile);
    });
  }
  // Data 0 and scale 0 in the padding rows inside the experts.
  void zero_padding(const RoutingPlan& plan) const {
    for (int64_t e = 0; e < plan.experts; ++e)
      for (int64_t r = plan.row_offsets()[e] + plan.tokens_per_expert()[e];
           r < plan.row_offsets()[e + 1]; ++r) {
        std::memset(data + r * width, 0, width);
        for (int64_t j = 0; j < cdiv(width, kTile); ++j) scales.of(r)[j * scales.tile] = 0.0f;
      }
  }
};

// Columns of `tile` of a transposed operand [C, Kcap] from its tokens' f32 rows x [tokens, C].
inline void put_columns(const Fp8Tensor& columns, const TokenTile& tile, const float* x,
                        ScaleRule rule) {
  const int64_t c = columns.data.shape[0];
  const bool per_channel = columns.layout == ScaleLayout::gemm;
  dispatch_fp8(columns.data.dtype, [&]<typename F>() {
    for (int64_t first = 0; first < c; first += kTile)
      quantize_column_tile<F>(x + first, c, tile.tokens,
                              static_cast<int>(std::min(kTile, c - first)), per_channel, rule,
                              columns_at(columns, tile, first));
  });
  finish_lines();
}

// The tokens an op walks, 128 at a time: the plan's, or all the rows there are.
inline std::vector<TokenTile> tiles_of(const char* op, const RoutingPlan& plan, int64_t rows) {
  if (plan.defined()) return token_tiles(op, plan);
  std::vector<TokenTile> tiles;
  for (int64_t r = 0; r < rows; r += kTile)
    tiles.push_back({.row = r, .col = r, .tokens = static_cast<int>(std::min(kTile, rows - r))});
  return tiles;
}

}  // namespace
}  // namespace fp8moe::cpu
