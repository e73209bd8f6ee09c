// dispatch_plan: the tokens of each rank, in order. Chunks of tokens are counted in parallel, laid
// out, then placed in parallel; the result does not depend on how the tokens were cut.
#include <algorithm>
#include <vector>

#include "common/check.h"
#include "cpu/plan_layout.h"
#include "ops/backends.h"

namespace fp8moe::cpu {

namespace {

constexpr int64_t kChunk = 1024;  // tokens

template <typename Id>
void plan_ranks(const Tensor& topk_idx, int64_t num_experts, int64_t segment,
                const RoutingPlan& plan, const Tensor& counts_out) {
  const Id* ids = topk_idx.as<const Id>();
  const int64_t slots = topk_idx.shape[1];
  const int64_t ranks = plan.experts;
  const int64_t experts_a_rank = num_experts / ranks;
  const int64_t chunks = cdiv(plan.tokens, kChunk);
  const auto last = [&](int64_t chunk) { return std::min((chunk + 1) * kChunk, plan.tokens); };
  const auto zeros = std::vector<int64_t>(static_cast<size_t>(ranks), 0);

  std::vector<std::vector<int64_t>> counts(chunks);  // tokens of each rank
  std::vector<int64_t> first_bad(chunks, -1);
#pragma omp parallel for schedule(static)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    std::vector<int64_t> count = zeros;
    std::vector<int64_t> seen(ranks, -1);  // the last token counted for a rank
    for (int64_t t = chunk * kChunk; t < last(chunk); ++t)
      for (int64_t s = 0; s < slots; ++s) {
        const int64_t id = ids[t * slots + s];
        if ((id < -1 || id >= num_experts) && first_bad[chunk] < 0)
          first_bad[chunk] = t * slots + s;
        if (id < 0 || id >= num_experts) continue;
        const int64_t rank = id / experts_a_rank;
        if (seen[rank] == t) continue;
        seen[rank] = t;
        ++count[rank];
      }
    counts[chunk] = std::move(count);
  }
  for (int64_t bad : first_bad)
    FP8MOE_CHECK(bad < 0, "[dispatch_plan] topk_idx must lie in [-1, ", num_experts, "); got ",
                 ids[bad], " at token ", bad / slots, ", slot ", bad % slots);

  // counts[chunk][r] becomes how many of r's tokens lie in earlier chunks.
  std::vector<int64_t> total = zeros;
  for (auto& count : counts)
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t here = count[r];
      count[r] = total[r];
      total[r] += here;
    }
  if (segment > 0) {
    lay_out_segments(total, segment, plan);
  } else {
    lay_out(total, plan);
  }

  std::vector<std::vector<int64_t>> entries(chunks);  // of topk_idx, on kept rows
#pragma omp parallel for schedule(static)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    std::vector<int64_t>& next = counts[chunk];
    std::vector<int64_t> entry = zeros;
    std::vector<int64_t> seen(ranks, -1);
    for (int64_t t = chunk * kChunk; t < last(chunk); ++t) {
      int32_t* row_of = plan.row_of() + t * ranks;
      std::fill_n(row_of, ranks, -1);
      for (int64_t s = 0; s < slots; ++s) {
        const int64_t id = ids[t * slots + s];
        if (id < 0) continue;
        const int64_t rank = id / experts_a_rank;
        if (seen[rank] != t) {
          seen[rank] = t;
          if (next[rank] < plan.tokens_per_expert()[rank]) {
            const int32_t row = plan.row_offsets()[rank] + static_cast<int32_t>(next[rank]);
            plan.token_of_row()[row] = static_cast<int32_t>(t);
            plan.slot_of_row()[row] = static_cast<int32_t>(rank);
            row_of[rank] = row;
          }
          ++next[rank];
        }
        entry[rank] += row_of[rank] >= 0;
      }
    }
    entries[chunk] = std::move(entry);
  }
  for (int64_t r = 0; r < ranks; ++r) {
    int64_t sum = 0;
    for (const auto& entry : entries) sum += entry[r];
    counts_out.as<int32_t>()[2 * r] = plan.tokens_per_expert()[r];
    counts_out.as<int32_t>()[2 * r + 1] = static_cast<int32_t>(sum);
  }
}

}  // namespace

template <>
int64_t workspace_bytes(const DispatchPlan&) {
  return 0;
}

template <>
void run(const DispatchPlan& p, Stream) {
  p.topk_idx.dtype == DType::i64
      ? plan_ranks<int64_t>(p.topk_idx, p.num_experts, p.segment, p.plan, p.counts)
      : plan_ranks<int32_t>(p.topk_idx, p.num_experts, p.segment, p.plan, p.counts);
}

}  // namespace fp8moe::cpu
