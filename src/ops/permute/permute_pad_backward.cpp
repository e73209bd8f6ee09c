#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void permute_pad_backward(const Tensor& dy, const RoutingPlan& plan, const Tensor& row_dprobs,
                          const Tensor& dx, const Tensor& dprobs, Stream stream) {
  const Checker check("permute_pad_backward", plan.buffer.device);
  check.plan(plan);
  check.ndim(dy, "dy", 2);
  const int64_t c = dy.shape[1];
  check.tensor(dy, "dy", {plan.rows(), c});
  check.dtype(dy, "dy", {DType::f32, DType::f16, DType::bf16});
  check.multiple(c, "dy.shape[1]", 16);
  check.tensor(dx, "dx", {plan.tokens, c});
  check.dtype(dx, "dx", {dy.dtype});
  check.aligned(dy, "dy");
  check.aligned(dx, "dx");
  FP8MOE_CHECK(row_dprobs.defined() == dprobs.defined(),
               "[permute_pad_backward] row_dprobs and dprobs are given together; got only ",
               dprobs.defined() ? "dprobs" : "row_dprobs");
  if (dprobs.defined()) {
    check.tensor(row_dprobs, "row_dprobs", {plan.rows()});
    check.dtype(row_dprobs, "row_dprobs", {DType::f32});
    check.tensor(dprobs, "dprobs", {plan.tokens, plan.slots});
    check.dtype(dprobs, "dprobs", {DType::f32});
  }
  check.disjoint({{dx, "dx"}, {dprobs, "dprobs"}},
                 {{dy, "dy"}, {row_dprobs, "row_dprobs"}, {plan.buffer, "plan"}});
  if (plan.tokens == 0) return;
  FP8MOE_DISPATCH("permute_pad_backward", plan.buffer.device,
                  permute_pad_backward(dy, plan, row_dprobs, dx, dprobs, stream));
}

}  // namespace fp8moe
