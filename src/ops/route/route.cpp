#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

int64_t workspace_bytes(const Route& p) {
  const Checker check("route", p.plan.buffer.device);
  check.plan(p.plan);
  return dispatch_workspace(p, p.plan.buffer.device);
}

void route(const Route& p, Stream stream) {
  const Checker check("route", p.plan.buffer.device);
  check.plan(p.plan);
  FP8MOE_CHECK(p.topk_idx.defined() != p.routing_map.defined(),
               "[route] exactly one of topk_idx and routing_map is given; got ",
               p.topk_idx.defined() ? "both" : "neither");
  if (p.topk_idx.defined()) {
    check.tensor(p.topk_idx, "topk_idx", {p.plan.tokens, p.plan.slots});
    check.dtype(p.topk_idx, "topk_idx", {DType::i32, DType::i64});
  } else {
    FP8MOE_CHECK(p.plan.slots == p.plan.experts, "[route] plan.slots must be plan.experts (",
                 p.plan.experts, ") for a routing_map; got ", p.plan.slots);
    check.tensor(p.routing_map, "routing_map", {p.plan.tokens, p.plan.experts});
    check.dtype(p.routing_map, "routing_map", {DType::boolean, DType::u8, DType::i32, DType::i64});
  }
  check.workspace(p.workspace, workspace_bytes(p));
  check.disjoint({{p.plan.buffer, "plan"}, {p.workspace, "workspace"}},
                 {{p.topk_idx, "topk_idx"}, {p.routing_map, "routing_map"}});
  dispatch(p, p.plan.buffer.device, stream);
}

}  // namespace fp8moe
