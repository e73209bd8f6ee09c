// Routes tokens to experts, quantizes tokens and weights to FP8, runs the grouped GEMM on the CPU
// and checks it against a naive loop over the original f32 values.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "fp8moe/ops.h"

using namespace fp8moe;

namespace {

constexpr int64_t kTokens = 100, kSlots = 2, kExperts = 4, kN = 192, kK = 320;

template <typename T>
Tensor view(std::vector<T>& memory, DType dtype, std::initializer_list<int64_t> shape) {
  Tensor t(nullptr, dtype, shape);
  memory.resize(static_cast<size_t>(t.numel()));
  t.data = memory.data();
  return t;
}

// An FP8 matrix and its scales, allocated to fit.
struct Fp8Matrix {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  Fp8Tensor tensor;
};

}  // namespace

int main() {
  std::mt19937 random(0);
  std::normal_distribution<float> normal;

  // What a router gives: kSlots distinct experts a token.
  std::vector<int32_t> topk;
  const Tensor topk_idx = view(topk, DType::i32, {kTokens, kSlots});
  for (int64_t t = 0; t < kTokens; ++t) {
    const int32_t first = static_cast<int32_t>(random() % kExperts);
    topk[t * kSlots] = first;
    topk[t * kSlots + 1] = static_cast<int32_t>((first + 1 + random() % (kExperts - 1)) % kExperts);
  }

  // The plan: where each (token, slot) lands once rows are grouped by expert.
  RoutingPlan plan;
  plan.tokens = kTokens;
  plan.slots = kSlots;
  plan.experts = kExperts;
  plan.capacity = kTokens * kSlots;
  std::vector<int32_t> buffer;
  plan.buffer = view(buffer, DType::i32, {plan.buffer_size()});
  std::vector<uint8_t> scratch;
  route({.topk_idx = topk_idx,
         .plan = plan,
         .workspace = view(scratch, DType::u8, {workspace_bytes(Route{.plan = plan})})});

  // x -> FP8 in 1x128 tiles -> grouped by expert, scales in the layout the GEMM reads.
  std::vector<float> x, w, d;
  const Tensor xt = view(x, DType::f32, {kTokens, kK});
  const Tensor wt = view(w, DType::f32, {kExperts, kN, kK});
  for (float& value : x) value = normal(random);
  for (float& value : w) value = normal(random) / std::sqrt(static_cast<float>(kK));
  const int64_t blocks = cdiv(kK, kTile);
  Fp8Matrix xq, aq, wq;
  xq.tensor = {view(xq.codes, DType::e4m3, {kTokens, kK}),
               view(xq.scales, DType::f32, {kTokens, blocks}), ScaleLayout::row};
  aq.tensor = {view(aq.codes, DType::e4m3, {plan.rows(), kK}),
               view(aq.scales, DType::f32, {blocks, pad4(plan.rows())}), ScaleLayout::gemm};
  wq.tensor = {view(wq.codes, DType::e4m3, {kExperts, kN, kK}),
               view(wq.scales, DType::f32, {kExperts, cdiv(kN, kTile), blocks}),
               ScaleLayout::block};
  quantize({.x = xt, .q = xq.tensor});
  permute_pad({.x = xq.tensor, .plan = plan, .y = aq.tensor});
  quantize_weight({.w = wt, .q = wq.tensor});

  const Tensor dt = view(d, DType::f32, {plan.rows(), kN});
  grouped_gemm({.a = aq.tensor, .w = wq.tensor, .plan = plan, .d = dt});

  // d[row_of[t, s]] should be x[t] w[expert]^T, up to the rounding of FP8's 3 mantissa bits.
  double error = 0.0, norm = 0.0;
  for (int64_t i = 0; i < kTokens * kSlots; ++i)
    for (int64_t n = 0; n < kN; ++n) {
      double sum = 0.0;
      for (int64_t k = 0; k < kK; ++k)
        sum += static_cast<double>(x[i / kSlots * kK + k]) * w[(topk[i] * kN + n) * kK + k];
      const double difference = d[plan.row_of()[i] * kN + n] - sum;
      error += difference * difference;
      norm += sum * sum;
    }
  const double relative = std::sqrt(error / norm);
  std::printf("fp8moe %s (%s): relative error %.4f\n", build_info().version, build_info().cpu_isa,
              relative);
  return relative < 0.05 ? 0 : 1;
}
