// router_topk and its gradient: a warp per token, its experts in registers.
#include <algorithm>
#include <cstdint>

#include "common/backends.h"
#include "device/early_launch.cuh"
#include "device/reduce.cuh"
#include "device/runtime.h"
#include "ops/route/router_score.h"

namespace fp8moe::cuda {

// ---- values over a warp -------------------------------------------------------------------------
// A token's values over a warp: expert e = lane + 32 r is v[r] of its lane.

namespace {

// v of expert `e` of each lane's own; 0 for one past kPer 32.
template <int kPer>
__device__ __forceinline__ float of_expert(const float (&v)[kPer], unsigned e) {
  float found = 0.0f;
#pragma unroll
  for (unsigned r = 0; r < kPer; ++r) {
    const float here = __shfl_sync(kFullWarp, v[r], e % 32);
    if (e / 32 == r) found = here;
  }
  return found;
}

template <int kPer>
__device__ __forceinline__ float warp_sum(const float (&v)[kPer]) {
  float sum = v[0];
#pragma unroll
  for (int r = 1; r < kPer; ++r) sum += v[r];
  return lanes_tree_sum(sum);
}

// body.template operator()<kPer>() with room for so many experts: 32 kPer of them.
template <typename Body>
void dispatch_experts(int64_t experts, Body&& body) {
  if (experts <= 32) return body.template operator()<1>();
  if (experts <= 64) return body.template operator()<2>();
  if (experts <= 128) return body.template operator()<4>();
  if (experts <= 256) return body.template operator()<8>();
  if (experts <= 512) return body.template operator()<16>();
  body.template operator()<32>();
}

}  // namespace

// ---- router_topk --------------------------------------------------------------------------------
// Two launches: one zeroes tokens_per_expert, and the other starts beside it, routes, counts in
// shared memory, and waits for the first before it adds its counts up (integers: the same in any
// order).

namespace {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpsPerSm = 64;

struct Params {
  const float* logits;  // [T, E]
  const float* bias;    // null: none, as are:
  const uint8_t* padding;
  const int64_t* given_idx;
  float* scores;
  int64_t* topk_idx;  // null with given_idx
  float* weights;
  unsigned long long* tokens_per_expert;  // [B, E]
  int64_t length;                         // tokens per sequence
  int blocks;                             // per sequence
  int experts;
  int top_k;
  int groups;
  int topk_groups;
  int best_per_group;
  int lanes_per_group;  // a power of two
  int64_t score;
  bool select_by_logits;
  bool softmax_after_topk;
  bool normalize;
  float closed_value;
  float epsilon;
  float factor;
};

__global__ void zero_counts(unsigned long long* counts, int64_t n) {
  let_next_start();
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x)
    counts[i] = 0;
}

// Of the largest key over the warp, the lowest `at`.
__device__ __forceinline__ unsigned warp_best(uint32_t key, unsigned at) {
  const uint32_t top = __reduce_max_sync(kFullWarp, key);
  return __reduce_min_sync(kFullWarp, key == top ? at : ~0u);
}

// Sets the keys of experts outside the best groups to that of closed_value. Shared memory of a
// warp: the keys, lanes_per_group words between groups so that lanes meet in no bank, then a key of
// each group, 0 of those that are open.
template <int kPer>
__device__ __forceinline__ void close_groups(const Params& p, uint32_t (&key)[kPer],
                                             uint32_t* keys) {
  const int lane = threadIdx.x % 32;
  const int size = p.experts / p.groups, share = p.lanes_per_group, pitch = size + share;
  uint32_t* group_key = keys + p.groups * pitch;
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
    const int e = lane + 32 * r;
    if (e < p.experts) keys[e + e / size * share] = key[r];
  }
  __syncwarp();
  for (int first = 0; first < p.groups; first += 32 / share) {
    const int g = first + lane / share;
    float sum = 0.0f;
    uint64_t last = ~uint64_t{0};  // a key and a place, by which a later one of equals is less
    for (int n = 0; n < p.best_per_group; ++n) {
      uint64_t best = 0;
      for (int i = lane % share; g < p.groups && i < size; i += share) {
        const uint64_t here = uint64_t{keys[g * pitch + i]} << 32 | (0x7FFFFFFFu - i);
        if (here < last && here > best) best = here;
      }
      for (int step = share / 2; step >= 1; step /= 2)
        best = max(best, __shfl_xor_sync(kFullWarp, best, step));
      last = best;
      sum += value_of_key(static_cast<uint32_t>(best >> 32));
    }
    if (g < p.groups && lane % share == 0) group_key[g] = order_key(sum);
  }
  __syncwarp();
  for (int n = 0; n < p.topk_groups; ++n) {
    uint32_t best = 0;
    unsigned at = 0;
    for (int g = lane; g < p.groups; g += 32)
      if (group_key[g] > best) best = group_key[g], at = g;
    const unsigned winner = warp_best(best, at);
    __syncwarp();  // all have read: a reduction orders no memory
    if (lane == 0) group_key[winner] = 0;
    __syncwarp();
  }
  const uint32_t closed = order_key(p.closed_value);
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
    const int e = lane + 32 * r;
    if (e < p.experts && group_key[e / size] != 0) key[r] = closed;
  }
}

// Lane j: the expert of the j-th largest key.
template <int kPer>
__device__ __forceinline__ unsigned choose(const Params& p, uint32_t (&key)[kPer]) {
  const unsigned lane = threadIdx.x % 32;
  unsigned chosen = 0;
#pragma unroll 1
  for (int j = 0; j < p.top_k; ++j) {
    uint32_t best = key[0];
    unsigned at = lane;
#pragma unroll
    for (int r = 1; r < kPer; ++r)
      if (key[r] > best) best = key[r], at = lane + 32 * r;
    const unsigned winner = warp_best(best, at);
    if (static_cast<int>(lane) == j) chosen = winner;
#pragma unroll
    for (int r = 0; r < kPer; ++r)
      if (winner == lane + 32 * r) key[r] = 0;
  }
  return chosen;
}

template <int kPer>
__device__ __forceinline__ void route_token(const Params& p, int64_t t, int* count,
                                            uint32_t* scratch) {
  const int lane = threadIdx.x % 32;
  const float* logits = p.logits + t * p.experts;
  float v[kPer];       // the logits, then the scores
  uint32_t key[kPer];  // 0: no expert
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
    const int e = lane + 32 * r;
    v[r] = e < p.experts ? logits[e] : -INFINITY;
  }
  const auto order = [&](bool biased) {
#pragma unroll
    for (int r = 0; r < kPer; ++r) {
      const int e = lane + 32 * r;
      key[r] = e >= p.experts ? 0 : order_key(biased ? v[r] + p.bias[e] : v[r]);
    }
  };
  if (p.select_by_logits) order(p.bias != nullptr);
  if (p.score == kSoftmax) {
    float top = v[0];
#pragma unroll
    for (int r = 1; r < kPer; ++r) top = fmaxf(top, v[r]);
    top = lanes_max(top);
#pragma unroll
    for (int r = 0; r < kPer; ++r) v[r] = expf(v[r] - top);
    const float sum = warp_sum(v);
#pragma unroll
    for (int r = 0; r < kPer; ++r) v[r] = v[r] / sum;
  } else {
#pragma unroll
    for (int r = 0; r < kPer; ++r) v[r] = score_of(p.score, v[r]);
  }
#pragma unroll
  for (int r = 0; r < kPer; ++r) {
    const int e = lane + 32 * r;
    if (e < p.experts) p.scores[t * p.experts + e] = v[r];
  }

  const bool here = lane < p.top_k;
  const int64_t slot = t * p.top_k + lane;
  int64_t chosen = 0;
  if (p.given_idx == nullptr) {
    if (!p.select_by_logits) order(p.bias != nullptr);
    if (p.topk_groups < p.groups) close_groups(p, key, scratch);
    chosen = choose(p, key);
    if (here) p.topk_idx[slot] = chosen;
  } else if (here) {
    chosen = p.given_idx[slot];
  }
  const bool known = 0 <= chosen && chosen < p.experts;
  const bool counted = here && chosen != -1;  // a slot that names an expert, known or not
  float w = of_expert(v, known ? static_cast<unsigned>(chosen) : 0);
  if (p.softmax_after_topk) w = known ? logits[chosen] : 0.0f;
  if (!known) w = NAN;
  if (p.softmax_after_topk) {
    const float top = lanes_max(counted ? w : -INFINITY);
    w = counted ? expf(w - top) : 0.0f;
    w = w / lanes_tree_sum(w);
  } else if (p.normalize) {
    w = w / (lanes_tree_sum(counted ? w : 0.0f) + p.epsilon);
  }
  if (here) p.weights[slot] = counted ? w * p.factor : 0.0f;
  if (here && known && (p.padding == nullptr || p.padding[t] == 0)) atomicAdd(count + chosen, 1);
}

// Blocks [b p.blocks, (b + 1) p.blocks) have sequence b.
template <int kPer>
__global__ void __launch_bounds__(kThreads) route_tokens(const __grid_constant__ Params p) {
  extern __shared__ uint32_t scratch[];
  __shared__ int count[kMaxRoutedExperts];
  for (int e = threadIdx.x; e < p.experts; e += kThreads) count[e] = 0;
  __syncthreads();

  const int warp = threadIdx.x / 32;
  const int sequence = blockIdx.x / p.blocks, block = blockIdx.x % p.blocks;
  const int words = p.experts + p.groups * (p.lanes_per_group + 1);
  for (int64_t i = block * kWarps + warp; i < p.length; i += int64_t{p.blocks} * kWarps)
    route_token<kPer>(p, sequence * p.length + i, count, scratch + warp * words);
  __syncthreads();

  wait_for_previous();
  for (int e = threadIdx.x; e < p.experts; e += kThreads)
    if (count[e] > 0)
      atomicAdd(p.tokens_per_expert + int64_t{sequence} * p.experts + e,
                static_cast<unsigned long long>(count[e]));
}

}  // namespace

template <>
void run(const RouterTopk& p, Stream stream) {
  const Device device = p.logits.device;
  const DeviceGuard guard(device);
  const int64_t tokens = p.logits.shape[0], experts = p.logits.shape[1];
  const int64_t sequences = p.tokens_per_expert.shape[0] / experts;
  const int64_t length = tokens / sequences;
  const int64_t most =
      std::max<int64_t>(1, device_info(device).sm_count * (kWarpsPerSm / kWarps) / sequences);
  int share = 32;
  while (share > 1 && share * p.num_groups > 32) share /= 2;
  const Params params{
      .logits = p.logits.as<const float>(),
      .bias = p.selection_bias.as<const float>(),
      .padding = p.padding.as<const uint8_t>(),
      .given_idx = p.given_idx.as<const int64_t>(),
      .scores = p.scores.as<float>(),
      .topk_idx = p.topk_idx.as<int64_t>(),
      .weights = p.topk_weights.as<float>(),
      .tokens_per_expert = p.tokens_per_expert.as<unsigned long long>(),
      .length = length,
      .blocks = static_cast<int>(std::clamp<int64_t>(cdiv(length, kWarps), 1, most)),
      .experts = static_cast<int>(experts),
      .top_k = static_cast<int>(p.topk_weights.shape[1]),
      .groups = static_cast<int>(p.num_groups),
      .topk_groups = static_cast<int>(p.topk_groups),
      .best_per_group = static_cast<int>(p.best_per_group),
      .lanes_per_group = share,
      .score = p.score,
      .select_by_logits = p.select_by_logits,
      .softmax_after_topk = p.softmax_after_topk,
      .normalize = p.normalize,
      .closed_value = p.closed_value,
      .epsilon = p.epsilon,
      .factor = p.routed_scaling_factor};
  const int64_t counts = sequences * experts;
  const cudaStream_t on = stream_of(stream);
  launch(p.op, zero_counts, persistent_grid(device, cdiv(counts, kThreads), 2), kThreads, 0, on,
         params.tokens_per_expert, counts);
  if (tokens == 0) return;
  const bool grouped = p.topk_groups < p.num_groups;
  const size_t words = grouped ? experts + p.num_groups * (share + 1) : 0;
  dispatch_experts(experts, [&]<int kPer>() {
    launch_early(route_tokens<kPer>, static_cast<unsigned>(sequences * params.blocks), kThreads,
                 kWarps * words * sizeof(uint32_t), on, params);
  });
}

// ---- router_topk_backward -----------------------------------------------------------------------

namespace {

constexpr int kGradientWarps = 8;
constexpr int kGradientThreads = 32 * kGradientWarps;
constexpr int kGradientBlocksPerSm = 8;

struct GradientParams {
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
__device__ __forceinline__ void token_gradient(const GradientParams& p, int64_t t) {
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
      const bool named = 0 <= id && id < p.experts;
      idx = named ? static_cast<unsigned>(id) : ~0u;
      d = named ? p.dweights[slot] : 0.0f;
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
__global__ void __launch_bounds__(kGradientThreads)
    gradients(const __grid_constant__ GradientParams p) {
  for (int64_t t = int64_t{blockIdx.x} * kGradientWarps + threadIdx.x / 32; t < p.tokens;
       t += int64_t{gridDim.x} * kGradientWarps)
    token_gradient<kPer>(p, t);
}

}  // namespace

template <>
void run(const RouterTopkBackward& p, Stream stream) {
  const Device device = p.scores.device;
  const DeviceGuard guard(device);
  const int64_t tokens = p.scores.shape[0], experts = p.scores.shape[1];
  if (tokens == 0) return;
  const GradientParams params{.dweights = p.dweights.as<const float>(),
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
  const unsigned grid = persistent_grid(device, cdiv(tokens, kGradientWarps), kGradientBlocksPerSm);
  dispatch_experts(experts, [&]<int kPer>() {
    launch(p.op, gradients<kPer>, grid, kGradientThreads, 0, stream_of(stream), params);
  });
}

}  // namespace fp8moe::cuda
