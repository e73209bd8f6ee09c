// unpermute_unpad and its gradient; permute_pad_backward, which is the same sum over rows.
#include <algorithm>

#include "common/backends.h"
#include "common/dispatch.h"
#include "device/convert.cuh"
#include "device/memory.cuh"
#include "device/plan.cuh"
#include "device/reduce.cuh"
#include "device/runtime.h"
#include "device/slots.cuh"

namespace fp8moe::cuda {

// ---- unpermute_unpad and permute_pad_backward ---------------------------------------------------
// A block per token: its kept slots in shared memory, then 16 bytes per thread of up to kSumBatch
// rows in flight.

namespace {

constexpr int kSumThreads = 128;
constexpr int kSumBatch = 8;  // rows in flight

struct SumParams {
  const char* y;               // [R, C]
  const int64_t* peers;        // [S]: addresses of the rows of each slot, or null
  int32_t first[kMostPeers];   // with peers: rows behind them
  const int32_t* row_offsets;  // [S + 1]
  char* out;                   // [T, C]
  const int32_t* row_of;       // [T, S]
  const float* probs;          // [T, S] or null
  const float* row_dprobs;     // [R] or null
  float* dprobs;               // [T, S]
  int slots;
  int vectors;  // 16 bytes each, in a row
  uint64_t read_policy;
};

// The row of a kept slot, where the rank of the slot has it.
__device__ __forceinline__ const char* row_at_peer(const SumParams& p, const KeptSlot& kept) {
  const int row = p.first[kept.slot] + kept.row - __ldg(p.row_offsets + kept.slot);
  return reinterpret_cast<const char*>(__ldg(p.peers + kept.slot)) + int64_t{row} * p.vectors * 16;
}

// kPeers: each slot's rows lie with another rank.
template <typename T, bool kPeers>
__global__ void __launch_bounds__(kSumThreads) sum_rows(const __grid_constant__ SumParams p) {
  extern __shared__ KeptSlot kept[];
  constexpr int kN = 16 / sizeof(T);
  const int64_t token = blockIdx.x;
  const int32_t* row_of = p.row_of + token * p.slots;
  const int n =
      keep_slots(row_of, p.probs == nullptr ? nullptr : p.probs + token * p.slots, p.slots, kept);

  for (int v = threadIdx.x; v < p.vectors; v += kSumThreads) {
    const char* column = p.y + v * int64_t{16};
    float sum[kN] = {};
    for (int first = 0; first < n; first += kSumBatch) {
      uint4 words[kSumBatch];
#pragma unroll
      for (int j = 0; j < kSumBatch; ++j)
        if (first + j < n)
          words[j] = kPeers ? load<uint4>(row_at_peer(p, kept[first + j]) + v * int64_t{16})
                            : load<uint4>(column + int64_t{kept[first + j].row} * p.vectors * 16,
                                          p.read_policy);
#pragma unroll
      for (int j = 0; j < kSumBatch; ++j)
        if (first + j < n) {
          float x[kN];
          unpack<T>(&words[j].x, x);
          const float prob = kept[first + j].prob;
#pragma unroll
          for (int i = 0; i < kN; ++i) sum[i] = __fmaf_rn(prob, x[i], sum[i]);
        }
    }
    store(p.out + (token * p.vectors + v) * 16, pack<T>(sum));
  }
  if (p.dprobs != nullptr)
    for (int s = threadIdx.x; s < p.slots; s += kSumThreads) {
      const int row = row_of[s];
      p.dprobs[token * p.slots + s] = row < 0 ? 0.0f : p.row_dprobs[row];
    }
}

// out[t] = sum over slots ascending of probs[t,s] * y[row_of[t,s]], each term a fused multiply-add
// onto an f32 that starts at 0, rounded once (probs undefined: 1). y [R, C] f32/f16/bf16; out [T,
// C]. In the same launch dprobs[t,s] = row_dprobs[row_of[t,s]], 0 for a dropped slot; both or
// none.
void gather_sum(const char* op, const Tensor& y, const RoutingPlan& plan, const Tensor& probs,
                const Tensor& out, const Tensor& row_dprobs, const Tensor& dprobs, Stream stream,
                const Tensor& peers = {}, const Tensor& first = {}) {
  if (plan.tokens == 0) return;
  const DeviceGuard guard(out.device);
  SumParams params{.y = y.as<const char>(),
                   .peers = peers.as<const int64_t>(),
                   .row_offsets = plan.row_offsets(),
                   .out = out.as<char>(),
                   .row_of = plan.row_of(),
                   .probs = probs.as<const float>(),
                   .row_dprobs = row_dprobs.as<const float>(),
                   .dprobs = dprobs.as<float>(),
                   .slots = static_cast<int>(plan.slots),
                   .vectors = static_cast<int>(out.shape[1] * size_of(out.dtype) / 16),
                   .read_policy = read_once_policy(out)};
  if (first.defined())
    std::copy_n(first.as<const int32_t>(), plan.slots, static_cast<int32_t*>(params.first));
  dispatch_float(out.dtype, [&]<typename T>() {
    launch(op, peers.defined() ? sum_rows<T, true> : sum_rows<T, false>,
           static_cast<unsigned>(plan.tokens), kSumThreads, plan.slots * sizeof(KeptSlot),
           stream_of(stream), params);
  });
}

}  // namespace

template <>
void run(const PermutePadBackward& p, Stream stream) {
  gather_sum("permute_pad_backward", p.dy, p.plan, {}, p.dx, p.row_dprobs, p.dprobs, stream);
}

template <>
void run(const UnpermuteUnpad& p, Stream stream) {
  gather_sum("unpermute_unpad", p.y, p.plan, p.probs, p.out, {}, {}, stream, p.peers, p.first);
}

// ---- unpermute_unpad_backward -------------------------------------------------------------------
// unpermute_unpad_backward with probs: a block per token, a warp per row of it: dy = prob * dout,
// and the dot <y[row], dout[t]> in the order of common/reduce.h. Further blocks zero the padding
// rows.

namespace {

// Zeroing the padding rows inside the experts, as blocks of a kernel that moves rows.

constexpr int kZeroRows = 16;  // that one block looks at

// A plan of a row_id_map has one expert and align 1, and its padding lies anywhere. An expert of
// any other has at most align - 1 padding rows, behind its tokens.
inline bool padding_anywhere(const RoutingPlan& plan) {
  return plan.experts == 1 && plan.align == 1;
}
inline unsigned zero_padding_blocks_an_expert(const RoutingPlan& plan) {
  const int64_t rows = padding_anywhere(plan) ? plan.rows() : plan.align - 1;
  return static_cast<unsigned>(cdiv(rows, kZeroRows));
}

// Block `block` of experts * blocks_an_expert: its padding rows of y [R, vectors] of 16 bytes.
__device__ __forceinline__ void zero_padding(const PlanView& plan, bool anywhere, unsigned block,
                                             unsigned blocks_an_expert, char* y, int vectors) {
  const unsigned e = block / blocks_an_expert;
  const int first = plan.row_offsets[e] + (anywhere ? 0 : plan.tokens_per_expert[e]) +
                    static_cast<int>(block % blocks_an_expert) * kZeroRows;
  const int rows = min(kZeroRows, plan.row_offsets[e + 1] - first);
  char* from = y + int64_t{first} * vectors * 16;
  for (int v = threadIdx.x; v < rows * vectors; v += blockDim.x)
    if (!anywhere || plan.token_of_row[first + v / vectors] < 0)
      store_streaming(from + int64_t{v} * 16, uint4{0, 0, 0, 0});
}

constexpr int kBackwardBatch = 4;  // vectors of each operand in flight in a lane
constexpr int kBlocksPerSm = 4;    // what registers allow without spills

struct BackwardParams {
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
  bool padding_anywhere;
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
  for (int left = vectors - lane; left + lane > 0; left -= 32 * kBackwardBatch) {
    uint4 g[kBackwardBatch], r[kBackwardBatch];
#pragma unroll
    for (int j = 0; j < kBackwardBatch; ++j) {
      const bool has = 32 * j < left;
      g[j] = has ? load<uint4>(dout + 512 * j) : uint4{0, 0, 0, 0};
      r[j] = has ? load<uint4>(y + 512 * j, read_policy) : uint4{0, 0, 0, 0};
    }
    float sum[kBackwardBatch];
#pragma unroll
    for (int j = 0; j < kBackwardBatch; ++j) {
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
    for (int j = 0; j < kBackwardBatch; ++j)
#pragma unroll
      for (int group = 0; group < 32; group += kLanes)
        dot += __shfl_sync(kFullWarp, tile, group + j % 2 * 2 + j / 2);
    dout += 512 * kBackwardBatch, y += 512 * kBackwardBatch, dy += 512 * kBackwardBatch;
  }
  return dot;
}

template <typename T>
__global__ void __launch_bounds__(256, kBlocksPerSm)
    backward(const __grid_constant__ BackwardParams p) {
  extern __shared__ KeptSlot kept[];
  const int64_t token = blockIdx.x;
  if (token >= p.tokens)  // last: they fill the end, where blocks of tokens take longer
    return zero_padding(p.plan, p.padding_anywhere, static_cast<unsigned>(token - p.tokens),
                        p.zero_blocks_an_expert, p.dy, p.vectors);
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
  const DeviceGuard guard(p.dy.device);
  if (p.plan.tokens == 0) return write_zeros(p.dy, stream);  // what rows there are are padding
  const auto zero_blocks_an_expert = zero_padding_blocks_an_expert(p.plan);
  const BackwardParams params{
      .dout = p.dout.as<const char>(),
      .y = p.y.as<const char>(),
      .dy = p.dy.as<char>(),
      .probs = p.probs.as<const float>(),
      .dprobs = p.dprobs.as<float>(),
      .plan = view_of(p.plan),
      .slots = static_cast<int>(p.plan.slots),
      .vectors = static_cast<int>(p.dout.shape[1] * size_of(p.dout.dtype) / 16),
      .read_policy = read_once_policy(p.dy),
      .tokens = p.plan.tokens,
      .zero_blocks_an_expert = zero_blocks_an_expert,
      .padding_anywhere = padding_anywhere(p.plan)};
  const auto warps = static_cast<unsigned>(std::min<int64_t>(p.plan.slots, 8));
  dispatch_float(p.dout.dtype, [&]<typename T>() {
    launch("unpermute_unpad_backward", backward<T>,
           static_cast<unsigned>(p.plan.tokens + zero_blocks_an_expert * p.plan.experts),
           warps * 32, p.plan.slots * sizeof(KeptSlot), stream_of(stream), params);
  });
}

}  // namespace fp8moe::cuda
