#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void unpermute_unpad_backward(const UnpermuteUnpadBackward& p, Stream stream) {
  const Checker check("unpermute_unpad_backward", p.plan.buffer.device);
  check.plan(p.plan);
  check.ndim(p.dout, "dout", 2);
  const int64_t c = p.dout.shape[1];
  check.tensor(p.dout, "dout", {p.plan.tokens, c});
  check.dtype(p.dout, "dout", {DType::f32, DType::f16, DType::bf16});
  check.multiple(c, "dout.shape[1]", 16);
  check.tensor(p.dy, "dy", {p.plan.rows(), c});
  check.dtype(p.dy, "dy", {p.dout.dtype});
  check.aligned(p.dout, "dout");
  check.aligned(p.dy, "dy");
  FP8MOE_CHECK(
      p.y.defined() == p.probs.defined() && p.probs.defined() == p.dprobs.defined(),
      "[unpermute_unpad_backward] y, probs and dprobs are given together or not at all; got ",
      p.y.defined() ? "y " : "", p.probs.defined() ? "probs " : "",
      p.dprobs.defined() ? "dprobs" : "");
  if (p.probs.defined()) {
    check.tensor(p.y, "y", {p.plan.rows(), c});
    check.dtype(p.y, "y", {p.dout.dtype});
    check.aligned(p.y, "y");
    check.tensor(p.probs, "probs", {p.plan.tokens, p.plan.slots});
    check.dtype(p.probs, "probs", {DType::f32});
    check.tensor(p.dprobs, "dprobs", {p.plan.tokens, p.plan.slots});
    check.dtype(p.dprobs, "dprobs", {DType::f32});
  }
  check.disjoint({{p.dy, "dy"}, {p.dprobs, "dprobs"}},
                 {{p.dout, "dout"}, {p.y, "y"}, {p.probs, "probs"}, {p.plan.buffer, "plan"}});
  if (p.plan.tokens == 0) return;
  dispatch(p, p.plan.buffer.device, stream);
}

}  // namespace fp8moe
