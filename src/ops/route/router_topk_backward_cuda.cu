// router_topk_backward: a warp per token, its experts in registers.
#include "ops/backends.h"
#include "ops/route/router_warp.cuh"

namespace fp8moe::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 8;

struct Params {
  const float* dweights;  // null: none
  const float* dscores;   // null: none
  const float* scores;
  const int64_t* topk_idx;
  const float* weights;
  float* dlogits;
  int64_t tokens;
  int experts;
  int top_k;
  int64_t score;
  bool softmax_after_topk;
  bool normalize;
  float epsilon;
  float factor;
};

template <int kPer>
__device__ __forceinline__ void token_gradient(const Params& p, int64_t t) {
  const unsigned lane = threadIdx.x % 32;
  const int64_t row = t * p.experts;
  float s[kPer], g[kPer];
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
    const int e = static_cast<int>(lane) + 32 * r;
    s[r] = e < p.experts ? p.scores[row + e] : 0.0f;
    g[r] = e < p.experts && p.dscores != nullptr ? p.dscores[row + e] : 0.0f;
  }

  unsigned idx = 0;  // lane j: of slot j
  float d = 0.0f;
  if (p.dweights != nullptr) {
    const bool here = static_cast<int>(lane) < p.top_k;
    const int64_t slot = t * p.top_k + lane;
    if (here) {
      const int64_t id = p.topk_idx[slot];  // one that names no expert meets none below
      idx = 0 <= id && id < p.experts ? static_cast<unsigned>(id) : ~0u;
      d = p.dweights[slot];
    }
    if (p.softmax_after_topk) {
      const float w = here ? p.weights[slot] : 0.0f;
      d = w * (d - lanes_tree_sum(d * (w / p.factor)));
    } else if (p.normalize) {
      const float of_slot = of_expert(s, idx);
      const float score = here ? of_slot : 0.0f;
      const float sum = lanes_tree_sum(score) + p.epsilon;
      d = p.factor * (d - lanes_tree_sum(d * score) / sum) / sum;
    } else {
      d = p.factor * d;
    }
  }
  const auto add_chosen = [&] {
    for (int j = 0; p.dweights != nullptr && j < p.top_k; ++j) {
      const unsigned e = __shfl_sync(kFullWarp, idx, j);
      const float of_slot = __shfl_sync(kFullWarp, d, j);
#pragma unroll
      for (int r = 0; r < kPer; ++r)
        if (e == lane + 32 * r) g[r] += of_slot;
    }
  };
  if (!p.softmax_after_topk) add_chosen();
  if (p.score == kSoftmax) {
    float product[kPer];
#pragma unroll
    for (int r = 0; r < kPer; ++r) product[r] = s[r] * g[r];
    const float mean = warp_sum(product);
#pragma unroll
    for (int r = 0; r < kPer; ++r) g[r] = s[r] * (g[r] - mean);
  } else {
#pragma unroll
    for (int r = 0; r < kPer; ++r) g[r] = g[r] * slope_of(p.score, s[r]);
  }
  if (p.softmax_after_topk) add_chosen();
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
    const int e = static_cast<int>(lane) + 32 * r;
    if (e < p.experts) p.dlogits[row + e] = g[r];
  }
}

template <int kPer>
__global__ void __launch_bounds__(kThreads) gradients(const __grid_constant__ Params p) {
  for (int64_t t = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; t < p.tokens;
       t += int64_t{gridDim.x} * kWarps)
    token_gradient<kPer>(p, t);
}

}  // namespace

template <>
void run(const RouterTopkBackward& p, Stream stream) {
  const Device device = p.scores.device;
  const DeviceGuard guard(device);
  const int64_t tokens = p.scores.shape[0], experts = p.scores.shape[1];
  if (tokens == 0) return;
  const Params params{.dweights = p.dweights.as<const float>(),
                      .dscores = p.dscores.as<const float>(),
                      .scores = p.scores.as<const float>(),
                      .topk_idx = p.topk_idx.as<const int64_t>(),
                      .weights = p.topk_weights.as<const float>(),
                      .dlogits = p.dlogits.as<float>(),
                      .tokens = tokens,
                      .experts = static_cast<int>(experts),
                      .top_k = static_cast<int>(p.topk_idx.shape[1]),
                      .score = p.score,
                      .softmax_after_topk = p.softmax_after_topk,
                      .normalize = p.normalize,
                      .epsilon = p.epsilon,
                      .factor = p.routed_scaling_factor};
  const unsigned grid = persistent_grid(device, cdiv(tokens, kWarps), kBlocksPerSm);
  dispatch_experts(experts, [&]<int kPer>() {
    launch(p.op, gradients<kPer>, grid, kThreads, 0, stream_of(stream), params);
  });
}

}  // namespace fp8moe::cuda
