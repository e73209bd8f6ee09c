#include "common/check.h"
#include "core/backends.h"

namespace fp8moe {

void permute_pad_backward(const Tensor& dy, const RoutingPlan& plan, const Tensor& permuted_dprobs,
                          const Tensor& dx, const Tensor& dprobs, Stream stream) {
  const Checker check("permute_pad_backward", plan.slab.device);
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
  FP8MOE_CHECK(permuted_dprobs.defined() == dprobs.defined(),
               "[permute_pad_backward] permuted_dprobs and dprobs are given together; got only ",
               dprobs.defined() ? "dprobs" : "permuted_dprobs");
  if (dprobs.defined()) {
    check.tensor(permuted_dprobs, "permuted_dprobs", {plan.rows()});
    check.dtype(permuted_dprobs, "permuted_dprobs", {DType::f32});
    check.tensor(dprobs, "dprobs", {plan.tokens, plan.slots});
    check.dtype(dprobs, "dprobs", {DType::f32});
  }
  check.disjoint({{dx, "dx"}, {dprobs, "dprobs"}},
                 {{dy, "dy"}, {permuted_dprobs, "permuted_dprobs"}, {plan.slab, "plan"}});
  if (plan.tokens == 0) return;
  FP8MOE_DISPATCH("permute_pad_backward", plan.slab.device,
                  permute_pad_backward(dy, plan, permuted_dprobs, dx, dprobs, stream));
}

}  // namespace fp8moe
