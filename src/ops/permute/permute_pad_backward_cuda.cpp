#include "ops/backends.h"
#include "ops/permute/gather_sum_cuda.h"

namespace fp8moe::cuda {

template <>
void run(const PermutePadBackward& p, Stream stream) {
  gather_sum("permute_pad_backward", p.dy, p.plan, {}, p.dx, p.row_dprobs, p.dprobs, stream);
}

}  // namespace fp8moe::cuda
