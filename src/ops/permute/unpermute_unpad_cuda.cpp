#include "ops/backends.h"
#include "ops/permute/gather_sum_cuda.h"

namespace fp8moe::cuda {

void unpermute_unpad(const Tensor& y, const RoutingPlan& plan, const Tensor& probs,
                     const Tensor& out, Stream stream) {
  gather_sum("unpermute_unpad", y, plan, probs, out, {}, {}, stream);
}

}  // namespace fp8moe::cuda
