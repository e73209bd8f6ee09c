#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void plan_from_counts(const Tensor& tokens_per_expert, const RoutingPlan& plan, Stream stream) {
  const Checker check("plan_from_counts", plan.buffer.device);
  check.plan(plan);
  FP8MOE_CHECK(plan.slots == 1 && plan.tokens == plan.capacity,
               "[plan_from_counts] plan must have 1 slot and tokens == capacity; got ", plan.slots,
               " slots, ", plan.tokens, " tokens, capacity ", plan.capacity);
  check.tensor(tokens_per_expert, "tokens_per_expert", {plan.experts});
  check.dtype(tokens_per_expert, "tokens_per_expert", {DType::i32, DType::i64});
  check.disjoint({{plan.buffer, "plan"}}, {{tokens_per_expert, "tokens_per_expert"}});
  FP8MOE_DISPATCH("plan_from_counts", plan.buffer.device,
                  plan_from_counts(tokens_per_expert, plan, stream));
}

}  // namespace fp8moe
