// d[rows of e] [m, N] = a[rows of e] [m, K] w[e]^T [K, N], and the same of a2 and w2 added
#include "common/backends.h"
#include "cpu/plan_check.h"
#include "gemm/block_gemm_cpu.h"

namespace fp8moe::cpu {

template <>
void run(const GroupedGemm& p, Stream) {
  check_offsets("grouped_gemm", p.plan);
  const int64_t columns = p.d.shape[1];
  std::vector<BlockProduct> products;
  for (int64_t e = 0; e < p.plan.experts; ++e) {
    const int64_t row = p.plan.row_offsets()[e];
    products.push_back({.a = BlockOperand::of(p.a, 0, row, 0),
                        .b = BlockOperand::of(p.w, e, 0, 0),
                        .rows = p.plan.row_offsets()[e + 1] - row,
                        .columns = columns,
                        .depth = p.a.data.shape[1],
                        .out = row * columns});
    if (p.a2.defined()) {
      products.back().a2 = BlockOperand::of(p.a2, 0, row, 0);
      products.back().b2 = BlockOperand::of(p.w2, e, 0, 0);
      products.back().depth2 = p.a2.data.shape[1];
    }
  }
  multiply(products, p.d, false);
}

}  // namespace fp8moe::cpu
