#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void permute_pad(const PermutePad& p, Stream stream) {
  const Checker check(p.op, p.plan.buffer.device);
  const Tensor &x = p.x.data, &y = p.y.data;
  const bool fp8 = p.x.scale_inv.defined() || p.y.scale_inv.defined();
  if (fp8)
    check.dtype(x, "x", {DType::e4m3, DType::e5m2});
  else
    check.dtype(x, "x", {DType::f32, DType::f16, DType::bf16});
  check.plan(p.plan);
  check.ndim(x, "x", 2);
  const int64_t c = x.shape[1];
  check.multiple(c, "x.shape[1]", 16);
  if (fp8)
    check.strided_fp8(p.x, "x", {p.plan.tokens, c}, {ScaleLayout::row, ScaleLayout::gemm});
  else
    check.tensor(x, "x", {p.plan.tokens, c});
  check.aligned(x, "x");
  check.tensor(y, "y", {p.plan.rows(), c});
  check.dtype(y, "y", {x.dtype});
  check.aligned(y, "y");
  if (fp8) check.fp8(p.y, "y", {p.plan.rows(), c}, {ScaleLayout::row, ScaleLayout::gemm});
  FP8MOE_CHECK(p.probs.defined() == p.row_probs.defined(),
               "[permute_pad] probs and row_probs are given together; got only ",
               p.probs.defined() ? "probs" : "row_probs");
  FP8MOE_CHECK(p.probs.defined() || !p.zero_unweighted,
               "[permute_pad] zero_unweighted needs probs; got none");
  if (p.probs.defined()) {
    check.tensor(p.probs, "probs", {p.plan.tokens, p.plan.slots});
    check.dtype(p.probs, "probs", {DType::f32});
    check.tensor(p.row_probs, "row_probs", {p.plan.rows()});
    check.dtype(p.row_probs, "row_probs", {DType::f32});
  }
  check.disjoint({{p.y, "y"}, {p.row_probs, "row_probs"}},
                 {{p.x, "x"}, {p.probs, "probs"}, {p.plan.buffer, "plan"}});
  if (p.plan.rows() == 0) return;
  dispatch(p, p.plan.buffer.device, stream);
}

}  // namespace fp8moe
