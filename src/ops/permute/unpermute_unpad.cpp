#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void unpermute_unpad(const UnpermuteUnpad& p, Stream stream) {
  const Checker check("unpermute_unpad", p.plan.buffer.device);
  check.plan(p.plan);
  check.ndim(p.y, "y", 2);
  const int64_t c = p.y.shape[1];
  check.tensor(p.y, "y", {p.plan.rows(), c});
  check.dtype(p.y, "y", {DType::f32, DType::f16, DType::bf16});
  check.multiple(c, "y.shape[1]", 16);
  check.tensor(p.out, "out", {p.plan.tokens, c});
  check.dtype(p.out, "out", {p.y.dtype});
  check.aligned(p.y, "y");
  check.aligned(p.out, "out");
  if (p.probs.defined()) {
    check.tensor(p.probs, "probs", {p.plan.tokens, p.plan.slots});
    check.dtype(p.probs, "probs", {DType::f32});
  }
  check.disjoint({{p.out, "out"}}, {{p.y, "y"}, {p.probs, "probs"}, {p.plan.buffer, "plan"}});
  if (p.plan.tokens == 0) return;
  dispatch(p, p.plan.buffer.device, stream);
}

}  // namespace fp8moe
