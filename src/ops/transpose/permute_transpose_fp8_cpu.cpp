// columns = transpose_fp8(permute_pad(q)): the tokens are gathered on the way.
#include "cpu/plan_check.h"
#include "ops/backends.h"
#include "ops/transpose/shift_columns_cpu.h"

namespace fp8moe::cpu {

template <>
void run(const PermuteTransposeFp8& p, Stream) {
  check_rows("permute_transpose_fp8", p.plan);
  shift_columns("permute_transpose_fp8", p.q, p.plan, p.plan.token_of_row(), p.columns);
}

}  // namespace fp8moe::cpu
