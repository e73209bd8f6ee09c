// dw[e] [N, K] (+)= dy_t[:, tokens of e] [N, m] x_t[:, tokens of e]^T [m, K]
#include "common/backends.h"
#include "device/runtime.h"
#include "gemm/launch.h"
#include "gemm/problem.h"

namespace fp8moe::cuda {

template <>
void run(const GroupedGemmWgrad& p, Stream stream) {
  const DeviceGuard guard(p.dw.device);
  const DeviceInfo& device = device_info(p.dw.device);
  if (p.plan.columns() == 0) {  // no expert can have a token
    if (!p.accumulate) write_zeros(p.dw, stream);
    return;
  }
  const bool block = p.dy_t.layout == ScaleLayout::block;
  const gemm::Candidate candidate =
      gemm::choose({.kind = block ? gemm::Kind::wgrad_128x128 : gemm::Kind::wgrad_1x128,
                    .m = p.dw.shape[1],
                    .n = p.dw.shape[2],
                    .k_blocks = p.plan.columns() / gemm::kBlockK,
                    .experts = p.plan.experts,
                    .bf16 = p.dw.dtype == DType::bf16,
                    .add = p.accumulate},
                   device.sm_count);
  gemm::Params params = gemm::wgrad_problem(p.dy_t, p.x_t, p.plan, p.dw, p.accumulate, candidate);
  if (candidate.dynamic) params.queue = p.workspace.as<unsigned>();
  const auto run = [&]<gemm::Kind kKind>() {
    gemm::launch<kKind>(p.dy_t.data.dtype, params, candidate, device, stream_of(stream));
  };
  if (block)
    run.operator()<gemm::Kind::wgrad_128x128>();
  else
    run.operator()<gemm::Kind::wgrad_1x128>();
}

}  // namespace fp8moe::cuda
