// permute_pad, unpermute_unpad and their gradients: what they take.
#include "common/backends.h"
#include "common/check.h"

namespace fp8moe {

void outputs(PermutePad& p) {
  const Checker check(p.op, p.plan.buffer.device);
  const Tensor& x = p.x.data;
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
  if (fp8)
    check.output(p.y, "y", {p.plan.rows(), c}, {ScaleLayout::row, ScaleLayout::gemm}, {x.dtype});
  else
    check.output(p.y.data, "y", {p.plan.rows(), c}, {x.dtype}, true);
  const bool row_probs = p.row_probs.defined() || p.row_probs.is_wanted();
  FP8MOE_CHECK(p.probs.defined() == row_probs,
               "[permute_pad] probs and row_probs are given together; got only ",
               p.probs.defined() ? "probs" : "row_probs");
  FP8MOE_CHECK(p.probs.defined() || !p.zero_unweighted,
               "[permute_pad] zero_unweighted needs probs; got none");
  if (p.probs.defined()) {
    check.tensor(p.probs, "probs", {p.plan.tokens, p.plan.slots}, {DType::f32});
    check.output(p.row_probs, "row_probs", {p.plan.rows()}, {DType::f32});
  }
}

void permute_pad(const PermutePad& given, Stream stream) {
  const PermutePad p = checked(given);
  const Checker check(p.op, p.plan.buffer.device);
  check.disjoint({{p.y, "y"}, {p.row_probs, "row_probs"}},
                 {{p.x, "x"}, {p.probs, "probs"}, {p.plan.buffer, "plan"}});
  if (p.plan.rows() == 0) return;
  dispatch(p, p.plan.buffer.device, stream);
}

void outputs(PermutePadBackward& p) {
  const Checker check("permute_pad_backward", p.plan.buffer.device);
  check.plan(p.plan);
  const int64_t c = check.values(p.dy, "dy", p.plan.rows());
  check.output(p.dx, "dx", {p.plan.tokens, c}, {p.dy.dtype}, true);
  const bool dprobs = p.dprobs.defined() || p.dprobs.is_wanted();
  FP8MOE_CHECK(p.row_dprobs.defined() == dprobs,
               "[permute_pad_backward] row_dprobs and dprobs are given together; got only ",
               dprobs ? "dprobs" : "row_dprobs");
  if (dprobs) {
    check.tensor(p.row_dprobs, "row_dprobs", {p.plan.rows()}, {DType::f32});
    check.output(p.dprobs, "dprobs", {p.plan.tokens, p.plan.slots}, {DType::f32});
  }
}

void permute_pad_backward(const PermutePadBackward& given, Stream stream) {
  const PermutePadBackward p = checked(given);
  const Checker check("permute_pad_backward", p.plan.buffer.device);
  check.disjoint({{p.dx, "dx"}, {p.dprobs, "dprobs"}},
                 {{p.dy, "dy"}, {p.row_dprobs, "row_dprobs"}, {p.plan.buffer, "plan"}});
  if (p.plan.tokens == 0) return;
  dispatch(p, p.plan.buffer.device, stream);
}

void outputs(UnpermuteUnpad& p) {
  const Checker check("unpermute_unpad", p.plan.buffer.device);
  check.plan(p.plan);
  FP8MOE_CHECK(p.peers.defined() == p.first.defined(),
               "[unpermute_unpad] peers and first are given together; got only ",
               p.peers.defined() ? "peers" : "first");
  int64_t rows = p.plan.rows();
  if (p.peers.defined()) {
    FP8MOE_CHECK(p.plan.slots == p.plan.experts,
                 "[unpermute_unpad] peers need a plan of dispatch_plan, slots == experts (the "
                 "ranks); got ",
                 p.plan.slots, " and ", p.plan.experts);
    check.tensor(p.peers, "peers", {p.plan.slots}, {DType::i64});
    check_first(p.op, p.first, p.plan.slots);
    check.ndim(p.y, "y", 2);
    rows = p.y.shape[0];
  }
  const int64_t c = check.values(p.y, "y", rows, p.y.dtype == DType::f32 ? 4 : 16);
  check.output(p.out, "out", {p.plan.tokens, c}, {p.y.dtype}, true);
  if (p.probs.defined()) {
    check.tensor(p.probs, "probs", {p.plan.tokens, p.plan.slots}, {DType::f32});
  }
}

void unpermute_unpad(const UnpermuteUnpad& given, Stream stream) {
  const UnpermuteUnpad p = checked(given);
  const Checker check("unpermute_unpad", p.plan.buffer.device);
  check.disjoint({{p.out, "out"}}, {{p.y, "y"},
                                    {p.probs, "probs"},
                                    {p.plan.buffer, "plan"},
                                    {p.peers, "peers"},
                                    {p.first, "first"}});
  if (p.plan.tokens == 0) return;
  dispatch(p, p.plan.buffer.device, stream);
}

void outputs(UnpermuteUnpadBackward& p) {
  const Checker check("unpermute_unpad_backward", p.plan.buffer.device);
  check.plan(p.plan);
  const int64_t c =
      check.values(p.dout, "dout", p.plan.tokens, p.dout.dtype == DType::f32 ? 4 : 16);
  check.output(p.dy, "dy", {p.plan.rows(), c}, {p.dout.dtype}, true);
  const bool dprobs = p.dprobs.defined() || p.dprobs.is_wanted();
  FP8MOE_CHECK(
      p.y.defined() == p.probs.defined() && p.probs.defined() == dprobs,
      "[unpermute_unpad_backward] y, probs and dprobs are given together or not at all; got ",
      p.y.defined() ? "y " : "", p.probs.defined() ? "probs " : "", dprobs ? "dprobs" : "");
  if (p.probs.defined()) {
    check.tensor(p.y, "y", {p.plan.rows(), c}, {p.dout.dtype});
    check.aligned(p.y, "y");
    check.tensor(p.probs, "probs", {p.plan.tokens, p.plan.slots}, {DType::f32});
    check.output(p.dprobs, "dprobs", {p.plan.tokens, p.plan.slots}, {DType::f32});
  }
}

void unpermute_unpad_backward(const UnpermuteUnpadBackward& given, Stream stream) {
  const UnpermuteUnpadBackward p = checked(given);
  const Checker check("unpermute_unpad_backward", p.plan.buffer.device);
  check.disjoint({{p.dy, "dy"}, {p.dprobs, "dprobs"}},
                 {{p.dout, "dout"}, {p.y, "y"}, {p.probs, "probs"}, {p.plan.buffer, "plan"}});
  if (p.plan.tokens == 0 && p.plan.rows() == 0) return;
  dispatch(p, p.plan.buffer.device, stream);
}

}  // namespace fp8moe
