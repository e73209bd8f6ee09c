// act_quantize_backward: dz = Q([dgate | dup]) and dprob row by row; with columns, the f32 rows
// of 128 tokens are kept until their columns are quantized too.
#include "common/reduce.h"
#include "ops/activation/swiglu_rows_cpu.h"
#include "ops/backends.h"

namespace fp8moe::cpu {

namespace {

// dgate, dup and the terms of dprob
FP8MOE_CLONES void swiglu_grad_row(const float* __restrict gate, const float* __restrict up,
                                   const float* __restrict dh, int64_t inner, float prob,
                                   float limit, float* __restrict dgate, float* __restrict dup,
                                   float* __restrict terms) {
  for (int64_t i = 0; i < inner; ++i) {
    const SwigluInput in = clamp_swiglu(gate[i], up[i], limit);
    const SwigluGrad grad = swiglu_grad(in, pinned_sigmoid(in.gate), prob, dh[i]);
    dgate[i] = grad.dgate;
    dup[i] = grad.dup;
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
  const int64_t inner = p.dh.shape[1];
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
    std::vector<float> z_row(2 * inner), dh_row(inner), terms(inner);
    std::vector<float> dz_block(kept * 2 * inner);
    std::vector<float> h_block(p.h_columns.defined() ? kTile * inner : 0);
#pragma omp for schedule(dynamic)
    for (size_t n = 0; n < tiles.size(); ++n) {
      const TokenTile& tile = tiles[n];
      for (int64_t r = tile.row; r < tile.row + tile.tokens; ++r) {
        const int64_t i = r - tile.row;
        float* dz_row = dz_block.data() + i % kept * 2 * inner;
        const float prob = p.probs.defined() ? p.probs.as<const float>()[r] : 1.0f;
        read(p.z, r, 2 * inner, z_row.data());
        read(p.dh, r, inner, dh_row.data());
        swiglu_grad_row(z_row.data(), z_row.data() + inner, dh_row.data(), inner, prob, p.limit,
                        dz_row, dz_row + inner, terms.data());
        dz_rows.put(r, dz_row, p.rule);
        if (p.dprobs.defined()) p.dprobs.as<float>()[r] = sum_row(terms.data(), inner);
        if (p.h_columns.defined())
          swiglu_row(z_row.data(), inner, prob, p.limit, h_block.data() + i * inner);
      }
      if (p.dz_columns.defined()) put_columns(p.dz_columns, tile, dz_block.data(), p.rule);
      if (p.h_columns.defined()) put_columns(p.h_columns, tile, h_block.data(), p.rule);
    }
  }
}

}  // namespace fp8moe::cpu
