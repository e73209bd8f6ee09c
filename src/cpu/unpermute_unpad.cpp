#include "cpu/gather_sum.h"
#include "cpu/ops.h"
#include "cpu/plan_check.h"

namespace fp8moe::cpu {

void unpermute_unpad(const Tensor& y, const RoutingPlan& plan, const Tensor& probs,
                     const Tensor& out, Stream) {
  check_row_of("unpermute_unpad", plan);
  gather_sum(y, plan, probs, out);
}

}  // namespace fp8moe::cpu
