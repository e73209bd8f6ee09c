// permute_pad_backward: each token's rows summed, the gradient of its probs gathered.
#include "cpu/plan_check.h"
#include "ops/backends.h"
#include "ops/permute/gather_sum_cpu.h"

namespace fp8moe::cpu {

namespace {

constexpr int64_t kSerial = 1 << 14;  // fewer probs than this are not worth waking the threads

}  // namespace

void permute_pad_backward(const Tensor& dy, const RoutingPlan& plan, const Tensor& row_dprobs,
                          const Tensor& dx, const Tensor& dprobs, Stream) {
  check_row_of("permute_pad_backward", plan);
  gather_sum(dy, plan, {}, dx);
  if (!dprobs.defined()) return;
  const int32_t* row_of = plan.row_of();
  const int64_t assignments = plan.tokens * plan.slots;
#pragma omp parallel for schedule(static) if (assignments > kSerial)
  for (int64_t i = 0; i < assignments; ++i)
    dprobs.as<float>()[i] = row_of[i] < 0 ? 0.0f : row_dprobs.as<const float>()[row_of[i]];
}

}  // namespace fp8moe::cpu
