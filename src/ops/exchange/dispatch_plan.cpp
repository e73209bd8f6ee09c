#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

namespace {

// slots and experts both stand for the ranks.
void check_ranks(const Checker& check, const RoutingPlan& plan) {
  check.plan(plan);
  FP8MOE_CHECK(plan.slots == plan.experts && plan.align == 1, "[", check.op(),
               "] plan must have slots == experts (the ranks) and align 1; got ", plan.slots, ", ",
               plan.experts, " and ", plan.align);
}

}  // namespace

int64_t workspace_bytes(const DispatchPlan& p) {
  check_ranks(Checker("dispatch_plan", p.plan.buffer.device), p.plan);
  return dispatch_workspace(p, p.plan.buffer.device);
}

void dispatch_plan(const DispatchPlan& p, Stream stream) {
  constexpr int64_t kMaxInt = 0x7FFFFFFF;
  const Checker check("dispatch_plan", p.plan.buffer.device);
  check_ranks(check, p.plan);
  check.ndim(p.topk_idx, "topk_idx", 2);
  check.tensor(p.topk_idx, "topk_idx", {p.plan.tokens, p.topk_idx.shape[1]});
  check.dtype(p.topk_idx, "topk_idx", {DType::i32, DType::i64});
  FP8MOE_CHECK(p.topk_idx.numel() <= kMaxInt,
               "[dispatch_plan] topk_idx must have less than 2^31 entries; got ",
               p.topk_idx.numel());
  FP8MOE_CHECK(
      p.num_experts >= 1 && p.num_experts <= kMaxInt && p.num_experts % p.plan.experts == 0,
      "[dispatch_plan] num_experts must be a positive multiple of the ranks (", p.plan.experts,
      "); got ", p.num_experts);
  FP8MOE_CHECK(p.segment == 0 || (p.segment > 0 && p.plan.capacity % p.plan.experts == 0 &&
                                  p.segment <= p.plan.capacity / p.plan.experts),
               "[dispatch_plan] segment must be 0 or at most plan.capacity / ranks (",
               p.plan.capacity, " / ", p.plan.experts, ", a whole number); got ", p.segment);
  check.tensor(p.counts, "counts", {p.plan.experts, 2});
  check.dtype(p.counts, "counts", {DType::i32});
  check.workspace(p.workspace, workspace_bytes(p));
  check.disjoint({{p.plan.buffer, "plan"}, {p.counts, "counts"}, {p.workspace, "workspace"}},
                 {{p.topk_idx, "topk_idx"}});
  dispatch(p, p.plan.buffer.device, stream);
}

}  // namespace fp8moe
