// transpose_fp8 and permute_transpose_fp8: what they take.
#include "common/backends.h"
#include "common/check.h"

namespace fp8moe {

void transpose_fp8(const TransposeFp8& p, Stream stream) {
  const Checker check("transpose_fp8", p.q.data.device);
  check.plan(p.plan);
  check.ndim(p.q.data, "q", 2);
  const int64_t c = p.q.data.shape[1];
  check.fp8(p.q, "q", {p.plan.rows(), c}, {ScaleLayout::row, ScaleLayout::gemm});
  check.multiple(c, "q.shape[1]", 16);
  check.columns(p.columns, "columns", c, p.plan);
  check.dtype(p.columns.data, "columns (the format of q)", {p.q.data.dtype});
  check.rule(p.rule);
  check.disjoint({{p.columns, "columns"}, {p.plan.buffer, "plan"}}, {{p.q, "q"}});  // plan: status
  if (p.q.data.numel() == 0) return;
  dispatch(p, p.q.data.device, stream);
}

void permute_transpose_fp8(const PermuteTransposeFp8& p, Stream stream) {
  const Checker check("permute_transpose_fp8", p.q.data.device);
  check.plan(p.plan);
  check.ndim(p.q.data, "q", 2);
  const int64_t c = p.q.data.shape[1];
  check.strided_fp8(p.q, "q", {p.plan.tokens, c}, {ScaleLayout::row, ScaleLayout::gemm});
  check.multiple(c, "q.shape[1]", 16);
  check.columns(p.columns, "columns", c, p.plan);
  check.dtype(p.columns.data, "columns (the format of q)", {p.q.data.dtype});
  check.disjoint({{p.columns, "columns"}, {p.plan.buffer, "plan"}}, {{p.q, "q"}});  // plan: status
  if (p.columns.data.numel() == 0) return;
  dispatch(p, p.q.data.device, stream);
}

}  // namespace fp8moe
