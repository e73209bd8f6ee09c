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

int64_t dispatch_plan_workspace(const RoutingPlan& plan) {
  check_ranks(Checker("dispatch_plan", plan.buffer.device), plan);
  FP8MOE_DISPATCH("dispatch_plan", plan.buffer.device, dispatch_plan_workspace(plan));
}

void dispatch_plan(const Tensor& topk_idx, int64_t num_experts, int64_t segment,
                   const RoutingPlan& plan, const Tensor& counts, const Tensor& workspace,
                   Stream stream) {
  constexpr int64_t kMaxInt = 0x7FFFFFFF;
  const Checker check("dispatch_plan", plan.buffer.device);
  check_ranks(check, plan);
  check.ndim(topk_idx, "topk_idx", 2);
  check.tensor(topk_idx, "topk_idx", {plan.tokens, topk_idx.shape[1]});
  check.dtype(topk_idx, "topk_idx", {DType::i32, DType::i64});
  FP8MOE_CHECK(topk_idx.numel() <= kMaxInt,
               "[dispatch_plan] topk_idx must have less than 2^31 entries; got ", topk_idx.numel());
  FP8MOE_CHECK(num_experts >= 1 && num_experts <= kMaxInt && num_experts % plan.experts == 0,
               "[dispatch_plan] num_experts must be a positive multiple of the ranks (",
               plan.experts, "); got ", num_experts);
  FP8MOE_CHECK(segment == 0 || (segment > 0 && segment <= plan.capacity &&
                                segment * plan.experts == plan.capacity),
               "[dispatch_plan] segment must be 0 or plan.capacity / ranks (", plan.capacity, " / ",
               plan.experts, "); got ", segment);
  check.tensor(counts, "counts", {plan.experts, 2});
  check.dtype(counts, "counts", {DType::i32});
  check.workspace(workspace, dispatch_plan_workspace(plan));
  check.disjoint({{plan.buffer, "plan"}, {counts, "counts"}, {workspace, "workspace"}},
                 {{topk_idx, "topk_idx"}});
  FP8MOE_DISPATCH("dispatch_plan", plan.buffer.device,
                  dispatch_plan(topk_idx, num_experts, segment, plan, counts, workspace, stream));
}

}  // namespace fp8moe
