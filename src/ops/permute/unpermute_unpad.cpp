#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void unpermute_unpad(const Tensor& y, const RoutingPlan& plan, const Tensor& probs,
                     const Tensor& out, Stream stream) {
  const Checker check("unpermute_unpad", plan.buffer.device);
  check.plan(plan);
  check.ndim(y, "y", 2);
  const int64_t c = y.shape[1];
  check.tensor(y, "y", {plan.rows(), c});
  check.dtype(y, "y", {DType::f32, DType::f16, DType::bf16});
  check.multiple(c, "y.shape[1]", 16);
  check.tensor(out, "out", {plan.tokens, c});
  check.dtype(out, "out", {y.dtype});
  check.aligned(y, "y");
  check.aligned(out, "out");
  if (probs.defined()) {
    check.tensor(probs, "probs", {plan.tokens, plan.slots});
    check.dtype(probs, "probs", {DType::f32});
  }
  check.disjoint({{out, "out"}}, {{y, "y"}, {probs, "probs"}, {plan.buffer, "plan"}});
  if (plan.tokens == 0) return;
  FP8MOE_DISPATCH("unpermute_unpad", plan.buffer.device,
                  unpermute_unpad(y, plan, probs, out, stream));
}

}  // namespace fp8moe
