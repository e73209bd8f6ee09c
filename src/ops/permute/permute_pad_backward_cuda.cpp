#include "ops/backends.h"
#include "ops/permute/gather_sum_cuda.h"

namespace fp8moe::cuda {

void permute_pad_backward(const Tensor& dy, const RoutingPlan& plan, const Tensor& row_dprobs,
                          const Tensor& dx, const Tensor& dprobs, Stream stream) {
  gather_sum("permute_pad_backward", dy, plan, {}, dx, row_dprobs, dprobs, stream);
}

}  // namespace fp8moe::cuda
