// quantize, quantize_weight, turn_weight, dequantize, count_codes: what they take.
#include "common/backends.h"
#include "common/check.h"

namespace fp8moe {

void outputs(Quantize& p) {
  const Checker check("quantize", p.x.device);
  check.ndim(p.x, "x", 2);
  check.tensor(p.x, "x", {p.x.shape[0], p.x.shape[1]}, {DType::f32, DType::f16, DType::bf16});
  check.multiple(p.x.shape[1], "x.shape[1]", 16);
  check.output(p.q, "q", {p.x.shape[0], p.x.shape[1]}, {ScaleLayout::row, ScaleLayout::gemm});
  check.aligned(p.x, "x");
  check.rule(p.rule);
}

void quantize(const Quantize& given, Stream stream) {
  const Quantize p = checked(given);
  const Checker check("quantize", p.x.device);
  check.disjoint({{p.q, "q"}}, {{p.x, "x"}});
  if (p.x.numel() == 0) return;
  dispatch(p, p.x.device, stream);
}

void outputs(QuantizeWeight& p) {
  const Checker check("quantize_weight", p.w.device);
  check.ndim(p.w, "w", 3);
  const int64_t experts = p.w.shape[0];
  const int64_t k = p.w.shape[2];
  check.tensor(p.w, "w", {experts, p.w.shape[1], k}, {DType::f32, DType::f16, DType::bf16});
  check.multiple(p.w.shape[1], "w.shape[1]", p.below.defined() ? 128 : 16);
  check.multiple(k, "w.shape[2]", 16);
  if (p.below.defined()) {
    check.ndim(p.below, "below", 3);
    check.tensor(p.below, "below", {experts, p.below.shape[1], k});
    FP8MOE_CHECK(p.below.dtype == p.w.dtype, "[quantize_weight] below must have w's dtype ",
                 name_of(p.w.dtype), "; got ", name_of(p.below.dtype));
    check.multiple(p.below.shape[1], "below.shape[1]", 16);
    check.aligned(p.below, "below");
  }
  const int64_t n = p.rows();
  const bool rows = p.q.defined() || p.q.is_wanted();
  const bool transposed = p.q_t.defined() || p.q_t.is_wanted();
  FP8MOE_CHECK(rows || transposed, "[quantize_weight] q or q_t is required; got neither");
  if (rows) check.output(p.q, "q", {experts, n, k}, {ScaleLayout::block}, {DType::e4m3});
  if (transposed) check.output(p.q_t, "q_t", {experts, k, n}, {ScaleLayout::block}, {DType::e4m3});
  check.aligned(p.w, "w");
  check.rule(p.rule);
}

void quantize_weight(const QuantizeWeight& given, Stream stream) {
  const QuantizeWeight p = checked(given);
  const Checker check("quantize_weight", p.w.device);
  check.disjoint({{p.q, "q"}, {p.q_t, "q_t"}}, {{p.w, "w"}, {p.below, "below"}});
  if (p.w.shape[0] * p.rows() * p.w.shape[2] == 0) return;
  dispatch(p, p.w.device, stream);
}

void outputs(TurnWeight& p) {
  const Checker check("turn_weight", p.q.data.device);
  check.ndim(p.q.data, "q", 3);
  const int64_t experts = p.q.data.shape[0];
  const int64_t n = p.q.data.shape[1];
  const int64_t k = p.q.data.shape[2];
  check.fp8(p.q, "q", {experts, n, k}, {ScaleLayout::block});
  check.e4m3(p.q, "q");
  check.multiple(n, "q.shape[1]", 16);
  check.multiple(k, "q.shape[2]", 16);
  check.output(p.q_t, "q_t", {experts, k, n}, {ScaleLayout::block}, {DType::e4m3});
}

void turn_weight(const TurnWeight& given, Stream stream) {
  const TurnWeight p = checked(given);
  const Checker check("turn_weight", p.q.data.device);
  check.disjoint({{p.q_t, "q_t"}}, {{p.q, "q"}});
  if (p.q.data.numel() == 0) return;
  dispatch(p, p.q.data.device, stream);
}

void outputs(Dequantize& p) {
  const Checker check("dequantize", p.q.data.device);
  const int ndim = p.q.data.ndim;
  FP8MOE_CHECK(ndim == 2 || ndim == 3, "[dequantize] q must have 2 or 3 dimensions; got ",
               shape_of(p.q.data));
  const auto& n = p.q.data.shape;
  if (ndim == 3) {
    check.fp8(p.q, "q", {n[0], n[1], n[2]}, {ScaleLayout::block});
    check.output(p.x, "x", {n[0], n[1], n[2]}, {DType::f32, DType::f16, DType::bf16}, true);
  } else {
    check.fp8(p.q, "q", {n[0], n[1]}, {ScaleLayout::row, ScaleLayout::gemm, ScaleLayout::block});
    check.output(p.x, "x", {n[0], n[1]}, {DType::f32, DType::f16, DType::bf16}, true);
  }
  check.multiple(n[ndim - 1], "q.shape[-1]", 16);
}

void dequantize(const Dequantize& given, Stream stream) {
  const Dequantize p = checked(given);
  const Checker check("dequantize", p.q.data.device);
  check.disjoint({{p.x, "x"}}, {{p.q, "q"}});
  if (p.x.numel() == 0) return;
  dispatch(p, p.x.device, stream);
}

void outputs(CountCodes& p) {
  const Checker check("count_codes", p.q.data.device);
  check.plan(p.plan);
  check.ndim(p.q.data, "q", 2);
  const int64_t c = p.q.data.shape[1];
  if (p.q.layout == ScaleLayout::gemm)
    check.fp8(p.q, "q", {p.plan.rows(), c}, {ScaleLayout::gemm});
  else
    check.strided_fp8(p.q, "q", {p.plan.tokens, c}, {ScaleLayout::row});
  check.multiple(c, "q.shape[1]", 16);
  if (p.columns.defined()) {
    FP8MOE_CHECK(p.q.layout == ScaleLayout::row,
                 "[count_codes] q must have scale layout row where columns are given; got ",
                 name_of(p.q.layout));
    check.columns(p.columns, "columns", c, p.plan);
    check.dtype(p.columns.data, "columns (the format of q)", {p.q.data.dtype});
  }
  FP8MOE_CHECK(p.stride >= 1, "[count_codes] stride must be at least 1; got ", p.stride);
  check.output(p.counts, "counts", {kCodeCounts}, {DType::i64});
}

void count_codes(const CountCodes& given, Stream stream) {
  const CountCodes p = checked(given);
  const Checker check("count_codes", p.q.data.device);
  check.disjoint({{p.counts, "counts"}},
                 {{p.q, "q"}, {p.columns, "columns"}, {p.plan.buffer, "plan"}});
  if (p.q.data.numel() == 0) return;
  dispatch(p, p.q.data.device, stream);
}

}  // namespace fp8moe
