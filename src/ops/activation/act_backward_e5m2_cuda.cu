// act_quantize_backward with columns, dz in E5M2, by the kernel of kind `whole`.
#include "ops/activation/act_backward_tiles.cuh"

namespace fp8moe::cuda {

template void launch_tiles<E5M2, RowKernel::whole>(const ActQuantizeBackward& p,
                                                   cudaStream_t stream);

}  // namespace fp8moe::cuda
