#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void dequantize(const Dequantize& p, Stream stream) {
  const Checker check("dequantize", p.q.data.device);
  const int ndim = p.q.data.ndim;
  FP8MOE_CHECK(ndim == 2 || ndim == 3, "[dequantize] q must have 2 or 3 dimensions; got ",
               shape_of(p.q.data));
  const auto& n = p.q.data.shape;
  if (ndim == 3) {
    check.fp8(p.q, "q", {n[0], n[1], n[2]}, {ScaleLayout::block});
    check.tensor(p.x, "x", {n[0], n[1], n[2]});
  } else {
    check.fp8(p.q, "q", {n[0], n[1]}, {ScaleLayout::row, ScaleLayout::gemm, ScaleLayout::block});
    check.tensor(p.x, "x", {n[0], n[1]});
  }
  check.dtype(p.x, "x", {DType::f32, DType::f16, DType::bf16});
  check.multiple(n[ndim - 1], "q.shape[-1]", 16);
  check.aligned(p.x, "x");
  check.disjoint({{p.x, "x"}}, {{p.q, "q"}});
  if (p.x.numel() == 0) return;
  dispatch(p, p.x.device, stream);
}

}  // namespace fp8moe
