#include "cpu/plan_check.h"
#include "ops/backends.h"
#include "ops/permute/gather_sum_cpu.h"

namespace fp8moe::cpu {

void unpermute_unpad(const Tensor& y, const RoutingPlan& plan, const Tensor& probs,
                     const Tensor& out, Stream) {
  check_row_of("unpermute_unpad", plan);
  gather_sum(y, plan, probs, out);
}

}  // namespace fp8moe::cpu
