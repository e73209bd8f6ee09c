#include "fp8moe/explain.h"

#include <algorithm>

#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

GemmChoice explain_grouped_gemm(const GemmQuery& q) {
  constexpr const char* kOp = "explain_grouped_gemm";
  FP8MOE_CHECK(q.m >= 0 && q.n >= 0 && q.k >= 0 && q.experts > 0 && q.sm_count > 0, "[", kOp,
               "] sizes must not be negative, experts and SMs positive; got M ", q.m, ", N ", q.n,
               ", K ", q.k, ", ", q.experts, " experts, ", q.sm_count, " SMs");
  constexpr int64_t kMost = 1 << 30;  // of what a kernel counts in 32 bits
  FP8MOE_CHECK(std::max({q.m, q.n, q.k, q.experts}) <= kMost, "[", kOp, "] sizes must be at most ",
               kMost, "; got M ", q.m, ", N ", q.n, ", K ", q.k, ", ", q.experts, " experts");
  FP8MOE_CHECK(q.out == DType::bf16 || q.out == DType::f32, "[", kOp,
               "] out must be bfloat16 or float32; got ", name_of(q.out));
  FP8MOE_CHECK(q.columns == ScaleLayout::block || q.columns == ScaleLayout::gemm, "[", kOp,
               "] columns must have scale layout block or gemm; got ", name_of(q.columns));
  FP8MOE_CHECK(q.pass == GemmPass::wgrad || (!q.accumulate && q.columns == ScaleLayout::block), "[",
               kOp, "] accumulate and columns are of wgrad alone; got them with another pass");
  return cuda::explain_grouped_gemm(q);
}

}  // namespace fp8moe
