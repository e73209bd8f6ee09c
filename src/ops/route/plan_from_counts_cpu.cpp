// plan_from_counts: the rows of each group, in their order, are the rows of its expert.
#include <vector>

#include "common/check.h"
#include "cpu/plan_layout.h"
#include "ops/backends.h"

namespace fp8moe::cpu {

void plan_from_counts(const Tensor& tokens_per_expert, const RoutingPlan& plan, Stream) {
  std::vector<int64_t> counts(plan.experts);
  int64_t sum = 0;
  for (int64_t e = 0; e < plan.experts; ++e) {
    counts[e] = tokens_per_expert.dtype == DType::i64 ? tokens_per_expert.as<int64_t>()[e]
                                                      : tokens_per_expert.as<int32_t>()[e];
    FP8MOE_CHECK(counts[e] >= 0, "[plan_from_counts] tokens_per_expert must not be negative; got ",
                 counts[e], " for expert ", e);
    FP8MOE_CHECK(!__builtin_add_overflow(sum, counts[e], &sum),
                 "[plan_from_counts] tokens_per_expert must sum to less than 2^63; got ", counts[e],
                 " for expert ", e);
  }
  lay_out(counts, plan);

  int32_t token = 0;
  for (int64_t e = 0; e < plan.experts; ++e)
    for (int32_t i = 0; i < plan.tokens_per_expert()[e]; ++i, ++token) {
      const int32_t row = plan.row_offsets()[e] + i;
      plan.token_of_row()[row] = token;
      plan.slot_of_row()[row] = 0;
      plan.row_of()[token] = row;
    }
  std::fill(plan.row_of() + token, plan.row_of() + plan.tokens, -1);
}

}  // namespace fp8moe::cpu
