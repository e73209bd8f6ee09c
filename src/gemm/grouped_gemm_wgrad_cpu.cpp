// dw[e] [N, K] (+)= dy_t[:, tokens of e] [N, m] x_t[:, tokens of e]^T [m, K]
#include "cpu/plan_check.h"
#include "gemm/block_gemm_cpu.h"
#include "ops/backends.h"

namespace fp8moe::cpu {

void grouped_gemm_wgrad(const Fp8Tensor& dy_t, const Fp8Tensor& x_t, const RoutingPlan& plan,
                        const Tensor& dw, bool accumulate, Stream) {
  check_columns("grouped_gemm_wgrad", plan);
  const int64_t rows = dw.shape[1];
  const int64_t columns = dw.shape[2];
  std::vector<BlockProduct> products;
  for (int64_t e = 0; e < plan.experts; ++e) {
    const int64_t tokens = plan.tokens_per_expert()[e];
    if (accumulate && tokens == 0) continue;
    const int64_t token = plan.col_offsets()[e];
    products.push_back({.a = BlockOperand::of(dy_t, 0, 0, token),
                        .b = BlockOperand::of(x_t, 0, 0, token),
                        .rows = rows,
                        .columns = columns,
                        .depth = tokens,  // the segment is zero from there on
                        .out = e * rows * columns});
  }
  multiply(products, dw, accumulate);
}

}  // namespace fp8moe::cpu
