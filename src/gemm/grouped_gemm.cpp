#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void grouped_gemm(const Fp8Tensor& a, const Fp8Tensor& w, const RoutingPlan& plan, const Tensor& d,
                  Stream stream) {
  const Checker check("grouped_gemm", a.data.device);
  check.ndim(a.data, "a", 2);
  check.ndim(w.data, "w", 3);
  check.plan(plan);
  const int64_t rows = plan.rows();  // R
  const int64_t n = w.data.shape[1];
  const int64_t k = a.data.shape[1];
  check.fp8(a, "a", {rows, k}, {ScaleLayout::gemm});
  check.fp8(w, "w", {plan.experts, n, k}, {ScaleLayout::block});
  check.e4m3(w, "w");
  check.multiple(n, "N", 16);
  check.multiple(k, "K", 16);
  check.tensor(d, "d", {rows, n});
  check.dtype(d, "d", {DType::bf16, DType::f32});
  check.aligned(d, "d");
  check.disjoint({{d, "d"}}, {{a, "a"}, {w, "w"}, {plan.buffer, "plan"}});
  if (d.numel() == 0) return;
  FP8MOE_DISPATCH("grouped_gemm", a.data.device, grouped_gemm(a, w, plan, d, stream));
}

}  // namespace fp8moe
