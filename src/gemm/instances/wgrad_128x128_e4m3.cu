#include "gemm/instantiate.cuh"

namespace fp8moe::cuda::gemm {
template void launch<Kind::wgrad_128x128, DType::e4m3>(const Params&, const Candidate&,
                                                       const DeviceInfo&, cudaStream_t);
}  // namespace fp8moe::cuda::gemm
