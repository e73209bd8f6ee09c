#include "ops/activation/swiglu_check.h"

namespace fp8moe {

void act_quantize(const Tensor& z, const RoutingPlan& plan, const Tensor& probs, float limit,
                  const Fp8Tensor& h, const Fp8Tensor& z_q, ScaleRule rule, Stream stream) {
  const Checker check("act_quantize", z.device);
  check.ndim(z, "z", 2);
  check.dtype(z, "z", {DType::f32, DType::f16, DType::bf16});
  const int64_t rows = z.shape[0];
  const int64_t inner = z.shape[1] / 2;
  check_swiglu(check, rows, z.shape[1], plan, probs, limit);
  check.tensor(z, "z", {rows, 2 * inner});
  check.aligned(z, "z");
  check.fp8(h, "h", {rows, inner}, {ScaleLayout::row, ScaleLayout::gemm});
  check.e4m3(h, "h");
  if (z_q.defined()) {
    check.fp8(z_q, "z_q", {rows, 2 * inner}, {ScaleLayout::row, ScaleLayout::gemm});
    check.e4m3(z_q, "z_q");
  }
  check.rule(rule);
  check.disjoint({{h, "h"}, {z_q, "z_q"}}, {{z, "z"}, {probs, "probs"}, {plan.buffer, "plan"}});
  if (z.numel() == 0) return;
  FP8MOE_DISPATCH("act_quantize", z.device,
                  act_quantize(z, plan, probs, backend_limit(limit), h, z_q, rule, stream));
}

}  // namespace fp8moe
