// route: a counting sort of the assignments by expert, stable in token then slot order.
// Chunks of tokens are counted in parallel, laid out, then placed in parallel; the result does not
// depend on how the tokens were cut.
#include <algorithm>
#include <vector>

#include "common/check.h"
#include "cpu/plan_layout.h"
#include "ops/backends.h"

namespace fp8moe::cpu {

namespace {

constexpr int64_t kChunk = 8192;  // assignments

// expert_of(i): the expert of flat assignment i = t * S + s, negative where there is none.
template <typename ExpertOf>
void route_by(ExpertOf expert_of, const RoutingPlan& plan) {
  const int64_t slots = plan.slots;
  const int64_t tokens_a_chunk = std::max<int64_t>(1, kChunk / slots);
  const int64_t chunks = cdiv(plan.tokens, tokens_a_chunk);
  const int64_t assignments = plan.tokens * slots;
  const auto last = [&](int64_t chunk) {
    return std::min((chunk + 1) * tokens_a_chunk * slots, assignments);
  };
  const auto experts = static_cast<size_t>(plan.experts);

  std::vector<std::vector<int64_t>> counts(chunks);
  std::vector<int64_t> first_bad(chunks, assignments);
#pragma omp parallel for schedule(static)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    std::vector<int64_t> count(experts, 0);
    for (int64_t i = chunk * tokens_a_chunk * slots; i < last(chunk); ++i) {
      const int64_t e = expert_of(i);
      if (e < -1 || e >= plan.experts) {
        first_bad[chunk] = std::min(first_bad[chunk], i);
      } else if (e >= 0) {
        ++count[e];
      }
    }
    counts[chunk] = std::move(count);
  }
  for (int64_t bad : first_bad)
    FP8MOE_CHECK(bad == assignments, "[route] topk_idx must lie in [-1, ", plan.experts,
                 "); got ", expert_of(bad), " at token ", bad / slots, ", slot ", bad % slots);

  // counts[chunk][e] becomes how many of e's assignments lie in earlier chunks.
  std::vector<int64_t> total(experts, 0);
  for (auto& count : counts)
    for (size_t e = 0; e < experts; ++e) {
      const int64_t here = count[e];
      count[e] = total[e];
      total[e] += here;
    }
  lay_out(total, plan);

#pragma omp parallel for schedule(static)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    std::vector<int64_t>& next = counts[chunk];
    for (int64_t i = chunk * tokens_a_chunk * slots; i < last(chunk); ++i) {
      const int64_t e = expert_of(i);
      int32_t row = -1;
      if (e >= 0 && next[e]++ < plan.tokens_per_expert()[e]) {
        row = plan.row_offsets()[e] + static_cast<int32_t>(next[e] - 1);
        plan.token_of_row()[row] = static_cast<int32_t>(i / slots);
        plan.slot_of_row()[row] = static_cast<int32_t>(i % slots);
      }
      plan.row_of()[i] = row;
    }
  }
}

template <typename T>
void route_ids(const Tensor& topk_idx, const RoutingPlan& plan) {
  const T* ids = topk_idx.as<const T>();
  route_by([=](int64_t i) { return static_cast<int64_t>(ids[i]); }, plan);
}

template <typename T>
void route_map(const Tensor& routing_map, const RoutingPlan& plan) {
  const T* map = routing_map.as<const T>();
  const int64_t experts = plan.experts;
  route_by([=](int64_t i) { return map[i] != 0 ? i % experts : -1; }, plan);
}

}  // namespace

template <>
int64_t workspace_bytes(const Route&) {
  return 0;
}

template <>
void run(const Route& p, Stream) {
  if (p.topk_idx.defined()) {
    p.topk_idx.dtype == DType::i64 ? route_ids<int64_t>(p.topk_idx, p.plan)
                                   : route_ids<int32_t>(p.topk_idx, p.plan);
    return;
  }
  switch (p.routing_map.dtype) {
    case DType::i64: return route_map<int64_t>(p.routing_map, p.plan);
    case DType::i32: return route_map<int32_t>(p.routing_map, p.plan);
    default: return route_map<uint8_t>(p.routing_map, p.plan);
  }
}

}  // namespace fp8moe::cpu
