// grouped_gemm and grouped_gemm_wgrad against double, on ragged rows, empty experts and odd blocks.
#include "check.h"

using namespace fp8moe;
using namespace fp8moe::test;

namespace {

// f32 sums of at most 128 exact products, then one rounding each of scale, product and sum a block.
constexpr double kSumError = 0x1p-17;
constexpr double kBf16 = 0x1p-8;

void fprop(const std::vector<int>& counts, int64_t spare, int64_t align, int64_t n, int64_t k,
           DType a_format, DType out) {
  Random random(7);
  int64_t total = 0;
  for (int count : counts) total += count;
  const int64_t experts = static_cast<int64_t>(counts.size());
  const OwnedPlan plan = from_counts(counts, total + spare, align);
  const OwnedFp8 a(a_format, plan->rows(), k, ScaleLayout::gemm);
  const OwnedFp8 w(DType::e4m3, experts, n, k);
  fill_random(a, random);
  fill_random(w, random);
  const Owned d(out, {plan->rows(), n});
  grouped_gemm({.a = a, .w = w, .plan = plan, .d = d});

  const int32_t* offsets = plan->row_offsets();
  for (int64_t e = 0; e < experts; ++e)
    for (int64_t row = offsets[e]; row < offsets[e + 1]; ++row)
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0.0, magnitude = 0.0;
        for (int64_t p = 0; p < k; ++p) {
          const double term = a.at(row, p) * w.at(j, p, e);
          sum += term;
          magnitude += std::fabs(term);
        }
        const double rounding = out == DType::bf16 ? kBf16 * std::fabs(sum) : 0.0;
        CHECK(std::fabs(d.at(row * n + j) - sum) <= rounding + kSumError * magnitude);
      }
  // Rows past the last expert's are not touched.
  const int64_t bytes = n * size_of(out);
  for (int64_t i = offsets[experts] * bytes; i < plan->rows() * bytes; ++i)
    CHECK(d.as<uint8_t>()[i] == 0xA5);
  const Owned again(out, {plan->rows(), n});
  grouped_gemm({.a = a, .w = w, .plan = plan, .d = again});
  CHECK(d.same(again));
}

void wgrad(const std::vector<int>& counts, int64_t n, int64_t k, ScaleLayout layout, DType out,
           bool accumulate) {
  Random random(8);
  int64_t total = 0;
  for (int count : counts) total += count;
  const int64_t experts = static_cast<int64_t>(counts.size());
  const OwnedPlan plan = from_counts(counts, total, 1);
  const OwnedFp8 dy(DType::e5m2, n, plan->columns(), layout);
  const OwnedFp8 x(DType::e4m3, k, plan->columns(), layout);
  for (const OwnedFp8* q : {&dy, &x}) {
    fill_random(*q, random);
    for (int64_t e = 0; e < experts; ++e)
      for (int64_t i = 0; i < q->rows(); ++i)
        for (int64_t t = plan->col_offsets()[e] + counts[e]; t < plan->col_offsets()[e + 1]; ++t)
          q->data.as<uint8_t>()[i * q->depth() + t] = 0;
  }
  const Owned dw(out, {experts, n, k});
  const Owned before(out, {experts, n, k});
  fill_normal(before, random);
  std::memcpy(dw.as<uint8_t>(), before.as<uint8_t>(), dw.size());
  run_with_workspace(grouped_gemm_wgrad, {dy, x, plan, dw, accumulate});

  for (int64_t e = 0; e < experts; ++e)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < k; ++j) {
        const int64_t at = (e * n + i) * k + j;
        if (counts[e] == 0) {
          CHECK(dw.at(at) == (accumulate ? before.at(at) : 0.0));
          continue;
        }
        double sum = 0.0, magnitude = 0.0;
        for (int64_t t = plan->col_offsets()[e]; t < plan->col_offsets()[e] + counts[e]; ++t) {
          const double term = dy.at(i, t) * x.at(j, t);
          sum += term;
          magnitude += std::fabs(term);
        }
        const double c = accumulate ? before.at(at) : 0.0;
        // Two roundings under accumulate: of the sum, and of sum + c.
        const double unit = out == DType::bf16 ? kBf16 : 0x1p-23;
        const double rounding = unit * (std::fabs(sum) + std::fabs(sum + c));
        CHECK(std::fabs(dw.at(at) - (sum + c)) <= rounding + kSumError * magnitude);
      }
}

void special_values() {
  const OwnedPlan plan = from_counts({3}, 3, 1);
  const OwnedFp8 a(DType::e5m2, 3, 32, ScaleLayout::gemm);
  const OwnedFp8 w(DType::e4m3, 1, 16, 32);
  std::memset(a.data.as<uint8_t>(), 0x3C, a.data.size());  // 1
  std::memset(w.data.as<uint8_t>(), 0x38, w.data.size());  // 1
  for (int64_t i = 0; i < a.scale.view.numel(); ++i) a.scale.as<float>()[i] = 1.0f;
  w.scale.as<float>()[0] = 1.0f;
  a.data.as<uint8_t>()[5] = 0xFC;           // row 0: -Inf
  w.data.as<uint8_t>()[3 * 32 + 7] = 0x7F;  // column 3: NaN
  w.data.as<uint8_t>()[4 * 32 + 5] = 0x00;  // column 4 meets row 0's Inf with 0
  const Owned d(DType::bf16, {3, 16});
  grouped_gemm({.a = a, .w = w, .plan = plan, .d = d});
  for (int row = 0; row < 3; ++row)
    for (int j = 0; j < 16; ++j) {
      const double value = d.at(row * 16 + j);
      if (j == 3 || (row == 0 && j == 4)) {
        CHECK(std::isnan(value));
      } else if (row == 0) {
        CHECK(value == -INFINITY);
      } else {
        CHECK(value == (j == 4 ? 31.0 : 32.0));
      }
    }
}

void bad_arguments() {
  const OwnedPlan plan = from_counts({3, 2}, 5, 1);
  const OwnedFp8 a(DType::e4m3, 5, 32, ScaleLayout::gemm);
  const OwnedFp8 w(DType::e4m3, 2, 48, 32);
  const Owned d(DType::bf16, {5, 48});
  const OwnedFp8 row_scales(DType::e4m3, 5, 32, ScaleLayout::row);
  CHECK_INVALID("[grouped_gemm] a must have scale layout gemm",
                grouped_gemm({.a = row_scales, .w = w, .plan = plan, .d = d}));
  CHECK_INVALID(
      "[grouped_gemm] w must be float8_e4m3fn, as every weight and activation; got float8_e5m2",
      grouped_gemm({.a = a, .w = OwnedFp8(DType::e5m2, 2, 48, 32), .plan = plan, .d = d}));
  CHECK_INVALID("[grouped_gemm] d is required", grouped_gemm({.a = a, .w = w, .plan = plan}));
  CHECK_INVALID(
      "null pointer",
      grouped_gemm({.a = a, .w = w, .plan = plan, .d = Tensor(nullptr, DType::bf16, {5, 48})}));
  for (size_t i = 0; i < d.size(); ++i) CHECK(d.as<uint8_t>()[i] == 0xA5);

  const OwnedFp8 dy(DType::e4m3, 48, plan->columns(), ScaleLayout::block);
  const OwnedFp8 x(DType::e4m3, 32, plan->columns(), ScaleLayout::gemm);
  CHECK_INVALID("[grouped_gemm_wgrad] dy_t and x_t must have one scale layout; got block and gemm",
                grouped_gemm_wgrad(
                    {.dy_t = dy, .x_t = x, .plan = plan, .dw = Owned(DType::f32, {2, 48, 32})}));
  const OwnedFp8 gradient(DType::e5m2, 32, plan->columns(), ScaleLayout::block);
  CHECK_INVALID(
      "[grouped_gemm_wgrad] x_t must be float8_e4m3fn",
      grouped_gemm_wgrad(
          {.dy_t = dy, .x_t = gradient, .plan = plan, .dw = Owned(DType::f32, {2, 48, 32})}));
  const OwnedFp8 block(DType::e4m3, 32, plan->columns(), ScaleLayout::block);
  const Owned dw(DType::f32, {2, 48, 32});
  check_needs_workspace(grouped_gemm_wgrad, {dy, block, plan, dw});
}

}  // namespace

int main() {
  for (DType out : {DType::bf16, DType::f32}) {
    fprop({5, 0, 130, 1}, 0, 1, 144, 272, DType::e4m3, out);
    fprop({17, 3}, 40, 16, 16, 128, DType::e5m2, out);
    fprop({0, 0, 300}, 9, 128, 272, 16, DType::e4m3, out);
    fprop({0, 0}, 4, 1, 32, 32, DType::e4m3, out);
    fprop({0}, 0, 1, 32, 32, DType::e4m3, out);  // no tokens at all
    for (ScaleLayout layout : {ScaleLayout::block, ScaleLayout::gemm})
      for (bool accumulate : {false, true}) {
        wgrad({5, 0, 130, 1}, 144, 272, layout, out, accumulate);
        wgrad({128}, 16, 32, layout, out, accumulate);
        wgrad({0, 0}, 16, 32, layout, out, accumulate);
      }
  }
  special_values();
  bad_arguments();
}
