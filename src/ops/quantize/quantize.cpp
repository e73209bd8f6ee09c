#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void quantize(const Quantize& p, Stream stream) {
  const Checker check("quantize", p.x.device);
  check.ndim(p.x, "x", 2);
  check.tensor(p.x, "x", {p.x.shape[0], p.x.shape[1]});
  check.dtype(p.x, "x", {DType::f32, DType::f16, DType::bf16});
  check.multiple(p.x.shape[1], "x.shape[1]", 16);
  check.fp8(p.q, "q", {p.x.shape[0], p.x.shape[1]}, {ScaleLayout::row, ScaleLayout::gemm});
  check.aligned(p.x, "x");
  check.rule(p.rule);
  check.disjoint({{p.q, "q"}}, {{p.x, "x"}});
  if (p.x.numel() == 0) return;
  dispatch(p, p.x.device, stream);
}

}  // namespace fp8moe
