#include "common/backends.h"
#include "common/check.h"

namespace fp8moe {

void outputs(GroupedGemm& p) {
  const Checker check("grouped_gemm", p.a.data.device);
  check.ndim(p.a.data, "a", 2);
  check.ndim(p.w.data, "w", 3);
  check.plan(p.plan);
  const int64_t rows = p.plan.rows();  // R
  const int64_t n = p.w.data.shape[1];
  const int64_t k = p.a.data.shape[1];
  check.fp8(p.a, "a", {rows, k}, {ScaleLayout::gemm});
  check.fp8(p.w, "w", {p.plan.experts, n, k}, {ScaleLayout::block});
  check.e4m3(p.w, "w");
  check.multiple(n, "N", 16);
  check.multiple(k, "K", 16);
  FP8MOE_CHECK(p.a2.defined() == p.w2.defined(),
               "[grouped_gemm] a2 and w2 must be given together; got ",
               p.a2.defined() ? "a2" : "w2", " alone");
  if (p.a2.defined()) {
    check.ndim(p.a2.data, "a2", 2);
    const int64_t k2 = p.a2.data.shape[1];
    check.fp8(p.a2, "a2", {rows, k2}, {ScaleLayout::gemm});
    check.dtype(p.a2.data, "a2 (the format of a)", {p.a.data.dtype});
    check.fp8(p.w2, "w2", {p.plan.experts, n, k2}, {ScaleLayout::block});
    check.e4m3(p.w2, "w2");
    check.multiple(k2, "K2", 16);
    FP8MOE_CHECK(k2 > 0 && k2 <= kTile && k > 0,
                 "[grouped_gemm] K2 must be 16 to 128, beside a K; got ", k2, " and ", k);
  }
  check.output(p.d, "d", {rows, n}, {DType::bf16, DType::f32}, true);
}

void grouped_gemm(const GroupedGemm& given, Stream stream) {
  const GroupedGemm p = checked(given);
  const Checker check("grouped_gemm", p.a.data.device);
  check.disjoint({{p.d, "d"}},
                 {{p.a, "a"}, {p.w, "w"}, {p.a2, "a2"}, {p.w2, "w2"}, {p.plan.buffer, "plan"}});
  if (p.d.numel() == 0) return;
  dispatch(p, p.a.data.device, stream);
}

}  // namespace fp8moe
