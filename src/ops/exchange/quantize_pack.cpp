#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void quantize_pack(const Tensor& x, const Tensor& topk_idx, const Tensor& probs,
                   int64_t num_experts, const RoutingPlan& plan, const Tensor& packed, DType fp8,
                   ScaleRule rule, Stream stream) {
  constexpr int64_t kMaxInt = 0x7FFFFFFF;
  const Checker check("quantize_pack", x.device);
  check.plan(plan);
  FP8MOE_CHECK(plan.slots == plan.experts,
               "[quantize_pack] plan must be dispatch_plan's, slots == experts (the ranks); got ",
               plan.slots, " and ", plan.experts);
  check.ndim(x, "x", 2);
  const int64_t hidden = x.shape[1];
  check.tensor(x, "x", {plan.tokens, hidden});
  check.dtype(x, "x", {DType::f32, DType::f16, DType::bf16});
  check.multiple(hidden, "x.shape[1]", 16);
  check.aligned(x, "x");
  FP8MOE_CHECK(is_fp8(fp8), "[quantize_pack] fp8 must be float8_e4m3fn or float8_e5m2; got ",
               name_of(fp8));
  FP8MOE_CHECK(topk_idx.defined() == probs.defined(),
               "[quantize_pack] topk_idx and probs are given together; got only ",
               topk_idx.defined() ? "topk_idx" : "probs");
  int64_t slots = 0;
  if (topk_idx.defined()) {
    check.ndim(topk_idx, "topk_idx", 2);
    slots = topk_idx.shape[1];
    check.tensor(topk_idx, "topk_idx", {plan.tokens, slots});
    check.dtype(topk_idx, "topk_idx", {DType::i32, DType::i64});
    check.tensor(probs, "probs", {plan.tokens, slots});
    check.dtype(probs, "probs", {DType::f32});
    FP8MOE_CHECK(num_experts >= 1 && num_experts <= kMaxInt && num_experts % plan.experts == 0,
                 "[quantize_pack] num_experts must be a positive multiple of the ranks (",
                 plan.experts, "); got ", num_experts);
  }
  check.tensor(packed, "packed", {plan.rows(), packed_row_bytes(hidden, slots)});
  check.dtype(packed, "packed", {DType::u8});
  check.aligned(packed, "packed");
  check.rule(rule);
  check.disjoint({{packed, "packed"}},
                 {{x, "x"}, {topk_idx, "topk_idx"}, {probs, "probs"}, {plan.buffer, "plan"}});
  if (packed.numel() == 0) return;
  FP8MOE_DISPATCH("quantize_pack", x.device,
                  quantize_pack(x, topk_idx, probs, num_experts, plan, packed, fp8, rule, stream));
}

}  // namespace fp8moe
