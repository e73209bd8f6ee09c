// act_quantize and its backward against the formula in double: every value within one code.
#include <limits>
#include <optional>

#include "check.h"

using namespace fp8moe;
using namespace fp8moe::test;

namespace {

// An E4M3 code's spacing is at most 2^-3 of its value, 2^-9 scale for subnormals.
void expect_close(double value, double expected, double scale) {
  CHECK(std::fabs(value - expected) <= 0x1p-3 * std::fabs(expected) + 0x1p-9 * scale);
}

struct Element {
  double h, dgate, dup, dprob;
};

constexpr float kNoLimit = std::numeric_limits<float>::infinity();

Element reference(double gate, double up, double prob, double dh, float limit) {
  const bool gate_open = gate <= limit, up_open = std::fabs(up) <= limit;
  if (!gate_open) gate = limit;
  if (!up_open) up = up > 0 ? limit : -limit;
  const double sigmoid = 1.0 / (1.0 + std::exp(-gate));
  const double silu = gate * sigmoid;
  return {silu * up * prob,
          gate_open ? dh * prob * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)) : 0.0,
          up_open ? dh * prob * silu : 0.0, silu * up * dh};
}

void swiglu(const std::optional<std::vector<int>>& counts, int64_t rows, int64_t inner,
            int64_t align, DType dtype, float limit, bool weighted, ScaleLayout columns) {
  Random random(31);
  OwnedPlan plan;
  if (counts) plan = from_counts(*counts, rows, align);
  const int64_t r = counts ? plan->rows() : rows;
  const Owned z(dtype, {r, 2 * inner}), dh(dtype, {r, inner}), probs(DType::f32, {r});
  fill_normal(z, random);
  fill_normal(dh, random);
  fill_normal(probs, random);
  const Tensor given = weighted ? probs.view : Tensor{};
  const ScaleRule rule;

  const int64_t kcap = counts ? plan->columns() : 0;
  const OwnedFp8 h(DType::e4m3, r, inner, ScaleLayout::gemm),
      z_q(DType::e4m3, r, 2 * inner, ScaleLayout::row);
  const OwnedFp8 h_t(DType::e4m3, inner, kcap, columns),
      dz_t(DType::e4m3, 2 * inner, kcap, columns);
  const OwnedFp8 dz(DType::e4m3, r, 2 * inner, ScaleLayout::gemm);
  const Owned dprobs(DType::f32, {r});
  const auto optional = [&](const OwnedFp8& q) { return counts ? Fp8Tensor(q) : Fp8Tensor{}; };
  act_quantize({.z = z,
                .plan = plan,
                .probs = given,
                .activation = {.limit = limit},
                .h = h,
                .z_q = z_q,
                .rule = rule});
  const ActQuantizeBackward backward = {.dh = dh,
                                        .z = z,
                                        .plan = plan,
                                        .probs = given,
                                        .activation = {.limit = limit},
                                        .dz = dz,
                                        .dprobs = weighted ? dprobs.view : Tensor{},
                                        .dz_columns = optional(dz_t),
                                        .h_columns = optional(h_t),
                                        .rule = rule};
  run_with_workspace(act_quantize_backward, backward);

  const std::vector<int> one = {static_cast<int>(r)};
  const std::vector<int>& groups = counts ? *counts : one;
  for (size_t e = 0; e < groups.size(); ++e)
    for (int64_t t = 0; t < groups[e]; ++t) {
      const int64_t row = (counts ? plan->row_offsets()[e] : 0) + t;
      double dprob = 0.0, magnitude = 0.0;
      for (int64_t j = 0; j < inner; ++j) {
        const double gate = z.at(row * 2 * inner + j), up = z.at(row * 2 * inner + inner + j);
        const Element x =
            reference(gate, up, weighted ? probs.at(row) : 1.0, dh.at(row * inner + j), limit);
        expect_close(h.at(row, j), x.h, h.scale_at(row, j));
        expect_close(z_q.at(row, j), gate, z_q.scale_at(row, j));
        expect_close(z_q.at(row, inner + j), up, z_q.scale_at(row, inner + j));
        expect_close(dz.at(row, j), x.dgate, dz.scale_at(row, j));
        expect_close(dz.at(row, inner + j), x.dup, dz.scale_at(row, inner + j));
        dprob += x.dprob;
        magnitude += std::fabs(x.dprob);
        if (!counts) continue;
        const int64_t column = plan->col_offsets()[e] + t;
        expect_close(h_t.at(j, column), x.h, h_t.scale_at(j, column));
        expect_close(dz_t.at(j, column), x.dgate, dz_t.scale_at(j, column));
        expect_close(dz_t.at(inner + j, column), x.dup, dz_t.scale_at(inner + j, column));
      }
      if (weighted) CHECK(std::fabs(dprobs.at(row) - dprob) <= 0x1p-17 * magnitude);
    }
}

void bad_arguments() {
  const Owned z(DType::bf16, {3, 64}), dh(DType::bf16, {3, 32});
  const OwnedFp8 h(DType::e4m3, 3, 32, ScaleLayout::gemm),
      dz(DType::e4m3, 3, 64, ScaleLayout::gemm);
  const OwnedFp8 h_t(DType::e4m3, 32, 128, ScaleLayout::block);
  const OwnedPlan plan = from_counts({3}, 3, 1);
  const std::vector<uint8_t> before = h.data.copy();
  const ScaleRule rule;
  CHECK_INVALID("[act_quantize]", act_quantize({.z = z, .rule = rule}));
  const OwnedFp8 e5m2(DType::e5m2, 3, 32, ScaleLayout::gemm);
  CHECK_INVALID("[act_quantize] h must be float8_e4m3fn",
                act_quantize({.z = z, .h = e5m2, .rule = rule}));
  CHECK_INVALID(
      "[act_quantize] z_q must be float8_e4m3fn",
      act_quantize(
          {.z = z, .h = h, .z_q = OwnedFp8(DType::e5m2, 3, 64, ScaleLayout::row), .rule = rule}));
  CHECK_INVALID(
      "[act_quantize_backward] dz_columns must be",
      act_quantize_backward({.dh = dh,
                             .z = z,
                             .plan = plan,
                             .dz = dz,
                             .dz_columns = OwnedFp8(DType::e5m2, 64, 128, ScaleLayout::block),
                             .rule = rule}));
  CHECK_INVALID(
      "[act_quantize_backward] dz_columns and h_columns must have one scale layout",
      act_quantize_backward({.dh = dh,
                             .z = z,
                             .plan = plan,
                             .dz = dz,
                             .dz_columns = OwnedFp8(DType::e4m3, 64, 128, ScaleLayout::gemm),
                             .h_columns = h_t,
                             .rule = rule}));
  CHECK(h.data.copy() == before);
}

void workspaces() {
  const Owned z(DType::bf16, {3, 64}), dh(DType::bf16, {3, 32}), probs(DType::f32, {3}),
      dprobs(DType::f32, {3});
  const OwnedFp8 dz(DType::e4m3, 3, 64, ScaleLayout::gemm),
      h_t(DType::e4m3, 32, 128, ScaleLayout::block);
  const OwnedPlan plan = from_counts({3}, 3, 1);
  ActQuantizeBackward p = {
      .dh = dh, .z = z, .plan = plan, .probs = probs, .dz = dz, .dprobs = dprobs, .h_columns = h_t};
  check_needs_workspace(act_quantize_backward, p);
  p.dh.device = {DeviceType::cuda, 0};
  CHECK(workspace_bytes(p) > 0);
  p.dprobs = {};
  CHECK(workspace_bytes(p) == 0);
  p.dprobs = dprobs, p.h_columns = {};
  CHECK(workspace_bytes(p) == 0);
}

}  // namespace

int main() {
  const std::vector<int> counts = {5, 0, 130, 1};
  for (ScaleLayout columns : {ScaleLayout::block, ScaleLayout::gemm}) {
    swiglu(counts, 140, 144, 1, DType::bf16, kNoLimit, true, columns);
    swiglu(counts, 140, 128, 16, DType::f32, 0.7f, true, columns);
    swiglu({{0, 0}}, 0, 32, 1, DType::bf16, kNoLimit, true, columns);
    swiglu({{0, 40}}, 40, 272, 128, DType::f16, kNoLimit, false, columns);
  }
  swiglu(std::nullopt, 7, 48, 1, DType::bf16, kNoLimit, true, ScaleLayout::block);
  swiglu(std::nullopt, 0, 48, 1, DType::bf16, kNoLimit, false, ScaleLayout::block);
  bad_arguments();
  workspaces();
}
