// route, plan_from_counts, plan_from_row_id_map, router_topk and its gradient: what they take.
#include <cmath>

#include "common/backends.h"
#include "common/check.h"

namespace fp8moe {

int64_t workspace_bytes(const Route& p) {
  const Checker check("route", p.plan.buffer.device);
  check.plan_sizes(p.plan);
  return dispatch_workspace(p, p.plan.buffer.device);
}

void outputs(Route& p) {
  const Checker check("route", (p.topk_idx.defined() ? p.topk_idx : p.routing_map).device);
  FP8MOE_CHECK(p.topk_idx.defined() != p.routing_map.defined(),
               "[route] exactly one of topk_idx and routing_map is given; got ",
               p.topk_idx.defined() ? "both" : "neither");
  RoutingPlan& plan = p.plan;
  if (plan.buffer.is_wanted()) {
    const Tensor& ids = p.topk_idx.defined() ? p.topk_idx : p.routing_map;
    check.ndim(ids, p.topk_idx.defined() ? "topk_idx" : "routing_map", 2);
    plan.tokens = ids.shape[0];
    plan.slots = ids.shape[1];
    if (plan.capacity < 0) plan.capacity = plan.tokens * plan.slots;
  }
  check.output(plan);
  if (p.topk_idx.defined()) {
    check.tensor(p.topk_idx, "topk_idx", {p.plan.tokens, p.plan.slots}, {DType::i32, DType::i64});
  } else {
    FP8MOE_CHECK(p.plan.slots == p.plan.experts, "[route] plan.slots must be plan.experts (",
                 p.plan.experts, ") for a routing_map; got ", p.plan.slots);
    check.tensor(p.routing_map, "routing_map", {p.plan.tokens, p.plan.experts},
                 {DType::boolean, DType::u8, DType::i32, DType::i64});
  }
}

void route(const Route& given, Stream stream) {
  const Route p = checked(given);
  const Checker check("route", (p.topk_idx.defined() ? p.topk_idx : p.routing_map).device);
  check.workspace(p.workspace, workspace_bytes(p));
  check.disjoint({{p.plan.buffer, "plan"}, {p.workspace, "workspace"}},
                 {{p.topk_idx, "topk_idx"}, {p.routing_map, "routing_map"}});
  dispatch(p, p.plan.buffer.device, stream);
}

void outputs(PlanFromCounts& p) {
  const Checker check("plan_from_counts", p.tokens_per_expert.device);
  if (p.plan.buffer.is_wanted()) {
    check.ndim(p.tokens_per_expert, "tokens_per_expert", 1);
    p.plan.experts = p.tokens_per_expert.shape[0];
    p.plan.tokens = p.plan.capacity;
    p.plan.slots = 1;
  }
  check.output(p.plan);
  FP8MOE_CHECK(p.plan.slots == 1 && p.plan.tokens == p.plan.capacity,
               "[plan_from_counts] plan must have 1 slot and tokens == capacity; got ",
               p.plan.slots, " slots, ", p.plan.tokens, " tokens, capacity ", p.plan.capacity);
  check.tensor(p.tokens_per_expert, "tokens_per_expert", {p.plan.experts},
               {DType::i32, DType::i64});
}

void plan_from_counts(const PlanFromCounts& given, Stream stream) {
  const PlanFromCounts p = checked(given);
  const Checker check("plan_from_counts", p.tokens_per_expert.device);
  check.disjoint({{p.plan.buffer, "plan"}}, {{p.tokens_per_expert, "tokens_per_expert"}});
  dispatch(p, p.plan.buffer.device, stream);
}

void outputs(PlanFromRowIdMap& p) {
  const Checker check("plan_from_row_id_map", p.row_id_map.device);
  check.output(p.plan);
  FP8MOE_CHECK(p.plan.experts == 1 && p.plan.align == 1,
               "[plan_from_row_id_map] plan must have 1 expert and align 1; got ", p.plan.experts,
               " experts, align ", p.plan.align);
  if (p.row_id_map.ndim == 2)
    check.tensor(p.row_id_map, "row_id_map", {p.plan.tokens, 2 * p.plan.slots + 1});
  else
    check.tensor(p.row_id_map, "row_id_map", {p.plan.tokens * p.plan.slots});
  check.dtype(p.row_id_map, "row_id_map", {DType::i32});
  if (p.pad_offsets.defined()) {
    FP8MOE_CHECK(p.row_id_map.ndim == 2,
                 "[plan_from_row_id_map] pad_offsets must be of a mask map; got them with an index "
                 "map");
    check.tensor(p.pad_offsets, "pad_offsets", {p.plan.slots}, {DType::i64});
  }
}

void plan_from_row_id_map(const PlanFromRowIdMap& given, Stream stream) {
  const PlanFromRowIdMap p = checked(given);
  const Checker check("plan_from_row_id_map", p.row_id_map.device);
  check.disjoint({{p.plan.buffer, "plan"}},
                 {{p.row_id_map, "row_id_map"}, {p.pad_offsets, "pad_offsets"}});
  dispatch(p, p.plan.buffer.device, stream);
}

// ---- router_topk --------------------------------------------------------------------------------

namespace {

void check_experts(const char* op, int64_t experts, int64_t top_k) {
  FP8MOE_CHECK(1 <= experts && experts <= kMaxRoutedExperts, "[", op,
               "] the number of experts must be in [1, ", kMaxRoutedExperts, "]; got ", experts);
  const int64_t most = std::min(experts, kMaxTopK);
  FP8MOE_CHECK(1 <= top_k && top_k <= most, "[", op, "] top_k must be in [1, ", most, "]; got ",
               top_k);
}

template <class P>
void check_weights(const P& p) {
  FP8MOE_CHECK(kSoftmax <= p.score && p.score <= kSqrtSoftplus, "[", P::op,
               "] score must be 0 (softmax), 1 (sigmoid) or 2 (sqrt_softplus); got ", p.score);
  FP8MOE_CHECK(std::isfinite(p.epsilon) && p.epsilon >= 0, "[", P::op,
               "] epsilon must be finite and not negative; got ", p.epsilon);
  const float factor = p.routed_scaling_factor;
  FP8MOE_CHECK(std::isfinite(factor) && factor != 0, "[", P::op,
               "] routed_scaling_factor must be finite and not 0; got ", factor);
}

void check_groups(const RouterTopk& p, int64_t experts) {
  FP8MOE_CHECK(p.num_groups >= 1 && experts % p.num_groups == 0,
               "[router_topk] num_groups must divide the ", experts, " experts; got ",
               p.num_groups);
  FP8MOE_CHECK(1 <= p.topk_groups && p.topk_groups <= p.num_groups,
               "[router_topk] topk_groups must be in [1, ", p.num_groups, "]; got ", p.topk_groups);
  const int64_t size = experts / p.num_groups;
  FP8MOE_CHECK(1 <= p.best_per_group && p.best_per_group <= size,
               "[router_topk] best_per_group must be in [1, ", size, "]; got ", p.best_per_group);
  FP8MOE_CHECK(p.closed_value == 0 || (std::isinf(p.closed_value) && p.closed_value < 0),
               "[router_topk] closed_value must be 0 or -inf; got ", p.closed_value);
}

}  // namespace

void outputs(RouterTopk& p) {
  const Checker check(p.op, p.logits.device);
  check.ndim(p.logits, "logits", 2);
  const int64_t tokens = p.logits.shape[0], experts = p.logits.shape[1];
  const int64_t top_k = p.top_k;
  check_experts(p.op, experts, top_k);
  check_groups(p, experts);
  check_weights(p);
  check.tensor(p.logits, "logits", {tokens, experts}, {DType::f32});
  if (p.selection_bias.defined()) {
    check.tensor(p.selection_bias, "selection_bias", {experts}, {DType::f32});
  }
  if (p.padding.defined()) {
    check.tensor(p.padding, "padding", {tokens}, {DType::boolean, DType::u8});
  }
  const bool chosen = p.topk_idx.defined() || p.topk_idx.is_wanted();
  FP8MOE_CHECK(p.given_idx.defined() != chosen,
               "[router_topk] exactly one of given_idx and topk_idx is given; got ",
               chosen ? "both" : "neither");
  if (chosen) {
    check.output(p.topk_idx, "topk_idx", {tokens, top_k}, {DType::i64});
  } else {
    check.tensor(p.given_idx, "given_idx", {tokens, top_k}, {DType::i64});
  }
  check.output(p.scores, "scores", {tokens, experts}, {DType::f32});
  check.output(p.topk_weights, "topk_weights", {tokens, top_k}, {DType::f32});
  FP8MOE_CHECK(p.sequences >= 1 && tokens % p.sequences == 0,
               "[router_topk] sequences must divide the number of tokens ", tokens, "; got ",
               p.sequences);
  check.output(p.tokens_per_expert, "tokens_per_expert", {p.sequences * experts}, {DType::i64});
}

void router_topk(const RouterTopk& given, Stream stream) {
  const RouterTopk p = checked(given);
  const Checker check(p.op, p.logits.device);
  check.disjoint({{p.scores, "scores"},
                  {p.topk_idx, "topk_idx"},
                  {p.topk_weights, "topk_weights"},
                  {p.tokens_per_expert, "tokens_per_expert"}},
                 {{p.logits, "logits"},
                  {p.selection_bias, "selection_bias"},
                  {p.padding, "padding"},
                  {p.given_idx, "given_idx"}});
  dispatch(p, p.logits.device, stream);
}

void outputs(RouterTopkBackward& p) {
  const Checker check(p.op, p.scores.device);
  check.ndim(p.scores, "scores", 2);
  check.ndim(p.topk_idx, "topk_idx", 2);
  const int64_t tokens = p.scores.shape[0], experts = p.scores.shape[1];
  const int64_t top_k = p.topk_idx.shape[1];
  check_experts(p.op, experts, top_k);
  check_weights(p);
  FP8MOE_CHECK(p.dweights.defined() || p.dscores.defined(),
               "[router_topk_backward] dweights or dscores is given; got neither");
  const struct {
    const Tensor& t;
    const char* name;
    int64_t columns;
    DType dtype;
    bool optional;
  } arguments[] = {
      {p.dweights, "dweights", top_k, DType::f32, true},
      {p.dscores, "dscores", experts, DType::f32, true},
      {p.scores, "scores", experts, DType::f32, false},
      {p.topk_idx, "topk_idx", top_k, DType::i64, false},
      {p.topk_weights, "topk_weights", top_k, DType::f32, false},
  };
  for (const auto& [t, name, columns, dtype, optional] : arguments) {
    if (optional && !t.defined()) continue;
    check.tensor(t, name, {tokens, columns}, {dtype});
  }
  check.output(p.dlogits, "dlogits", {tokens, experts}, {DType::f32});
}

void router_topk_backward(const RouterTopkBackward& given, Stream stream) {
  const RouterTopkBackward p = checked(given);
  const Checker check(p.op, p.scores.device);
  check.disjoint({{p.dlogits, "dlogits"}}, {{p.dweights, "dweights"},
                                            {p.dscores, "dscores"},
                                            {p.scores, "scores"},
                                            {p.topk_idx, "topk_idx"},
                                            {p.topk_weights, "topk_weights"}});
  dispatch(p, p.scores.device, stream);
}

}  // namespace fp8moe
