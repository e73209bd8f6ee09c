#include "ops/backends.h"
#include "ops/permute/gather_sum_cuda.h"

namespace fp8moe::cuda {

template <>
void run(const UnpermuteUnpad& p, Stream stream) {
  gather_sum("unpermute_unpad", p.y, p.plan, p.probs, p.out, {}, {}, stream);
}

}  // namespace fp8moe::cuda
