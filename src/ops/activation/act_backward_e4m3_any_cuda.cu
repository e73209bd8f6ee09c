// act_quantize_backward with columns, dz in E4M3, of any I.
#include "ops/activation/act_backward_tiles.cuh"

namespace fp8moe::cuda {

template void launch_tiles<E4M3, true>(const ActQuantizeBackward& p, cudaStream_t stream);

}  // namespace fp8moe::cuda
