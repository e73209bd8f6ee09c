#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void count_codes(const CountCodes& p, Stream stream) {
  const Checker check("count_codes", p.q.data.device);
  check.plan(p.plan);
  check.ndim(p.q.data, "q", 2);
  const int64_t c = p.q.data.shape[1];
  if (p.q.layout == ScaleLayout::gemm)
    check.fp8(p.q, "q", {p.plan.rows(), c}, {ScaleLayout::gemm});
  else
    check.strided_fp8(p.q, "q", {p.plan.tokens, c}, {ScaleLayout::row});
  check.multiple(c, "q.shape[1]", 16);
  if (p.columns.defined()) {
    FP8MOE_CHECK(p.q.layout == ScaleLayout::row,
                 "[count_codes] q must have scale layout row where columns are given; got ",
                 name_of(p.q.layout));
    check.columns(p.columns, "columns", c, p.plan);
    check.dtype(p.columns.data, "columns (the format of q)", {p.q.data.dtype});
  }
  FP8MOE_CHECK(p.stride >= 1, "[count_codes] stride must be at least 1; got ", p.stride);
  check.tensor(p.counts, "counts", {kCodeCounts});
  check.dtype(p.counts, "counts", {DType::i64});
  check.disjoint({{p.counts, "counts"}},
                 {{p.q, "q"}, {p.columns, "columns"}, {p.plan.buffer, "plan"}});
  if (p.q.data.numel() == 0) return;
  dispatch(p, p.q.data.device, stream);
}

}  // namespace fp8moe
