// dw[e] [N, K] (+)= dy_t[:, tokens of e] [N, m] x_t[:, tokens of e]^T [m, K]
#include "common/backends.h"
#include "cpu/plan_check.h"
#include "gemm/block_gemm_cpu.h"

namespace fp8moe::cpu {

template <>
void run(const GroupedGemmWgrad& p, Stream) {
  check_columns("grouped_gemm_wgrad", p.plan);
  const int64_t rows = p.dw.shape[1];
  const int64_t columns = p.dw.shape[2];
  std::vector<BlockProduct> products;
  for (int64_t e = 0; e < p.plan.experts; ++e) {
    const int64_t tokens = p.plan.tokens_per_expert()[e];
    if (p.accumulate && tokens == 0) continue;
    const int64_t token = p.plan.col_offsets()[e];
    products.push_back({.a = BlockOperand::of(p.dy_t, 0, 0, token),
                        .b = BlockOperand::of(p.x_t, 0, 0, token),
                        .rows = rows,
                        .columns = columns,
                        .depth = tokens,  // the segment is zero from there on
                        .out = e * rows * columns});
  }
  multiply(products, p.dw, p.accumulate);
}

}  // namespace fp8moe::cpu
