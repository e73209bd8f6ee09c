// columns = transpose_fp8(permute_pad(q)): the tokens are gathered on the way.
#include "device/runtime.h"
#include "ops/backends.h"
#include "ops/transpose/shift_columns_cuda.h"

namespace fp8moe::cuda {

void permute_transpose_fp8(const Fp8Tensor& q, const RoutingPlan& plan, const Fp8Tensor& columns,
                           Stream stream) {
  if (columns.data.numel() == 0) return;
  const DeviceGuard guard(q.data.device);
  shift_columns("permute_transpose_fp8", q, plan, true, columns, stream);
}

}  // namespace fp8moe::cuda
