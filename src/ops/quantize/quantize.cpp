#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void quantize(const Tensor& x, const Fp8Tensor& q, ScaleRule rule, Stream stream) {
  const Checker check("quantize", x.device);
  check.ndim(x, "x", 2);
  check.tensor(x, "x", {x.shape[0], x.shape[1]});
  check.dtype(x, "x", {DType::f32, DType::f16, DType::bf16});
  check.multiple(x.shape[1], "x.shape[1]", 16);
  check.fp8(q, "q", {x.shape[0], x.shape[1]}, {ScaleLayout::row, ScaleLayout::gemm});
  check.aligned(x, "x");
  check.rule(rule);
  check.disjoint({{q, "q"}}, {{x, "x"}});
  if (x.numel() == 0) return;
  FP8MOE_DISPATCH("quantize", x.device, quantize(x, q, rule, stream));
}

}  // namespace fp8moe
