// columns = transpose_fp8(permute_pad(q)): the tokens are gathered on the way.
#include "device/runtime.h"
#include "ops/backends.h"
#include "ops/transpose/shift_columns_cuda.h"

namespace fp8moe::cuda {

template <>
void run(const PermuteTransposeFp8& p, Stream stream) {
  if (p.columns.data.numel() == 0) return;
  const DeviceGuard guard(p.q.data.device);
  shift_columns("permute_transpose_fp8", p.q, p.plan, true, p.columns, stream);
}

}  // namespace fp8moe::cuda
