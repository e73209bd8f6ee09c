// quantize, quantize_weight, dequantize: every code is a nearest one under its
// scale, every scale follows from its tile's largest magnitude.
#include "check.h"

using namespace fp8moe;
using namespace fp8moe::test;

namespace {

double format_max(DType format) { return format == DType::e4m3 ? 448.0 : 57344.0; }

// The scale of a tile whose largest magnitude is amax.
void expect_scale(double scale_inv, double amax, DType format, ScaleRule rule) {
  amax = std::max(amax, static_cast<double>(rule.eps));
  if (amax == 0.0) {
    CHECK(scale_inv == 1.0);
    return;
  }
  const double tight = amax / format_max(format);
  if (rule.kind == ScaleKind::pow2) {
    int exponent;
    CHECK(std::frexp(scale_inv, &exponent) == 0.5);
    CHECK(scale_inv >= tight && scale_inv / 2 < tight);
  } else if (rule.kind == ScaleKind::amax) {
    CHECK(scale_inv == static_cast<float>(amax) / static_cast<float>(format_max(format)));
  } else {
    CHECK(std::fabs(scale_inv - tight) <= tight * 0x1p-22);
  }
}

// q (tiles of `tile_rows` x 128) against value(i, j) over rows x depth.
template <typename Value>
void expect_quantized(const OwnedFp8& q, int64_t rows, int64_t depth, Value value, ScaleRule rule) {
  const DType format = q.data.view.dtype;
  const int64_t tile_rows = q.layout == ScaleLayout::block ? kTile : 1;
  for (int64_t i0 = 0; i0 < rows; i0 += tile_rows)
    for (int64_t j0 = 0; j0 < depth; j0 += kTile) {
      double amax = 0.0;
      for (int64_t i = i0; i < std::min(i0 + tile_rows, rows); ++i)
        for (int64_t j = j0; j < std::min(j0 + kTile, depth); ++j)
          amax = std::max(amax, std::fabs(value(i, j)));
      const double scale_inv = q.scale_at(i0, j0);
      expect_scale(scale_inv, amax, format, rule);
      // A f32 scale is rounded, x * scale too: the midpoint may move by some 2^-22.
      const double slack = rule.kind == ScaleKind::pow2 ? 0.0 : 0x1p-18;
      for (int64_t i = i0; i < std::min(i0 + tile_rows, rows); ++i)
        for (int64_t j = j0; j < std::min(j0 + kTile, depth); ++j) {
          const double x = value(i, j) / scale_inv;
          const uint8_t code = q.code(i, j);
          CHECK(is_nearest(format, code, x) || is_nearest(format, code, x * (1 + slack)) ||
                is_nearest(format, code, x * (1 - slack)));
        }
    }
}

void rows() {
  Random random(5);
  for (DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (DType format : {DType::e4m3, DType::e5m2})
      for (ScaleLayout layout : {ScaleLayout::row, ScaleLayout::gemm})
        for (auto [m, k] : {std::pair<int64_t, int64_t>{0, 64}, {1, 16}, {130, 144}, {3, 272}}) {
          const Owned x(dtype, {m, k});
          fill_normal(x, random);
          if (m > 1) std::memset(x.as<uint8_t>(), 0, k * size_of(dtype));  // a zero row
          for (ScaleRule rule :
               {ScaleRule{}, ScaleRule{ScaleKind::fp32, 0.0f}, ScaleRule{ScaleKind::amax, 0.0f}}) {
            const OwnedFp8 q(format, m, k, layout);
            quantize({.x = x, .q = q, .rule = rule});
            expect_quantized(q, m, k, [&](int64_t i, int64_t j) { return x.at(i * k + j); }, rule);
            const Owned back(DType::f32, {m, k});
            dequantize({.q = q, .x = back});
            for (int64_t i = 0; i < m * k; ++i)
              CHECK(back.at(i) == static_cast<float>(q.at(i / k, i % k)));
          }
        }
}

void weights() {
  Random random(7);
  const ScaleRule rule;
  for (auto [n, k] : {std::pair<int64_t, int64_t>{272, 144}, {256, 16}}) {
    const Owned w(DType::bf16, {2, n, k});
    fill_normal(w, random);
    const OwnedFp8 q(DType::e4m3, 2, n, k), q_t(DType::e4m3, 2, k, n);
    quantize_weight({.w = w, .q = q, .q_t = q_t, .rule = rule});
    expect_quantized(q, n, k, [&](int64_t i, int64_t j) { return w.at(i * k + j); }, rule);
    for (int64_t e = 0; e < 2; ++e)
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < k; ++j) {
          CHECK(is_nearest(DType::e4m3, q.code(i, j, e),
                           w.at((e * n + i) * k + j) / q.scale_at(i, j, e)));
          CHECK(q.code(i, j, e) == q_t.code(j, i, e));
          CHECK(q.scale_at(i, j, e) == q_t.scale_at(j, i, e));
        }
  }
}

void bad_arguments() {
  const Owned x(DType::bf16, {4, 32});
  const OwnedFp8 q(DType::e4m3, 4, 32, ScaleLayout::row);
  const std::vector<uint8_t> before = q.data.copy();
  const ScaleRule rule;
  Fp8Tensor wrong_scale = q;
  wrong_scale.layout = ScaleLayout::gemm;
  wrong_scale.scale_inv = Owned(DType::f32, {1, 3}).view;
  CHECK_INVALID("[quantize] q.scale_inv must be [1, 4]",
                quantize({.x = x, .q = wrong_scale, .rule = rule}));
  CHECK_INVALID("[quantize]", quantize({.q = q, .rule = rule}));
  CHECK_INVALID("null pointer",
                quantize({.x = Tensor(nullptr, DType::f32, {4, 32}), .q = q, .rule = rule}));
  const Owned w(DType::bf16, {1, 272, 32});
  CHECK_INVALID("[quantize_weight] q must be float8_e4m3fn",
                quantize_weight({.w = w, .q = OwnedFp8(DType::e5m2, 1, 272, 32), .rule = rule}));
  const int64_t rows = int64_t{1} << 31;  // more than a kernel counts; nothing may be touched
  void* const memory = q.data.view.data;
  const Fp8Tensor many{{memory, DType::e4m3, {rows, 16}}, {memory, DType::f32, {rows, 1}}};
  CHECK_INVALID("[dequantize] q must have no size over 2^31 - 256; got 2147483648",
                dequantize({.q = many, .x = Tensor(memory, DType::bf16, {rows, 16})}));
  CHECK(q.data.copy() == before);
}

}  // namespace

int main() {
  rows();
  weights();
  bad_arguments();
}
