#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void quantize_weight(const Tensor& w, const Fp8Tensor& q, const Fp8Tensor& q_t, ScaleRule rule,
                     Stream stream) {
  const Checker check("quantize_weight", w.device);
  check.ndim(w, "w", 3);
  const int64_t experts = w.shape[0];
  const int64_t n = w.shape[1];
  const int64_t k = w.shape[2];
  check.tensor(w, "w", {experts, n, k});
  check.dtype(w, "w", {DType::f32, DType::f16, DType::bf16});
  check.multiple(n, "w.shape[1]", 16);
  check.multiple(k, "w.shape[2]", 16);
  FP8MOE_CHECK(q.defined() || q_t.defined(), "[quantize_weight] q or q_t is required; got neither");
  if (q.defined()) {
    check.fp8(q, "q", {experts, n, k}, {ScaleLayout::block});
    check.e4m3(q, "q");
  }
  if (q_t.defined()) {
    check.fp8(q_t, "q_t", {experts, k, n}, {ScaleLayout::block});
    check.e4m3(q_t, "q_t");
  }
  check.aligned(w, "w");
  check.rule(rule);
  check.disjoint({{q, "q"}, {q_t, "q_t"}}, {{w, "w"}});
  if (w.numel() == 0) return;
  FP8MOE_DISPATCH("quantize_weight", w.device, quantize_weight(w, q, q_t, rule, stream));
}

}  // namespace fp8moe
