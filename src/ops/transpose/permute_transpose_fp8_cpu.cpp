// columns = transpose_fp8(permute_pad(q)): the tokens are gathered on the way.
#include "cpu/plan_check.h"
#include "ops/backends.h"
#include "ops/transpose/shift_columns_cpu.h"

namespace fp8moe::cpu {

void permute_transpose_fp8(const Fp8Tensor& q, const RoutingPlan& plan, const Fp8Tensor& columns,
                           Stream) {
  check_rows("permute_transpose_fp8", plan);
  shift_columns("permute_transpose_fp8", q, plan, plan.token_of_row(), columns);
}

}  // namespace fp8moe::cpu
