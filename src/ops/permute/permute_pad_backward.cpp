#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void permute_pad_backward(const PermutePadBackward& p, Stream stream) {
  const Checker check("permute_pad_backward", p.plan.buffer.device);
  check.plan(p.plan);
  check.ndim(p.dy, "dy", 2);
  const int64_t c = p.dy.shape[1];
  check.tensor(p.dy, "dy", {p.plan.rows(), c});
  check.dtype(p.dy, "dy", {DType::f32, DType::f16, DType::bf16});
  check.multiple(c, "dy.shape[1]", 16);
  check.tensor(p.dx, "dx", {p.plan.tokens, c});
  check.dtype(p.dx, "dx", {p.dy.dtype});
  check.aligned(p.dy, "dy");
  check.aligned(p.dx, "dx");
  FP8MOE_CHECK(p.row_dprobs.defined() == p.dprobs.defined(),
               "[permute_pad_backward] row_dprobs and dprobs are given together; got only ",
               p.dprobs.defined() ? "dprobs" : "row_dprobs");
  if (p.dprobs.defined()) {
    check.tensor(p.row_dprobs, "row_dprobs", {p.plan.rows()});
    check.dtype(p.row_dprobs, "row_dprobs", {DType::f32});
    check.tensor(p.dprobs, "dprobs", {p.plan.tokens, p.plan.slots});
    check.dtype(p.dprobs, "dprobs", {DType::f32});
  }
  check.disjoint({{p.dx, "dx"}, {p.dprobs, "dprobs"}},
                 {{p.dy, "dy"}, {p.row_dprobs, "row_dprobs"}, {p.plan.buffer, "plan"}});
  if (p.plan.tokens == 0) return;
  dispatch(p, p.plan.buffer.device, stream);
}

}  // namespace fp8moe
