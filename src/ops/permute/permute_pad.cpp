#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

namespace {

// x [T, C] -> y [R, C] of one dtype; probs [T, S] -> row_probs [R].
void check_movement(const Checker& check, const Tensor& x, const RoutingPlan& plan,
                    const Tensor& probs, const Tensor& y, const Tensor& row_probs,
                    bool zero_unweighted) {
  check.plan(plan);
  check.ndim(x, "x", 2);
  const int64_t c = x.shape[1];
  check.multiple(c, "x.shape[1]", 16);
  check.tensor(y, "y", {plan.rows(), c});
  check.dtype(y, "y", {x.dtype});
  check.aligned(x, "x");
  check.aligned(y, "y");
  FP8MOE_CHECK(probs.defined() == row_probs.defined(),
               "[permute_pad] probs and row_probs are given together; got only ",
               probs.defined() ? "probs" : "row_probs");
  FP8MOE_CHECK(probs.defined() || !zero_unweighted,
               "[permute_pad] zero_unweighted needs probs; got none");
  if (probs.defined()) {
    check.tensor(probs, "probs", {plan.tokens, plan.slots});
    check.dtype(probs, "probs", {DType::f32});
    check.tensor(row_probs, "row_probs", {plan.rows()});
    check.dtype(row_probs, "row_probs", {DType::f32});
  }
}

}  // namespace

void permute_pad(const Tensor& x, const RoutingPlan& plan, const Tensor& probs, const Tensor& y,
                 const Tensor& row_probs, bool zero_unweighted, Stream stream) {
  const Checker check("permute_pad", plan.buffer.device);
  check.dtype(x, "x", {DType::f32, DType::f16, DType::bf16});
  check_movement(check, x, plan, probs, y, row_probs, zero_unweighted);
  check.tensor(x, "x", {plan.tokens, x.shape[1]});
  check.disjoint({{y, "y"}, {row_probs, "row_probs"}},
                 {{x, "x"}, {probs, "probs"}, {plan.buffer, "plan"}});
  if (plan.rows() == 0) return;
  FP8MOE_DISPATCH("permute_pad", plan.buffer.device,
                  permute_pad({.data = x, .scale_inv = {}}, plan, probs,
                              {.data = y, .scale_inv = {}}, row_probs, zero_unweighted, stream));
}

void permute_pad(const Fp8Tensor& x, const RoutingPlan& plan, const Tensor& probs,
                 const Fp8Tensor& y, const Tensor& row_probs, bool zero_unweighted, Stream stream) {
  const Checker check("permute_pad", plan.buffer.device);
  check.dtype(x.data, "x", {DType::e4m3, DType::e5m2});
  check_movement(check, x.data, plan, probs, y.data, row_probs, zero_unweighted);
  const int64_t c = x.data.shape[1];
  check.strided_fp8(x, "x", {plan.tokens, c}, {ScaleLayout::row, ScaleLayout::gemm});
  check.fp8(y, "y", {plan.rows(), c}, {ScaleLayout::row, ScaleLayout::gemm});
  check.disjoint({{y, "y"}, {row_probs, "row_probs"}},
                 {{x, "x"}, {probs, "probs"}, {plan.buffer, "plan"}});
  if (plan.rows() == 0) return;
  FP8MOE_DISPATCH("permute_pad", plan.buffer.device,
                  permute_pad(x, plan, probs, y, row_probs, zero_unweighted, stream));
}

}  // namespace fp8moe
