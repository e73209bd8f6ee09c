#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void plan_from_counts(const PlanFromCounts& p, Stream stream) {
  const Checker check("plan_from_counts", p.plan.buffer.device);
  check.plan(p.plan);
  FP8MOE_CHECK(p.plan.slots == 1 && p.plan.tokens == p.plan.capacity,
               "[plan_from_counts] plan must have 1 slot and tokens == capacity; got ",
               p.plan.slots, " slots, ", p.plan.tokens, " tokens, capacity ", p.plan.capacity);
  check.tensor(p.tokens_per_expert, "tokens_per_expert", {p.plan.experts});
  check.dtype(p.tokens_per_expert, "tokens_per_expert", {DType::i32, DType::i64});
  check.disjoint({{p.plan.buffer, "plan"}}, {{p.tokens_per_expert, "tokens_per_expert"}});
  dispatch(p, p.plan.buffer.device, stream);
}

}  // namespace fp8moe
