#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void quantize_pack(const QuantizePack& p, Stream stream) {
  constexpr int64_t kMaxInt = 0x7FFFFFFF;
  const Checker check("quantize_pack", p.x.device);
  check.plan(p.plan);
  FP8MOE_CHECK(p.plan.slots == p.plan.experts,
               "[quantize_pack] plan must be dispatch_plan's, slots == experts (the ranks); got ",
               p.plan.slots, " and ", p.plan.experts);
  check.ndim(p.x, "x", 2);
  const int64_t hidden = p.x.shape[1];
  check.tensor(p.x, "x", {p.plan.tokens, hidden});
  check.dtype(p.x, "x", {DType::f32, DType::f16, DType::bf16});
  check.multiple(hidden, "x.shape[1]", 16);
  check.aligned(p.x, "x");
  FP8MOE_CHECK(is_fp8(p.fp8_dtype),
               "[quantize_pack] fp8_dtype must be float8_e4m3fn or float8_e5m2; got ",
               name_of(p.fp8_dtype));
  FP8MOE_CHECK(p.topk_idx.defined() == p.probs.defined(),
               "[quantize_pack] topk_idx and probs are given together; got only ",
               p.topk_idx.defined() ? "topk_idx" : "probs");
  int64_t slots = 0;
  if (p.topk_idx.defined()) {
    check.ndim(p.topk_idx, "topk_idx", 2);
    slots = p.topk_idx.shape[1];
    check.tensor(p.topk_idx, "topk_idx", {p.plan.tokens, slots});
    check.dtype(p.topk_idx, "topk_idx", {DType::i32, DType::i64});
    check.tensor(p.probs, "probs", {p.plan.tokens, slots});
    check.dtype(p.probs, "probs", {DType::f32});
    FP8MOE_CHECK(
        p.num_experts >= 1 && p.num_experts <= kMaxInt && p.num_experts % p.plan.experts == 0,
        "[quantize_pack] num_experts must be a positive multiple of the ranks (", p.plan.experts,
        "); got ", p.num_experts);
  }
  check.tensor(p.packed, "packed", {p.plan.rows(), packed_row_bytes(hidden, slots)});
  check.dtype(p.packed, "packed", {DType::u8});
  check.aligned(p.packed, "packed");
  check.rule(p.rule);
  check.disjoint(
      {{p.packed, "packed"}},
      {{p.x, "x"}, {p.topk_idx, "topk_idx"}, {p.probs, "probs"}, {p.plan.buffer, "plan"}});
  if (p.packed.numel() == 0) return;
  dispatch(p, p.x.device, stream);
}

}  // namespace fp8moe
