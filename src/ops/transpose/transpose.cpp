// transpose_fp8 and permute_transpose_fp8: what they take.
#include "common/backends.h"
#include "common/check.h"

namespace fp8moe {

void outputs(TransposeFp8& p) {
  const Checker check("transpose_fp8", p.q.data.device);
  check.plan(p.plan);
  check.ndim(p.q.data, "q", 2);
  const int64_t c = p.q.data.shape[1];
  check.fp8(p.q, "q", {p.plan.rows(), c}, {ScaleLayout::row, ScaleLayout::gemm});
  check.multiple(c, "q.shape[1]", 16);
  check.output_columns(p.columns, "columns", c, p.plan, p.q.data.dtype);
  check.rule(p.rule);
}

void transpose_fp8(const TransposeFp8& given, Stream stream) {
  const TransposeFp8 p = checked(given);
  const Checker check("transpose_fp8", p.q.data.device);
  check.disjoint({{p.columns, "columns"}, {p.plan.buffer, "plan"}}, {{p.q, "q"}});  // plan: status
  if (p.q.data.numel() == 0) return;
  dispatch(p, p.q.data.device, stream);
}

void outputs(PermuteTransposeFp8& p) {
  const Checker check("permute_transpose_fp8", p.q.data.device);
  check.plan(p.plan);
  check.ndim(p.q.data, "q", 2);
  const int64_t c = p.q.data.shape[1];
  check.strided_fp8(p.q, "q", {p.plan.tokens, c}, {ScaleLayout::row, ScaleLayout::gemm});
  check.multiple(c, "q.shape[1]", 16);
  check.output_columns(p.columns, "columns", c, p.plan, p.q.data.dtype);
}

void permute_transpose_fp8(const PermuteTransposeFp8& given, Stream stream) {
  const PermuteTransposeFp8 p = checked(given);
  const Checker check("permute_transpose_fp8", p.q.data.device);
  check.disjoint({{p.columns, "columns"}, {p.plan.buffer, "plan"}}, {{p.q, "q"}});  // plan: status
  if (p.columns.data.numel() == 0) return;
  dispatch(p, p.q.data.device, stream);
}

}  // namespace fp8moe
