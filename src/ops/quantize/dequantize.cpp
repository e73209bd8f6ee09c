#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void dequantize(const Fp8Tensor& q, const Tensor& x, Stream stream) {
  const Checker check("dequantize", q.data.device);
  const int ndim = q.data.ndim;
  FP8MOE_CHECK(ndim == 2 || ndim == 3, "[dequantize] q must have 2 or 3 dimensions; got ",
               shape_of(q.data));
  const auto& n = q.data.shape;
  if (ndim == 3) {
    check.fp8(q, "q", {n[0], n[1], n[2]}, {ScaleLayout::block});
    check.tensor(x, "x", {n[0], n[1], n[2]});
  } else {
    check.fp8(q, "q", {n[0], n[1]}, {ScaleLayout::row, ScaleLayout::gemm, ScaleLayout::block});
    check.tensor(x, "x", {n[0], n[1]});
  }
  check.dtype(x, "x", {DType::f32, DType::f16, DType::bf16});
  check.multiple(n[ndim - 1], "q.shape[-1]", 16);
  check.aligned(x, "x");
  check.disjoint({{x, "x"}}, {{q, "q"}});
  if (x.numel() == 0) return;
  FP8MOE_DISPATCH("dequantize", x.device, dequantize(q, x, stream));
}

}  // namespace fp8moe
