// d[rows of e] [m, N] = a[rows of e] [m, K] w[e]^T [K, N]
#include "gemm/launch.h"
#include "gemm/problem.h"
#include "ops/backends.h"

namespace fp8moe::cuda {

void grouped_gemm(const Fp8Tensor& a, const Fp8Tensor& w, const RoutingPlan& plan, const Tensor& d,
                  Stream stream) {
  const DeviceGuard guard(d.device);
  // Sums of nothing; no tensor map is that narrow.
  if (a.data.shape[1] == 0) return write_zeros(d, stream);
  const DeviceInfo& device = device_info(d.device);
  const int64_t n = w.data.shape[1], k_blocks = cdiv(w.data.shape[2], kTile);
  const gemm::Config config = gemm::fprop_config(n, a.data.shape[0], k_blocks, plan.experts,
                                                 d.dtype == DType::bf16, device.sm_count);
  const gemm::Params params = gemm::fprop_problem(a, w, plan, d, config);
  gemm::launch<gemm::Kind::fprop>(a.data.dtype, params, config, device, stream_of(stream));
}

}  // namespace fp8moe::cuda
