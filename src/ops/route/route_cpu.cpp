// Plans, and the choice of experts, on the CPU: their definition.
#include <algorithm>
#include <numeric>
#include <vector>

#include "common/backends.h"
#include "common/check.h"
#include "cpu/plan_layout.h"
#include "ops/route/router_score.h"

namespace fp8moe::cpu {

// ---- route --------------------------------------------------------------------------------------
// route: a counting sort of the assignments by expert, stable in token then slot order.
// Chunks of tokens are counted in parallel, laid out, then placed in parallel; the result does not
// depend on how the tokens were cut.

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
    FP8MOE_CHECK(bad == assignments, "[route] topk_idx must lie in [-1, ", plan.experts, "); got ",
                 expert_of(bad), " at token ", bad / slots, ", slot ", bad % slots);

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

// ---- plan_from_counts ---------------------------------------------------------------------------
// plan_from_counts: the rows of each group, in their order, are the rows of its expert.

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

// ---- plan_from_row_id_map -----------------------------------------------------------------------
// plan_from_row_id_map: each cell of the map that names a row gives it its token and slot. All
// cells are checked before anything is written.

namespace {

constexpr const char* kFromMap = "plan_from_row_id_map";

// fn(token, slot, row) of each cell that names a row.
template <typename Fn>
void each_cell(const PlanFromRowIdMap& p, Fn fn) {
  const int64_t tokens = p.plan.tokens, slots = p.plan.slots;
  const auto* map = p.row_id_map.as<const int32_t>();
  if (p.row_id_map.ndim == 1) {
    for (int64_t slot = 0; slot < slots; ++slot)
      for (int64_t token = 0; token < tokens; ++token, ++map)
        if (*map != -1) fn(token, slot, int64_t{*map});
    return;
  }
  for (int64_t token = 0; token < tokens; ++token, map += 2 * slots + 1) {
    const int64_t used = map[2 * slots];
    FP8MOE_CHECK(used >= 0 && used <= slots, "[", kFromMap, "] row_id_map must have 0 to ", slots,
                 " experts per token in its last column; got ", used, " for token ", token);
    for (int64_t i = 0; i < used; ++i) {
      const int64_t slot = map[slots + i];
      FP8MOE_CHECK(slot >= 0 && slot < slots, "[", kFromMap,
                   "] row_id_map must name experts in [0, ", slots, "); got ", slot, " for token ",
                   token);
      const int64_t pad = p.pad_offsets.defined() ? p.pad_offsets.as<const int64_t>()[slot] : 0;
      fn(token, slot, map[i] + pad);
    }
  }
}

}  // namespace

template <>
void run(const PlanFromRowIdMap& p, Stream) {
  const RoutingPlan& plan = p.plan;
  std::vector<int64_t> owner(plan.rows(), -1);
  each_cell(p, [&](int64_t token, int64_t slot, int64_t row) {
    FP8MOE_CHECK(row >= 0 && row < plan.rows(), "[", kFromMap,
                 "] row_id_map must name rows in [0, ", plan.rows(), "); got ", row, " for token ",
                 token, ", slot ", slot);
    FP8MOE_CHECK(owner[row] < 0, "[", kFromMap, "] row_id_map must name a row once; got ", row,
                 " for tokens ", owner[row], " and ", token);
    owner[row] = token;
  });

  int32_t* const end = plan.buffer.as<int32_t>() + plan.buffer_size();
  std::fill(plan.status(), plan.token_of_row(), 0);
  std::fill(plan.token_of_row(), plan.col_blocks(), -1);
  std::fill(plan.col_blocks(), end, 0);
  for (int32_t* block = plan.col_blocks(); block < end; block += 4) block[3] = -1;
  plan.tokens_per_expert()[0] = plan.row_offsets()[1] = static_cast<int32_t>(plan.rows());
  each_cell(p, [&](int64_t token, int64_t slot, int64_t row) {
    plan.token_of_row()[row] = static_cast<int32_t>(token);
    plan.slot_of_row()[row] = static_cast<int32_t>(slot);
    plan.row_of()[token * plan.slots + slot] = static_cast<int32_t>(row);
  });
}

// ---- router_topk --------------------------------------------------------------------------------
// router_topk and its gradient, token by token: the definition.

namespace {

// order[0, count): where the largest of n values are, best first; of equal ones the lower first.
void best_first(const float* values, int64_t n, int64_t count, int* order) {
  std::iota(order, order + n, 0);
  std::partial_sort(order, order + count, order + n, [=](int a, int b) {
    const uint32_t of_a = order_key(values[a]), of_b = order_key(values[b]);
    return of_a != of_b ? of_a > of_b : a < b;
  });
}

// y = e^x over its sum; x may be y.
void softmax(const float* x, int64_t n, float* y) {
  const float top = *std::max_element(x, x + n);
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += y[i] = std::exp(x[i] - top);
  for (int64_t i = 0; i < n; ++i) y[i] /= static_cast<float>(sum);
}

void close_groups(const RouterTopk& p, int64_t experts, float* compared) {
  const int64_t size = experts / p.num_groups;
  int order[kMaxRoutedExperts];
  float value[kMaxRoutedExperts];
  for (int64_t g = 0; g < p.num_groups; ++g) {
    best_first(compared + g * size, size, p.best_per_group, order);
    value[g] = 0.0f;
    for (int64_t i = 0; i < p.best_per_group; ++i) value[g] += compared[g * size + order[i]];
  }
  best_first(value, p.num_groups, p.topk_groups, order);
  for (int64_t i = p.topk_groups; i < p.num_groups; ++i)
    std::fill_n(compared + order[i] * size, size, p.closed_value);
}

void choose(const RouterTopk& p, int64_t experts, const float* values, int64_t top_k,
            int64_t* chosen) {
  float compared[kMaxRoutedExperts];
  const float* bias = p.selection_bias.as<const float>();
  for (int64_t e = 0; e < experts; ++e)
    compared[e] = p.selection_bias.defined() ? values[e] + bias[e] : values[e];
  if (p.topk_groups < p.num_groups) close_groups(p, experts, compared);
  int order[kMaxRoutedExperts];
  best_first(compared, experts, top_k, order);
  std::copy_n(order, top_k, chosen);
}

void route_token(const RouterTopk& p, int64_t t) {
  const int64_t experts = p.logits.shape[1], top_k = p.topk_weights.shape[1];
  const float* logits = p.logits.as<const float>() + t * experts;
  float* scores = p.scores.as<float>() + t * experts;
  float* weights = p.topk_weights.as<float>() + t * top_k;
  if (p.score == kSoftmax)
    softmax(logits, experts, scores);
  else
    for (int64_t e = 0; e < experts; ++e) scores[e] = score_of(p.score, logits[e]);

  const bool given = p.given_idx.defined();
  const int64_t* idx = (given ? p.given_idx : p.topk_idx).as<const int64_t>() + t * top_k;
  if (!given)
    choose(p, experts, p.select_by_logits ? logits : scores, top_k,
           p.topk_idx.as<int64_t>() + t * top_k);
  float chosen[kMaxTopK] = {};  // of the slots that name an expert
  int64_t n = 0;
  float sum = 0.0f;
  for (int64_t s = 0; s < top_k; ++s)
    if (idx[s] >= 0) sum += chosen[n++] = (p.softmax_after_topk ? logits : scores)[idx[s]];
  if (p.softmax_after_topk)
    softmax(chosen, n, chosen);
  else if (p.normalize)
    for (int64_t i = 0; i < n; ++i) chosen[i] /= sum + p.epsilon;
  n = 0;
  for (int64_t s = 0; s < top_k; ++s)
    weights[s] = idx[s] < 0 ? 0.0f : chosen[n++] * p.routed_scaling_factor;
}

void token_gradient(const RouterTopkBackward& p, int64_t t) {
  const int64_t experts = p.scores.shape[1], top_k = p.topk_idx.shape[1];
  const float* scores = p.scores.as<const float>() + t * experts;
  const int64_t* idx = p.topk_idx.as<const int64_t>() + t * top_k;
  float* dlogits = p.dlogits.as<float>() + t * experts;
  if (p.dscores.defined())
    std::copy_n(p.dscores.as<const float>() + t * experts, experts, dlogits);
  else
    std::fill_n(dlogits, experts, 0.0f);

  float d[kMaxTopK] = {};  // of the chosen scores, or logits
  const float* weights = p.topk_weights.as<const float>() + t * top_k;
  const bool weighted = p.dweights.defined();
  const float* dweights = weighted ? p.dweights.as<const float>() + t * top_k : d;
  float sum = 0.0f, dot = 0.0f;
  for (int64_t s = 0; s < top_k; ++s) {
    if (idx[s] < 0) continue;
    sum += scores[idx[s]];
    dot += dweights[s] *
           (p.softmax_after_topk ? weights[s] / p.routed_scaling_factor : scores[idx[s]]);
  }
  for (int64_t s = 0; weighted && s < top_k; ++s) {
    if (p.softmax_after_topk)
      d[s] = weights[s] * (dweights[s] - dot);
    else if (p.normalize)
      d[s] = p.routed_scaling_factor * (dweights[s] - dot / (sum + p.epsilon)) / (sum + p.epsilon);
    else
      d[s] = p.routed_scaling_factor * dweights[s];
  }
  const auto add_chosen = [&] {
    for (int64_t s = 0; s < top_k; ++s)
      if (idx[s] >= 0) dlogits[idx[s]] += d[s];
  };
  if (!p.softmax_after_topk) add_chosen();
  double all = 0.0;
  if (p.score == kSoftmax)
    for (int64_t e = 0; e < experts; ++e) all += double{scores[e]} * dlogits[e];
  const auto mean = static_cast<float>(all);
  for (int64_t e = 0; e < experts; ++e)
    dlogits[e] = p.score == kSoftmax ? scores[e] * (dlogits[e] - mean)
                                     : dlogits[e] * slope_of(p.score, scores[e]);
  if (p.softmax_after_topk) add_chosen();
}

void check_ids(const char* op, const char* name, const Tensor& idx, int64_t experts) {
  const int64_t* ids = idx.as<const int64_t>();
  for (int64_t i = 0; i < idx.numel(); ++i)
    FP8MOE_CHECK(ids[i] >= -1 && ids[i] < experts, "[", op, "] ", name, " must be in [-1, ",
                 experts, "); got ", ids[i], " at token ", i / idx.shape[1], ", slot ",
                 i % idx.shape[1]);
}

}  // namespace

template <>
void run(const RouterTopk& p, Stream) {
  const int64_t tokens = p.logits.shape[0], experts = p.logits.shape[1];
  const int64_t top_k = p.topk_weights.shape[1];
  if (p.given_idx.defined()) check_ids(p.op, "the given topk_idx", p.given_idx, experts);
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; ++t) route_token(p, t);

  const int64_t all = p.tokens_per_expert.shape[0];
  int64_t* count = p.tokens_per_expert.as<int64_t>();
  std::fill_n(count, all, 0);
  const int64_t length = std::max<int64_t>(1, tokens * experts / all);  // of a sequence
  const auto* padding = p.padding.as<const uint8_t>();
  const int64_t* idx = (p.given_idx.defined() ? p.given_idx : p.topk_idx).as<const int64_t>();
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t s = 0; s < top_k && !(padding != nullptr && padding[t]); ++s)
      if (idx[t * top_k + s] >= 0) ++count[t / length * experts + idx[t * top_k + s]];
}

template <>
void run(const RouterTopkBackward& p, Stream) {
  check_ids(p.op, "topk_idx", p.topk_idx, p.scores.shape[1]);
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < p.scores.shape[0]; ++t) token_gradient(p, t);
}

}  // namespace fp8moe::cpu
