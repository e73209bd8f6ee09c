// act_quantize and its gradient: the activation of z, quantized as it is computed.
#include <cstring>

#include "common/activation.h"
#include "common/backends.h"
#include "common/dispatch.h"
#include "common/reduce.h"
#include "cpu/columns.h"
#include "cpu/multiversion.h"
#include "cpu/row_scales.h"
#include "cpu/tile.h"

namespace fp8moe::cpu {

// ---- rows ---------------------------------------------------------------------------------------
// What both operators do with a row of f32, and where their results go.

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

// Rows of z and dz are [gate | up] while they are computed with.
void take_apart(const Activation& activation, std::vector<float>& z, std::vector<float>& spare) {
  if (!activation.interleaved) return;
  const size_t inner = z.size() / 2;
  for (size_t i = 0; i < inner; ++i) spare[i] = z[2 * i], spare[inner + i] = z[2 * i + 1];
  z.swap(spare);
}
void put_together(const Activation& activation, float* z, std::vector<float>& spare) {
  if (!activation.interleaved) return;
  const size_t inner = spare.size() / 2;
  std::memcpy(spare.data(), z, spare.size() * sizeof(float));
  for (size_t i = 0; i < inner; ++i) z[2 * i] = spare[i], z[2 * i + 1] = spare[inner + i];
}

// h of gate and up (of no gate: both are z) times prob
template <class Act>
FP8MOE_CLONES void hidden_row(const Act& act, const float* gate, const float* up, int64_t inner,
                              float prob, float* h) {
  for (int64_t i = 0; i < inner; ++i) h[i] = act.value(gate[i], up[i], act.sigmoid(gate[i])) * prob;
}

void hidden_row(const Activation& activation, const std::vector<float>& z, int64_t inner,
                float prob, float* h, int64_t rounding = kRoundNothing) {
  const float* up = z.data() + (activation.traits().gated ? inner : 0);
  with_rounding(activation, rounding,
                [&](auto act) { hidden_row(act, z.data(), up, inner, prob, h); });
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
void put_columns(const Fp8Tensor& columns, const TokenTile& tile, const float* x, ScaleRule rule) {
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
std::vector<TokenTile> tiles_of(const char* op, const RoutingPlan& plan, int64_t rows) {
  if (plan.defined()) return token_tiles(op, plan);
  std::vector<TokenTile> tiles;
  for (int64_t r = 0; r < rows; r += kTile)
    tiles.push_back({.row = r, .col = r, .tokens = static_cast<int>(std::min(kTile, rows - r))});
  return tiles;
}

}  // namespace

// ---- act_quantize -------------------------------------------------------------------------------
// act_quantize: h = Q(act(z) prob) row by row.

template <>
void run(const ActQuantize& p, Stream) {
  const int64_t width = p.z.shape[1], inner = p.h.data.shape[1];
  const std::vector<TokenTile> tiles = tiles_of("act_quantize", p.plan, p.z.shape[0]);
  const RowSink h_rows(p.h);
  const RowSink z_rows(p.z_q);
  if (p.plan.defined()) {
    h_rows.zero_padding(p.plan);
    if (p.z_q.defined()) z_rows.zero_padding(p.plan);
  }
  dispatch_float(p.z.dtype, [&]<typename T>() {
#pragma omp parallel
    {
      std::vector<float> z_row(width), spare(width), h_row(inner);
#pragma omp for schedule(dynamic)
      for (size_t n = 0; n < tiles.size(); ++n) {
        const TokenTile& tile = tiles[n];
        for (int64_t r = tile.row; r < tile.row + tile.tokens; ++r) {
          const T* from = p.z.as<const T>() + r * width;
          widen_row<T>(from, width, z_row.data());
          take_apart(p.activation, z_row, spare);
          hidden_row(p.activation, z_row, inner,
                     p.probs.defined() ? p.probs.as<const float>()[r] : 1.0f, h_row.data(),
                     p.rounding);
          h_rows.put(r, h_row.data(), p.rule);
          if (p.z_q.defined()) z_rows.put(r, from, p.rule);
        }
      }
    }
  });
}

// ---- act_quantize_backward ----------------------------------------------------------------------
// act_quantize_backward: dz and dprob row by row; with columns, the f32 rows
// of 128 tokens are kept until their columns are quantized too.

namespace {

// dgate, dup (of no gate: none) and the terms of dprob
template <class Act>
FP8MOE_CLONES void grad_row(const Act& act, const float* __restrict gate,
                            const float* __restrict up, const float* __restrict dh, int64_t inner,
                            float prob, float* __restrict dgate, float* __restrict dup,
                            float* __restrict terms) {
  for (int64_t i = 0; i < inner; ++i) {
    const ActivationGrad grad = act.grad(gate[i], up[i], act.sigmoid(gate[i]), dh[i]);
    dgate[i] = grad.dgate * prob;
    if constexpr (Act::kGated) dup[i] = grad.dup * prob;
    terms[i] = grad.dprob;
  }
}

FP8MOE_CLONES float sum_row(const float* terms, int64_t n) {
  return pinned_sum(n, [=](int64_t i) { return terms[i]; });
}

void zero_padding_probs(const RoutingPlan& plan, const Tensor& dprobs) {
  for (int64_t e = 0; e < plan.experts; ++e)
    std::fill(dprobs.as<float>() + plan.row_offsets()[e] + plan.tokens_per_expert()[e],
              dprobs.as<float>() + plan.row_offsets()[e + 1], 0.0f);
}

}  // namespace

template <>
void run(const ActQuantizeBackward& p, Stream) {
  const int64_t width = p.z.shape[1], inner = p.dh.shape[1];
  const int64_t up = p.activation.traits().gated ? inner : 0;  // where it begins
  const std::vector<TokenTile> tiles = tiles_of("act_quantize_backward", p.plan, p.dh.shape[0]);
  const int64_t kept = p.dz_columns.defined() ? kTile : 1;  // rows of dz
  const RowSink dz_rows(p.dz);
  if (p.plan.defined()) {
    dz_rows.zero_padding(p.plan);
    if (p.dprobs.defined()) zero_padding_probs(p.plan, p.dprobs);
  }
  const auto read = [](const Tensor& t, int64_t row, int64_t width, float* to) {
    dispatch_float(t.dtype,
                   [&]<typename T>() { widen_row<T>(t.as<const T>() + row * width, width, to); });
  };
#pragma omp parallel
  {
    std::vector<float> z_row(width), spare(width), dh_row(inner), terms(inner);
    std::vector<float> dz_block(kept * width);
    std::vector<float> h_block(p.h_columns.defined() ? kTile * inner : 0);
#pragma omp for schedule(dynamic)
    for (size_t n = 0; n < tiles.size(); ++n) {
      const TokenTile& tile = tiles[n];
      for (int64_t r = tile.row; r < tile.row + tile.tokens; ++r) {
        const int64_t i = r - tile.row;
        float* dz_row = dz_block.data() + i % kept * width;
        const float prob = p.probs.defined() ? p.probs.as<const float>()[r] : 1.0f;
        read(p.z, r, width, z_row.data());
        take_apart(p.activation, z_row, spare);
        read(p.dh, r, inner, dh_row.data());
        with_activation(p.activation, [&](auto act) {
          grad_row(act, z_row.data(), z_row.data() + up, dh_row.data(), inner, prob, dz_row,
                   dz_row + up, terms.data());
        });
        put_together(p.activation, dz_row, spare);
        dz_rows.put(r, dz_row, p.rule);
        if (p.dprobs.defined()) p.dprobs.as<float>()[r] = sum_row(terms.data(), inner);
        if (p.h_columns.defined())
          hidden_row(p.activation, z_row, inner, prob, h_block.data() + i * inner);
      }
      if (p.dz_columns.defined()) put_columns(p.dz_columns, tile, dz_block.data(), p.rule);
      if (p.h_columns.defined()) put_columns(p.h_columns, tile, h_block.data(), p.rule);
    }
  }
}

}  // namespace fp8moe::cpu
