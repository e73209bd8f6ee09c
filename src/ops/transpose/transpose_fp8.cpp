#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void transpose_fp8(const Fp8Tensor& q, const RoutingPlan& plan, const Fp8Tensor& columns,
                   bool requantize, ScaleRule rule, Stream stream) {
  const Checker check("transpose_fp8", q.data.device);
  check.plan(plan);
  check.ndim(q.data, "q", 2);
  const int64_t c = q.data.shape[1];
  check.fp8(q, "q", {plan.rows(), c}, {ScaleLayout::row, ScaleLayout::gemm});
  check.multiple(c, "q.shape[1]", 16);
  check.columns(columns, "columns", c, plan);
  check.dtype(columns.data, "columns (the format of q)", {q.data.dtype});
  check.rule(rule);
  check.disjoint({{columns, "columns"}, {plan.buffer, "plan"}}, {{q, "q"}});  // plan: status
  if (q.data.numel() == 0) return;
  FP8MOE_DISPATCH("transpose_fp8", q.data.device,
                  transpose_fp8(q, plan, columns, requantize, rule, stream));
}

}  // namespace fp8moe
