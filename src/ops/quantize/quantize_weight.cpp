#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void quantize_weight(const QuantizeWeight& p, Stream stream) {
  const Checker check("quantize_weight", p.w.device);
  check.ndim(p.w, "w", 3);
  const int64_t experts = p.w.shape[0];
  const int64_t n = p.w.shape[1];
  const int64_t k = p.w.shape[2];
  check.tensor(p.w, "w", {experts, n, k});
  check.dtype(p.w, "w", {DType::f32, DType::f16, DType::bf16});
  check.multiple(n, "w.shape[1]", 16);
  check.multiple(k, "w.shape[2]", 16);
  FP8MOE_CHECK(p.q.defined() || p.q_t.defined(),
               "[quantize_weight] q or q_t is required; got neither");
  if (p.q.defined()) {
    check.fp8(p.q, "q", {experts, n, k}, {ScaleLayout::block});
    check.e4m3(p.q, "q");
  }
  if (p.q_t.defined()) {
    check.fp8(p.q_t, "q_t", {experts, k, n}, {ScaleLayout::block});
    check.e4m3(p.q_t, "q_t");
  }
  check.aligned(p.w, "w");
  check.rule(p.rule);
  check.disjoint({{p.q, "q"}, {p.q_t, "q_t"}}, {{p.w, "w"}});
  if (p.w.numel() == 0) return;
  dispatch(p, p.w.device, stream);
}

}  // namespace fp8moe
