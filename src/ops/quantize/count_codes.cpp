#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void count_codes(const Fp8Tensor& q, const RoutingPlan& plan, const Fp8Tensor& columns,
                 int64_t stride, const Tensor& counts, Stream stream) {
  const Checker check("count_codes", q.data.device);
  check.plan(plan);
  check.ndim(q.data, "q", 2);
  const int64_t c = q.data.shape[1];
  if (q.layout == ScaleLayout::gemm)
    check.fp8(q, "q", {plan.rows(), c}, {ScaleLayout::gemm});
  else
    check.strided_fp8(q, "q", {plan.tokens, c}, {ScaleLayout::row});
  check.multiple(c, "q.shape[1]", 16);
  if (columns.defined()) {
    FP8MOE_CHECK(q.layout == ScaleLayout::row,
                 "[count_codes] q must have scale layout row where columns are given; got ",
                 name_of(q.layout));
    check.columns(columns, "columns", c, plan);
    check.dtype(columns.data, "columns (the format of q)", {q.data.dtype});
  }
  FP8MOE_CHECK(stride >= 1, "[count_codes] stride must be at least 1; got ", stride);
  check.tensor(counts, "counts", {kCodeCounts});
  check.dtype(counts, "counts", {DType::i64});
  check.disjoint({{counts, "counts"}}, {{q, "q"}, {columns, "columns"}, {plan.buffer, "plan"}});
  if (q.data.numel() == 0) return;
  FP8MOE_DISPATCH("count_codes", q.data.device,
                  count_codes(q, plan, columns, stride, counts, stream));
}

}  // namespace fp8moe
