// dw[e] [N, K] (+)= dy_t[:, tokens of e] [N, m] x_t[:, tokens of e]^T [m, K]
#include "device/runtime.h"
#include "gemm/launch.h"
#include "gemm/problem.h"
#include "ops/backends.h"

namespace fp8moe::cuda {

void grouped_gemm_wgrad(const Fp8Tensor& dy_t, const Fp8Tensor& x_t, const RoutingPlan& plan,
                        const Tensor& dw, bool accumulate, Stream stream) {
  const DeviceGuard guard(dw.device);
  const DeviceInfo& device = device_info(dw.device);
  if (plan.columns() == 0) {  // no expert can have a token
    if (!accumulate) write_zeros(dw, stream);
    return;
  }
  const bool bf16 = dw.dtype == DType::bf16;
  const bool block = dy_t.layout == ScaleLayout::block;
  const int64_t k_blocks = plan.columns() / gemm::kBlockK;
  const gemm::Config config =
      gemm::wgrad_config(block ? gemm::Kind::wgrad_128x128 : gemm::Kind::wgrad_1x128, dw.shape[1],
                         dw.shape[2], k_blocks, plan.experts, bf16, accumulate);
  gemm::Params params = gemm::wgrad_problem(dy_t, x_t, plan, dw, accumulate, config);
  if (gemm::dynamic_schedule(k_blocks, plan.experts, accumulate && !bf16)) {
    static LaunchNumbers numbers(gemm::kQueues);
    params.queue = launch_number(numbers, stream_of(stream), "grouped_gemm_wgrad");
  }
  const auto run = [&]<gemm::Kind kKind>() {
    gemm::launch<kKind>(dy_t.data.dtype, params, config, device, stream_of(stream));
  };
  if (block)
    run.operator()<gemm::Kind::wgrad_128x128>();
  else
    run.operator()<gemm::Kind::wgrad_1x128>();
}

}  // namespace fp8moe::cuda
