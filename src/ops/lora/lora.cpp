// lora_project, lora_wgrad, quantize_lora: what they take.
#include "common/backends.h"
#include "common/check.h"

namespace fp8moe {
namespace {

void check_rank(const Checker& check, int64_t rank) {
  FP8MOE_CHECK(rank >= 8 && rank <= kMaxLoraRank && rank % 8 == 0, "[", check.op(),
               "] the rank must be a multiple of 8, 8 to ", kMaxLoraRank, "; got ", rank);
}

// rows [R, C] in gemm layout, or [T, C] in row layout; C.
int64_t check_rows(const Checker& check, const Fp8Tensor& rows, const RoutingPlan& plan) {
  check.ndim(rows.data, "rows", 2);
  const int64_t c = rows.data.shape[1];
  if (rows.layout == ScaleLayout::gemm)
    check.fp8(rows, "rows", {plan.rows(), c}, {ScaleLayout::gemm});
  else
    check.strided_fp8(rows, "rows", {plan.tokens, c}, {ScaleLayout::row, ScaleLayout::gemm});
  check.multiple(c, "rows.shape[1]", 16);
  return c;
}

}  // namespace

void outputs(LoraProject& p) {
  const Checker check("lora_project", p.rows.data.device);
  check.plan(p.plan);
  const int64_t c = check_rows(check, p.rows, p.plan);
  check.ndim(p.factor, "factor", 3);
  const int64_t rank = p.factor.shape[p.rank_first ? 1 : 2], e = p.plan.experts;
  if (p.rank_first)
    check.tensor(p.factor, "factor", {e, rank, c});
  else
    check.tensor(p.factor, "factor", {e, c, rank});
  check.dtype(p.factor, "factor", {DType::bf16});
  check_rank(check, rank);
  check.aligned(p.factor, "factor");
  check.output(p.u, "u", {p.plan.rows(), rank}, {DType::bf16}, true);
  check.output(p.u_q, "u_q", {p.plan.rows(), lora_depth(rank)}, {ScaleLayout::gemm},
               {p.rows.data.dtype});
  check.rule(p.rule);
}

void lora_project(const LoraProject& given, Stream stream) {
  const LoraProject p = checked(given);
  const Checker check("lora_project", p.rows.data.device);
  check.disjoint({{p.u, "u"}, {p.u_q, "u_q"}},
                 {{p.rows, "rows"}, {p.factor, "factor"}, {p.plan.buffer, "plan"}});
  if (p.u.numel() == 0) return;
  dispatch(p, p.rows.data.device, stream);
}

void outputs(LoraWgrad& p) {
  const Checker check("lora_wgrad", p.rows.data.device);
  check.plan(p.plan);
  const int64_t c = check_rows(check, p.rows, p.plan);
  check.ndim(p.u, "u", 2);
  const int64_t rank = p.u.shape[1], e = p.plan.experts;
  check.tensor(p.u, "u", {p.plan.rows(), rank}, {DType::bf16});
  check_rank(check, rank);
  check.aligned(p.u, "u");
  if (p.rank_first)
    check.output(p.dfactor, "dfactor", {e, rank, c}, {DType::f32, DType::bf16}, true);
  else
    check.output(p.dfactor, "dfactor", {e, c, rank}, {DType::f32, DType::bf16}, true);
}

void lora_wgrad(const LoraWgrad& given, Stream stream) {
  const LoraWgrad p = checked(given);
  const Checker check("lora_wgrad", p.rows.data.device);
  check.disjoint({{p.dfactor, "dfactor"}}, {{p.u, "u"}, {p.rows, "rows"}, {p.plan.buffer, "plan"}});
  if (p.dfactor.numel() == 0) return;
  dispatch(p, p.rows.data.device, stream);
}

void outputs(QuantizeLora& p) {
  const Checker check("quantize_lora", p.factor.device);
  check.ndim(p.factor, "factor", 3);
  const int64_t e = p.factor.shape[0], rank = p.factor.shape[p.rank_first ? 1 : 2],
                c = p.factor.shape[p.rank_first ? 2 : 1];
  check.tensor(p.factor, "factor", {e, p.factor.shape[1], p.factor.shape[2]}, {DType::bf16});
  check_rank(check, rank);
  check.multiple(c, p.rank_first ? "factor.shape[2]" : "factor.shape[1]", 16);
  check.aligned(p.factor, "factor");
  check.output(p.w2, "w2", {e, c, lora_depth(rank)}, {ScaleLayout::block}, {DType::e4m3});
  check.rule(p.rule);
}

void quantize_lora(const QuantizeLora& given, Stream stream) {
  const QuantizeLora p = checked(given);
  const Checker check("quantize_lora", p.factor.device);
  check.disjoint({{p.w2, "w2"}}, {{p.factor, "factor"}});
  if (p.w2.data.numel() == 0) return;
  dispatch(p, p.factor.device, stream);
}

}  // namespace fp8moe
