// act_quantize_backward with columns, dz in E4M3, by the kernel of kind `any`.
#include "ops/activation/act_backward_tiles.cuh"

namespace fp8moe::cuda {

template void launch_tiles<E4M3, RowKernel::any>(const ActQuantizeBackward& p, cudaStream_t stream);

}  // namespace fp8moe::cuda
