// permute_pad_backward: each token's rows summed, the gradient of its probs gathered.
#include "cpu/plan_check.h"
#include "ops/backends.h"
#include "ops/permute/gather_sum_cpu.h"

namespace fp8moe::cpu {

namespace {

constexpr int64_t kSerial = 1 << 14;  // fewer probs than this are not worth waking the threads

}  // namespace

template <>
void run(const PermutePadBackward& p, Stream) {
  check_row_of("permute_pad_backward", p.plan);
  gather_sum(p.dy, p.plan, {}, p.dx);
  if (!p.dprobs.defined()) return;
  const int32_t* row_of = p.plan.row_of();
  const int64_t assignments = p.plan.tokens * p.plan.slots;
#pragma omp parallel for schedule(static) if (assignments > kSerial)
  for (int64_t i = 0; i < assignments; ++i)
    p.dprobs.as<float>()[i] = row_of[i] < 0 ? 0.0f : p.row_dprobs.as<const float>()[row_of[i]];
}

}  // namespace fp8moe::cpu
