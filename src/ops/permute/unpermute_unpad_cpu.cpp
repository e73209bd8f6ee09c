#include "cpu/plan_check.h"
#include "ops/backends.h"
#include "ops/permute/gather_sum_cpu.h"

namespace fp8moe::cpu {

template <>
void run(const UnpermuteUnpad& p, Stream) {
  check_row_of("unpermute_unpad", p.plan);
  gather_sum(p.y, p.plan, p.probs, p.out);
}

}  // namespace fp8moe::cpu
