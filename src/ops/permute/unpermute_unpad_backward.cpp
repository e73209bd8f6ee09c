#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void unpermute_unpad_backward(const Tensor& dout, const RoutingPlan& plan, const Tensor& y,
                              const Tensor& probs, const Tensor& dy, const Tensor& dprobs,
                              Stream stream) {
  const Checker check("unpermute_unpad_backward", plan.buffer.device);
  check.plan(plan);
  check.ndim(dout, "dout", 2);
  const int64_t c = dout.shape[1];
  check.tensor(dout, "dout", {plan.tokens, c});
  check.dtype(dout, "dout", {DType::f32, DType::f16, DType::bf16});
  check.multiple(c, "dout.shape[1]", 16);
  check.tensor(dy, "dy", {plan.rows(), c});
  check.dtype(dy, "dy", {dout.dtype});
  check.aligned(dout, "dout");
  check.aligned(dy, "dy");
  FP8MOE_CHECK(
      y.defined() == probs.defined() && probs.defined() == dprobs.defined(),
      "[unpermute_unpad_backward] y, probs and dprobs are given together or not at all; got ",
      y.defined() ? "y " : "", probs.defined() ? "probs " : "", dprobs.defined() ? "dprobs" : "");
  if (probs.defined()) {
    check.tensor(y, "y", {plan.rows(), c});
    check.dtype(y, "y", {dout.dtype});
    check.aligned(y, "y");
    check.tensor(probs, "probs", {plan.tokens, plan.slots});
    check.dtype(probs, "probs", {DType::f32});
    check.tensor(dprobs, "dprobs", {plan.tokens, plan.slots});
    check.dtype(dprobs, "dprobs", {DType::f32});
  }
  check.disjoint({{dy, "dy"}, {dprobs, "dprobs"}},
                 {{dout, "dout"}, {y, "y"}, {probs, "probs"}, {plan.buffer, "plan"}});
  if (plan.tokens == 0) return;
  FP8MOE_DISPATCH("unpermute_unpad_backward", plan.buffer.device,
                  unpermute_unpad_backward(dout, plan, y, probs, dy, dprobs, stream));
}

}  // namespace fp8moe
