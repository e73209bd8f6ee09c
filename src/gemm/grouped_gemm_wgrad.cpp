#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void grouped_gemm_wgrad(const Fp8Tensor& dy_t, const Fp8Tensor& x_t, const RoutingPlan& plan,
                        const Tensor& dw, bool accumulate, Stream stream) {
  const Checker check("grouped_gemm_wgrad", dy_t.data.device);
  check.ndim(dy_t.data, "dy_t", 2);
  check.ndim(x_t.data, "x_t", 2);
  check.plan(plan);
  const int64_t n = dy_t.data.shape[0];
  const int64_t k = x_t.data.shape[0];
  check.columns(dy_t, "dy_t", n, plan);
  check.columns(x_t, "x_t", k, plan);
  check.e4m3(x_t, "x_t");
  FP8MOE_CHECK(dy_t.layout == x_t.layout,
               "[grouped_gemm_wgrad] dy_t and x_t must have one scale "
               "layout; got ",
               name_of(dy_t.layout), " and ", name_of(x_t.layout));
  check.multiple(n, "N", 16);
  check.multiple(k, "K", 16);
  check.tensor(dw, "dw", {plan.experts, n, k});
  check.dtype(dw, "dw", {DType::f32, DType::bf16});
  check.aligned(dw, "dw");
  check.disjoint({{dw, "dw"}}, {{dy_t, "dy_t"}, {x_t, "x_t"}, {plan.buffer, "plan"}});
  if (dw.numel() == 0) return;
  FP8MOE_DISPATCH("grouped_gemm_wgrad", dy_t.data.device,
                  grouped_gemm_wgrad(dy_t, x_t, plan, dw, accumulate, stream));
}

}  // namespace fp8moe
