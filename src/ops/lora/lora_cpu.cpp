// lora_project, lora_wgrad, quantize_lora on the CPU: their definition.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/backends.h"
#include "common/dispatch.h"
#include "common/lora.h"
#include "cpu/multiversion.h"
#include "cpu/plan_check.h"
#include "cpu/row_scales.h"

namespace fp8moe::cpu {
namespace {

// One scale and the parts of n values: out [parts, columns] side by side, zero from n on.
struct Parts {
  int64_t columns, count;
  bool of_w2;

  Parts(int64_t rank, bool of_w2)
      : columns(round_up(rank, 16)), count(lora_depth(rank) / columns), of_w2(of_w2) {}

  template <typename F>
  void encode(const float* x, int64_t n, TileScale scale, ScaleKind kind, uint8_t* out) const {
    std::fill_n(out, count * columns, uint8_t{0});
    for (int64_t j = 0; j < n; ++j) {
      const HighLow codes = high_low<F>(x[j], scale.scale, kind == ScaleKind::amax);
      for (int part = 0; part < count; ++part)
        out[part * columns + j] = is_low(of_w2, part) ? codes.low : codes.high;
    }
  }
};

float amax(const float* x, int64_t n, float top = 0.0f) {
  for (int64_t j = 0; j < n; ++j) top = std::fmax(top, std::fabs(x[j]));
  return top;
}

// factor[e] as floats [r, C].
std::vector<float> rank_first(const Tensor& factor, bool is, int64_t e, int64_t rank, int64_t c) {
  const Bf16* from = factor.as<const Bf16>() + e * rank * c;
  std::vector<float> to(rank * c);
  for (int64_t j = 0; j < rank; ++j)
    for (int64_t k = 0; k < c; ++k)
      to[j * c + k] = to_float(is ? from[j * c + k] : from[k * rank + j]);
  return to;
}

template <typename F>
FP8MOE_CLONES void decode(const uint8_t* codes, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = fp8_decode<F>(codes[i]);
}

// sum over k of a[k] b[k], in eight sums.
FP8MOE_CLONES float dot(const float* a, const float* b, int64_t n) {
  float sums[8] = {};
  for (int64_t k = 0; k < n; k += 8)
    for (int i = 0; i < 8; ++i) sums[i] += a[k + i] * b[k + i];
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// sum[k] += by * x[k]
FP8MOE_CLONES void add_times(const float* x, int64_t n, float by, float* sum) {
  for (int64_t k = 0; k < n; ++k) sum[k] += by * x[k];
}

// Where the values of a plan's row lie in rows: -1 for padding.
int64_t source_of(const RoutingPlan& plan, ScaleLayout layout, int64_t row) {
  return layout == ScaleLayout::gemm ? row : plan.token_of_row()[row];
}

}  // namespace

template <>
void run(const LoraProject& p, Stream) {
  check_rows("lora_project", p.plan);
  const int64_t c = p.rows.data.shape[1], rank = p.u.shape[1], depth = lora_depth(rank);
  const RowScales scales(p.rows);
  const Parts parts(rank, false);
  for (int64_t e = 0; e < p.plan.experts; ++e) {
    const int64_t first = p.plan.row_offsets()[e], end = p.plan.row_offsets()[e + 1];
    const int64_t tokens = p.plan.tokens_per_expert()[e];
    if (first == end) continue;
    const std::vector<float> factor = rank_first(p.factor, p.rank_first, e, rank, c);
    dispatch_fp8(p.rows.data.dtype, [&]<typename F>() {
#pragma omp parallel for schedule(static)
      for (int64_t row = first; row < end; ++row) {
        float values[kTile], u[kMaxLoraRank] = {};
        if (row < first + tokens) {
          const int64_t at = source_of(p.plan, p.rows.layout, row);
          const uint8_t* codes = p.rows.data.as<uint8_t>() + at * p.rows.data.stride();
          for (int64_t k = 0; k < c; k += kTile) {
            const int64_t n = std::min(kTile, c - k);
            decode<F>(codes + k, n, values);
            const float scale = scales.of(at)[k / kTile * scales.tile];
            for (int64_t j = 0; j < rank; ++j)
              u[j] += dot(values, factor.data() + j * c + k, n) * scale;
          }
        }
        for (int64_t j = 0; j < rank; ++j) {
          const Bf16 rounded = from_float<Bf16>(u[j] * p.scaling);
          p.u.as<Bf16>()[row * rank + j] = rounded;
          u[j] = to_float(rounded);
        }
        const TileScale scale = lora_scale(amax(u, rank), F::kMax, p.rule.kind, p.rule.eps);
        p.u_q.scale_inv.as<float>()[row] = scale.scale_inv;
        parts.encode<F>(u, rank, scale, p.rule.kind, p.u_q.data.as<uint8_t>() + row * depth);
      }
    });
  }
}

template <>
void run(const LoraWgrad& p, Stream) {
  check_rows("lora_wgrad", p.plan);
  const int64_t c = p.rows.data.shape[1], rank = p.u.shape[1], tiles = cdiv(c, kTile);
  const RowScales scales(p.rows);
  const bool bf16 = p.dfactor.dtype == DType::bf16;
  dispatch_fp8(p.rows.data.dtype, [&]<typename F>() {
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < p.plan.experts * tiles; ++task) {
      const int64_t e = task / tiles, k = task % tiles * kTile, n = std::min(kTile, c - k);
      float values[kTile], sums[kMaxLoraRank][kTile] = {};
      const int64_t first = p.plan.row_offsets()[e];
      for (int64_t row = first; row < first + p.plan.tokens_per_expert()[e]; ++row) {
        const int64_t at = source_of(p.plan, p.rows.layout, row);
        decode<F>(p.rows.data.as<uint8_t>() + at * p.rows.data.stride() + k, n, values);
        const float scale = scales.of(at)[k / kTile * scales.tile];
        for (int64_t j = 0; j < rank; ++j) {
          const float u = to_float(p.u.as<const Bf16>()[row * rank + j]) * scale;
          add_times(values, n, to_float(from_float<Bf16>(u)), sums[j]);
        }
      }
      for (int64_t j = 0; j < rank; ++j)
        for (int64_t i = 0; i < n; ++i) {
          const int64_t to = e * rank * c + (p.rank_first ? j * c + k + i : (k + i) * rank + j);
          if (bf16)
            p.dfactor.as<Bf16>()[to] = from_float<Bf16>(sums[j][i]);
          else
            p.dfactor.as<float>()[to] = sums[j][i];
        }
    }
  });
}

template <>
void run(const QuantizeLora& p, Stream) {
  const int64_t rank = p.factor.shape[p.rank_first ? 1 : 2], c = p.w2.data.shape[1];
  const int64_t depth = lora_depth(rank), tiles = cdiv(c, kTile);
  const Parts parts(rank, true);
#pragma omp parallel for schedule(static)
  for (int64_t task = 0; task < p.factor.shape[0] * tiles; ++task) {
    const int64_t e = task / tiles, first = task % tiles * kTile, end = std::min(c, first + kTile);
    const Bf16* from = p.factor.as<const Bf16>() + e * rank * c;
    const auto values = [&](int64_t k, float (&x)[kMaxLoraRank]) {
      for (int64_t j = 0; j < rank; ++j)
        x[j] = to_float(p.rank_first ? from[j * c + k] : from[k * rank + j]);
    };
    float x[kMaxLoraRank], top = 0.0f;
    for (int64_t k = first; k < end; ++k) {
      values(k, x);
      top = amax(x, rank, top);
    }
    const TileScale scale = lora_scale(top, E4M3::kMax, p.rule.kind, p.rule.eps);
    p.w2.scale_inv.as<float>()[task] = scale.scale_inv;
    for (int64_t k = first; k < end; ++k) {
      values(k, x);
      parts.encode<E4M3>(x, rank, scale, p.rule.kind,
                         p.w2.data.as<uint8_t>() + (e * c + k) * depth);
    }
  }
}

}  // namespace fp8moe::cpu
