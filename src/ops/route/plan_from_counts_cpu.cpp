// plan_from_counts: the rows of each group, in their order, are the rows of its expert.
#include <vector>

#include "common/check.h"
#include "cpu/plan_layout.h"
#include "ops/backends.h"

namespace fp8moe::cpu {

template <>
void run(const PlanFromCounts& p, Stream) {
  std::vector<int64_t> counts(p.plan.experts);
  int64_t sum = 0;
  for (int64_t e = 0; e < p.plan.experts; ++e) {
    counts[e] = p.tokens_per_expert.dtype == DType::i64 ? p.tokens_per_expert.as<int64_t>()[e]
                                                        : p.tokens_per_expert.as<int32_t>()[e];
    FP8MOE_CHECK(counts[e] >= 0, "[plan_from_counts] tokens_per_expert must not be negative; got ",
                 counts[e], " for expert ", e);
    FP8MOE_CHECK(!__builtin_add_overflow(sum, counts[e], &sum),
                 "[plan_from_counts] tokens_per_expert must sum to less than 2^63; got ", counts[e],
                 " for expert ", e);
  }
  lay_out(counts, p.plan);

  int32_t token = 0;
  for (int64_t e = 0; e < p.plan.experts; ++e)
    for (int32_t i = 0; i < p.plan.tokens_per_expert()[e]; ++i, ++token) {
      const int32_t row = p.plan.row_offsets()[e] + i;
      p.plan.token_of_row()[row] = token;
      p.plan.slot_of_row()[row] = 0;
      p.plan.row_of()[token] = row;
    }
  std::fill(p.plan.row_of() + token, p.plan.row_of() + p.plan.tokens, -1);
}

}  // namespace fp8moe::cpu
