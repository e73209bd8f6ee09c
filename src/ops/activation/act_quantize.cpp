#include "ops/activation/swiglu_check.h"

namespace fp8moe {

void act_quantize(const ActQuantize& p, Stream stream) {
  const Checker check("act_quantize", p.z.device);
  check.ndim(p.z, "z", 2);
  check.dtype(p.z, "z", {DType::f32, DType::f16, DType::bf16});
  const int64_t rows = p.z.shape[0];
  const int64_t inner = p.z.shape[1] / 2;
  check_swiglu(check, rows, p.z.shape[1], p.plan, p.probs, p.limit);
  check.tensor(p.z, "z", {rows, 2 * inner});
  check.aligned(p.z, "z");
  check.fp8(p.h, "h", {rows, inner}, {ScaleLayout::row, ScaleLayout::gemm});
  check.e4m3(p.h, "h");
  if (p.z_q.defined()) {
    check.fp8(p.z_q, "z_q", {rows, 2 * inner}, {ScaleLayout::row, ScaleLayout::gemm});
    check.e4m3(p.z_q, "z_q");
  }
  check.rule(p.rule);
  check.disjoint({{p.h, "h"}, {p.z_q, "z_q"}},
                 {{p.z, "z"}, {p.probs, "probs"}, {p.plan.buffer, "plan"}});
  if (p.z.numel() == 0) return;
  ActQuantize backends = p;
  backends.limit = backend_limit(p.limit);
  dispatch(backends, p.z.device, stream);
}

}  // namespace fp8moe
