// unpermute_unpad_backward with probs: a block a token, a warp a row of it: dy = prob * dout, and
// the dot <y[row], dout[t]> in the order of common/reduce.h. Further blocks zero the padding rows.
#include "common/dispatch.h"
#include "device/convert.cuh"
#include "device/memory.cuh"
#include "device/reduce.cuh"
#include "device/runtime.h"
#include "device/slots.cuh"
#include "ops/backends.h"
#include "ops/permute/zero_padding.cuh"

namespace fp8moe::cuda {
namespace {

constexpr int kBatch = 4;        // vectors of each operand in flight in a lane
constexpr int kBlocksPerSm = 4;  // what registers allow without spills

struct Params {
  const char* dout;    // [T, C]
  const char* y;       // [R, C]
  char* dy;            // [R, C]
  const float* probs;  // [T, S]
  float* dprobs;       // [T, S]
  PlanView plan;
  int slots;
  int vectors;  // 16 bytes each, in a row
  uint64_t read_policy;
  int64_t tokens;
  unsigned zero_blocks_an_expert;
};

// The row of a kept slot, by one warp.
template <typename T>
__device__ __forceinline__ float scale_and_dot(const char* dout, const char* y, char* dy,
                                               float prob, int vectors, uint64_t read_policy,
                                               int lane) {
  constexpr int kN = 16 / sizeof(T);
  constexpr int kLanes = 128 / kN;  // of a 128-term tile: 16 or 32
  float dot = 0.0f;
  dout += 16 * lane, y += 16 * lane, dy += 16 * lane;
  for (int left = vectors - lane; left + lane > 0; left -= 32 * kBatch) {
    uint4 g[kBatch], r[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const bool has = 32 * j < left;
      g[j] = has ? load<uint4>(dout + 512 * j) : uint4{0, 0, 0, 0};
      r[j] = has ? load<uint4>(y + 512 * j, read_policy) : uint4{0, 0, 0, 0};
    }
    float sum[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      float a[kN], b[kN], term[kN];
      unpack<T>(&g[j].x, a);
      unpack<T>(&r[j].x, b);
#pragma unroll
      for (int i = 0; i < kN; ++i) term[i] = b[i] * a[i];
#pragma unroll
      for (float& x : a) x *= prob;
      if (32 * j < left) store(dy + 512 * j, pack<T>(a));
      sum[j] = tree_sum<kN>(term);
    }
    // Lane l has the tiles of vector 2 (l % 2) + l / 2 % 2; they are added in their order.
    const float tile = lanes_tree_sum_each<kLanes>(sum);
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
#pragma unroll
      for (int group = 0; group < 32; group += kLanes)
        dot += __shfl_sync(kFullWarp, tile, group + j % 2 * 2 + j / 2);
    dout += 512 * kBatch, y += 512 * kBatch, dy += 512 * kBatch;
  }
  return dot;
}

template <typename T>
__global__ void __launch_bounds__(256, kBlocksPerSm) backward(const __grid_constant__ Params p) {
  extern __shared__ KeptSlot kept[];
  const int64_t token = blockIdx.x;
  if (token >= p.tokens)  // last: they fill the end, where blocks of tokens take longer
    return zero_padding(p.plan, static_cast<unsigned>(token - p.tokens), p.zero_blocks_an_expert,
                        p.dy, p.vectors);
  const int32_t* row_of = p.plan.row_of + token * p.slots;
  float* dprobs = p.dprobs + token * p.slots;
  const int n = keep_slots(row_of, p.probs + token * p.slots, p.slots, kept);
  for (int s = threadIdx.x; s < p.slots; s += blockDim.x)
    if (row_of[s] < 0) dprobs[s] = 0.0f;
  const int lane = threadIdx.x % 32;
  const int64_t row_bytes = int64_t{p.vectors} * 16;
  for (int i = threadIdx.x / 32; i < n; i += blockDim.x / 32) {
    const KeptSlot slot = kept[i];
    const float dot =
        scale_and_dot<T>(p.dout + token * row_bytes, p.y + slot.row * row_bytes,
                         p.dy + slot.row * row_bytes, slot.prob, p.vectors, p.read_policy, lane);
    if (lane == 0) dprobs[slot.slot] = dot;
  }
}

}  // namespace

template <>
void run(const UnpermuteUnpadBackward& p, Stream stream) {
  if (!p.probs.defined())
    return run(PermutePad{.x = {.data = p.dout}, .plan = p.plan, .y = {.data = p.dy}}, stream);
  if (p.plan.tokens == 0) return;
  const DeviceGuard guard(p.dy.device);
  const auto zero_blocks_an_expert = zero_padding_blocks_an_expert(p.plan);
  const Params params{.dout = p.dout.as<const char>(),
                      .y = p.y.as<const char>(),
                      .dy = p.dy.as<char>(),
                      .probs = p.probs.as<const float>(),
                      .dprobs = p.dprobs.as<float>(),
                      .plan = view_of(p.plan),
                      .slots = static_cast<int>(p.plan.slots),
                      .vectors = static_cast<int>(p.dout.shape[1] * size_of(p.dout.dtype) / 16),
                      .read_policy = read_once_policy(p.dy),
                      .tokens = p.plan.tokens,
                      .zero_blocks_an_expert = zero_blocks_an_expert};
  const auto warps = static_cast<unsigned>(std::min<int64_t>(p.plan.slots, 8));
  dispatch_float(p.dout.dtype, [&]<typename T>() {
    launch("unpermute_unpad_backward", backward<T>,
           static_cast<unsigned>(p.plan.tokens + zero_blocks_an_expert * p.plan.experts),
           warps * 32, p.plan.slots * sizeof(KeptSlot), stream_of(stream), params);
  });
}

}  // namespace fp8moe::cuda
