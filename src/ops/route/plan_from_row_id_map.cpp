#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void plan_from_row_id_map(const PlanFromRowIdMap& p, Stream stream) {
  const Checker check("plan_from_row_id_map", p.plan.buffer.device);
  check.plan(p.plan);
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
    check.tensor(p.pad_offsets, "pad_offsets", {p.plan.slots});
    check.dtype(p.pad_offsets, "pad_offsets", {DType::i64});
  }
  check.disjoint({{p.plan.buffer, "plan"}},
                 {{p.row_id_map, "row_id_map"}, {p.pad_offsets, "pad_offsets"}});
  dispatch(p, p.plan.buffer.device, stream);
}

}  // namespace fp8moe
