#include "ops/activation/swiglu_check.h"

namespace fp8moe {
namespace {

// An optional transposed operand [c, Kcap]: it needs the plan.
void check_columns(const Checker& check, const Fp8Tensor& columns, const char* name, int64_t c,
                   const RoutingPlan& plan) {
  if (!columns.defined()) return;
  FP8MOE_CHECK(plan.defined(), "[", check.op(), "] ", name, " needs a plan; got none");
  check.columns(columns, name, c, plan);
  check.aligned(columns.data, name);
}

}  // namespace

void act_quantize_backward(const Tensor& dh, const Tensor& z, const RoutingPlan& plan,
                           const Tensor& probs, float limit, const Fp8Tensor& dz,
                           const Tensor& dprobs, const Fp8Tensor& dz_columns,
                           const Fp8Tensor& h_columns, ScaleRule rule, Stream stream) {
  const Checker check("act_quantize_backward", dh.device);
  check.ndim(dh, "dh", 2);
  check.dtype(dh, "dh", {DType::f32, DType::f16, DType::bf16});
  const int64_t rows = dh.shape[0];
  const int64_t inner = dh.shape[1];
  check_swiglu(check, rows, 2 * inner, plan, probs, limit);
  check.tensor(dh, "dh", {rows, inner});
  check.aligned(dh, "dh");
  check.tensor(z, "z", {rows, 2 * inner});
  check.dtype(z, "z", {DType::f32, DType::f16, DType::bf16});
  check.aligned(z, "z");
  check.fp8(dz, "dz", {rows, 2 * inner}, {ScaleLayout::row, ScaleLayout::gemm});
  if (dprobs.defined()) {
    FP8MOE_CHECK(probs.defined(), "[act_quantize_backward] dprobs needs probs; got none");
    check.tensor(dprobs, "dprobs", {rows});
    check.dtype(dprobs, "dprobs", {DType::f32});
  }
  check_columns(check, dz_columns, "dz_columns", 2 * inner, plan);
  check_columns(check, h_columns, "h_columns", inner, plan);
  if (dz_columns.defined())
    check.dtype(dz_columns.data, "dz_columns (the format of dz)", {dz.data.dtype});
  if (h_columns.defined()) check.e4m3(h_columns, "h_columns");
  FP8MOE_CHECK(
      !dz_columns.defined() || !h_columns.defined() || dz_columns.layout == h_columns.layout,
      "[act_quantize_backward] dz_columns and h_columns must have one scale layout; "
      "got ",
      name_of(dz_columns.layout), " and ", name_of(h_columns.layout));
  check.rule(rule);
  check.disjoint(
      {{dz, "dz"}, {dprobs, "dprobs"}, {dz_columns, "dz_columns"}, {h_columns, "h_columns"}},
      {{dh, "dh"}, {z, "z"}, {probs, "probs"}, {plan.buffer, "plan"}});
  if (dh.numel() == 0) return;
  FP8MOE_DISPATCH("act_quantize_backward", dh.device,
                  act_quantize_backward(dh, z, plan, probs, backend_limit(limit), dz, dprobs,
                                        dz_columns, h_columns, rule, stream));
}

}  // namespace fp8moe
