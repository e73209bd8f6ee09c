// d[rows of e] [m, N] = a[rows of e] [m, K] w[e]^T [K, N]
#include "cpu/plan_check.h"
#include "gemm/block_gemm_cpu.h"
#include "ops/backends.h"

namespace fp8moe::cpu {

void grouped_gemm(const Fp8Tensor& a, const Fp8Tensor& w, const RoutingPlan& plan, const Tensor& d,
                  Stream) {
  check_offsets("grouped_gemm", plan);
  const int64_t columns = d.shape[1];
  std::vector<BlockProduct> products;
  for (int64_t e = 0; e < plan.experts; ++e) {
    const int64_t row = plan.row_offsets()[e];
    products.push_back({.a = BlockOperand::of(a, 0, row, 0),
                        .b = BlockOperand::of(w, e, 0, 0),
                        .rows = plan.row_offsets()[e + 1] - row,
                        .columns = columns,
                        .depth = a.data.shape[1],
                        .out = row * columns});
  }
  multiply(products, d, false);
}

}  // namespace fp8moe::cpu
