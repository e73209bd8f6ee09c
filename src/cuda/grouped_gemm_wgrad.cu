// dw[e] [N, K] (+)= dy_t[:, tokens of e] [N, m] x_t[:, tokens of e]^T [m, K]
#include <cstdio>
#include <mutex>

#include "core/backends.h"
#include "cuda/gemm/launch.h"
#include "cuda/gemm/problem.h"
#include "cuda/gemm/queues.h"

namespace fp8moe::cuda {
namespace {

// The queue of a launch on `stream`. Says once that there are no more.
int queue_of(cudaStream_t stream) {
  static gemm::QueueNumbers numbers(gemm::kQueues);
  cudaStreamCaptureStatus status{};
  FP8MOE_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  int queue = gemm::kNoQueue;
  if (status != cudaStreamCaptureStatusNone) {
    queue = numbers.of_capture();
  } else {
    unsigned long long id = 0;
    FP8MOE_CUDA_CHECK(cudaStreamGetId(stream, &id));
    queue = numbers.of_stream(id);
  }
  static std::once_flag said;
  if (queue == gemm::kNoQueue)
    std::call_once(said, [] {
      std::fprintf(
          stderr,
          "[grouped_gemm_wgrad] all %d queues are given out, one a stream and one a captured "
          "launch: further ones are slower where experts have few tokens\n",
          gemm::kQueues);
    });
  return queue;
}

}  // namespace

void grouped_gemm_wgrad(const Fp8Tensor& dy_t, const Fp8Tensor& x_t, const RoutingPlan& plan,
                        const Tensor& dw, bool accumulate, Stream stream) {
  const DeviceGuard guard(dw.device);
  const DeviceInfo& device = device_info(dw.device);
  if (plan.columns() == 0) {  // no expert can have a token
    if (!accumulate) write_zeros(dw, stream);
    return;
  }
  const bool bf16 = dw.dtype == DType::bf16;
  gemm::Config config = gemm::choose_config(gemm::Kind::tokens_block, dw.shape[2], bf16);
  const int64_t k_blocks = plan.columns() / gemm::kBlockK;
  if (gemm::narrow_tiles(k_blocks, plan.experts, bf16, accumulate)) config.tile_n = 128;
  config.band = gemm::tokens_band(k_blocks, plan.experts, bf16);
  gemm::Params params = gemm::tokens_problem(dy_t, x_t, plan, dw, accumulate, config);
  if (gemm::short_tiles(k_blocks, plan.experts)) params.queue = queue_of(stream_of(stream));
  const auto run = [&]<gemm::Kind kKind>() {
    gemm::launch<kKind>(dy_t.data.dtype, x_t.data.dtype, params, config, device, stream_of(stream));
  };
  if (dy_t.layout == ScaleLayout::block)
    run.operator()<gemm::Kind::tokens_block>();
  else
    run.operator()<gemm::Kind::tokens_column>();
}

}  // namespace fp8moe::cuda
