#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

int64_t route_workspace(const RoutingPlan& plan) {
  const Checker check("route", plan.buffer.device);
  check.plan(plan);
  FP8MOE_DISPATCH("route", plan.buffer.device, route_workspace(plan));
}

void route(const Tensor& topk_idx, const Tensor& routing_map, const RoutingPlan& plan,
           const Tensor& workspace, Stream stream) {
  const Checker check("route", plan.buffer.device);
  check.plan(plan);
  FP8MOE_CHECK(topk_idx.defined() != routing_map.defined(),
               "[route] exactly one of topk_idx and routing_map is given; got ",
               topk_idx.defined() ? "both" : "neither");
  if (topk_idx.defined()) {
    check.tensor(topk_idx, "topk_idx", {plan.tokens, plan.slots});
    check.dtype(topk_idx, "topk_idx", {DType::i32, DType::i64});
  } else {
    FP8MOE_CHECK(plan.slots == plan.experts, "[route] plan.slots must be plan.experts (",
                 plan.experts, ") for a routing_map; got ", plan.slots);
    check.tensor(routing_map, "routing_map", {plan.tokens, plan.experts});
    check.dtype(routing_map, "routing_map", {DType::boolean, DType::u8, DType::i32, DType::i64});
  }
  check.workspace(workspace, route_workspace(plan));
  check.disjoint({{plan.buffer, "plan"}, {workspace, "workspace"}},
                 {{topk_idx, "topk_idx"}, {routing_map, "routing_map"}});
  FP8MOE_DISPATCH("route", plan.buffer.device,
                  route(topk_idx, routing_map, plan, workspace, stream));
}

}  // namespace fp8moe
