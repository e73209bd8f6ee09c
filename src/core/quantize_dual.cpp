#include "core/backends.h"
#include "core/check.h"

namespace fp8moe {

void quantize_dual(const Tensor& x, const RoutingPlan& plan, const Fp8Tensor& rows,
                   const Fp8Tensor& columns, ScaleRule rule, Stream stream) {
  const Checker check("quantize_dual", x.device);
  check.plan(plan);
  check.ndim(x, "x", 2);
  const int64_t r = plan.rows();
  const int64_t c = x.shape[1];
  check.tensor(x, "x", {r, c});
  check.dtype(x, "x", {DType::f32, DType::f16, DType::bf16});
  check.multiple(c, "x.shape[1]", 16);
  check.fp8(rows, "rows", {r, c}, {ScaleLayout::row, ScaleLayout::gemm});
  check.columns(columns, "columns", c, plan);
  check.dtype(columns.data, "columns (the format of rows)", {rows.data.dtype});
  check.aligned(x, "x");
  check.rule(rule);
  check.disjoint({{rows, "rows"}, {columns, "columns"}}, {{x, "x"}, {plan.slab, "plan"}});
  if (x.numel() == 0) return;
  FP8MOE_DISPATCH("quantize_dual", x.device, quantize_dual(x, plan, rows, columns, rule, stream));
}

}  // namespace fp8moe
