// router_topk and its gradient, token by token: the definition.
#include <algorithm>
#include <limits>
#include <numeric>

#include "common/check.h"
#include "ops/backends.h"
#include "ops/route/router_score.h"

namespace fp8moe::cpu {
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
  float sum = 0.0f;
  for (int64_t s = 0; s < top_k; ++s)
    sum += weights[s] = (p.softmax_after_topk ? logits : scores)[idx[s]];
  if (p.softmax_after_topk)
    softmax(weights, top_k, weights);
  else if (p.normalize)
    for (int64_t s = 0; s < top_k; ++s) weights[s] /= sum + p.epsilon;
  for (int64_t s = 0; s < top_k; ++s) weights[s] *= p.routed_scaling_factor;
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
    for (int64_t s = 0; s < top_k; ++s) dlogits[idx[s]] += d[s];
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
    FP8MOE_CHECK(ids[i] >= 0 && ids[i] < experts, "[", op, "] ", name, " must be in [0, ", experts,
                 "); got ", ids[i], " at token ", i / idx.shape[1], ", slot ", i % idx.shape[1]);
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
      ++count[t / length * experts + idx[t * top_k + s]];
}

template <>
void run(const RouterTopkBackward& p, Stream) {
  check_ids(p.op, "topk_idx", p.topk_idx, p.scores.shape[1]);
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < p.scores.shape[0]; ++t) token_gradient(p, t);
}

}  // namespace fp8moe::cpu
