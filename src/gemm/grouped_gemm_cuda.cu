// d[rows of e] [m, N] = a[rows of e] [m, K] w[e]^T [K, N], and the same of a2 and w2 added
#include "common/backends.h"
#include "gemm/launch.h"
#include "gemm/problem.h"

namespace fp8moe::cuda {

template <>
void run(const GroupedGemm& p, Stream stream) {
  const DeviceGuard guard(p.d.device);
  // Sums of nothing; no tensor map is that narrow.
  if (p.a.data.shape[1] == 0) return write_zeros(p.d, stream);
  const DeviceInfo& device = device_info(p.d.device);
  const gemm::Candidate candidate =
      gemm::choose({.kind = gemm::Kind::fprop,
                    .m = p.a.data.shape[0],
                    .n = p.w.data.shape[1],
                    .k_blocks = cdiv(p.w.data.shape[2], kTile) + (p.a2.defined() ? 1 : 0),
                    .experts = p.plan.experts,
                    .bf16 = p.d.dtype == DType::bf16},
                   device.sm_count);
  const gemm::Params params = gemm::fprop_problem(p, candidate);
  gemm::launch<gemm::Kind::fprop>(p.a.data.dtype, params, candidate, device, stream_of(stream));
}

}  // namespace fp8moe::cuda
