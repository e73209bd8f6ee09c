// quantize_lora: w2 [E, C, parts], the high and low FP8 parts of a bf16 factor.
#include "common/backends.h"
#include "common/lora.h"
#include "ops/lora/lora_rows.cuh"

namespace fp8moe::cuda {
namespace {

struct QuantizeParams {
  const uint16_t* factor;  // [E, rank, C] or [E, C, rank]
  uint8_t* w2;
  float* scale_inv;
  int c, rank;
  float eps;
  ScaleKind kind;
};

constexpr int kThreads = 128;

// A block per 128 of C, a thread for each.
template <int kRanks, bool kRankFirst>
__global__ __launch_bounds__(kThreads) void quantize_parts(
    const __grid_constant__ QuantizeParams p) {
  __shared__ float maxima[kThreads / 32];
  const int at = static_cast<int>(blockIdx.x * 128 + threadIdx.x);
  const int64_t base = int64_t{blockIdx.y} * p.rank * p.c;
  float v[kRanks];
#pragma unroll
  for (int j = 0; j < kRanks; j += 8) {
    uint32_t words[4] = {};
    if (at < p.c && j < p.rank) {
      if constexpr (kRankFirst) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          words[i / 2] |= uint32_t{__ldg(p.factor + base + int64_t{j + i} * p.c + at)}
                          << 16 * (i % 2);
      } else {
        const uint4 eight = load<uint4>(p.factor + base + int64_t{at} * p.rank + j);
        words[0] = eight.x, words[1] = eight.y, words[2] = eight.z, words[3] = eight.w;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = unpack2<Bf16>(words[i]);
      v[j + 2 * i] = two.x, v[j + 2 * i + 1] = two.y;
    }
  }
  const float of_warp = lanes_max<32>(amax(v));
  if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = of_warp;
  __syncthreads();
  const TileScale scale = lora_scale(amax(maxima), E4M3::kMax, p.kind, p.eps);
  if (threadIdx.x == 0) p.scale_inv[blockIdx.y * gridDim.x + blockIdx.x] = scale.scale_inv;
  if (at >= p.c) return;

  constexpr int kParts = static_cast<int>(lora_depth(kRanks)) / kRanks;
  uint8_t* const to = p.w2 + (int64_t{blockIdx.y} * p.c + at) * (kParts * kRanks);
#pragma unroll
  for (int j = 0; j < kRanks; j += 16) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float w = v[j + 4 * i + n];
        x[n] = p.kind == ScaleKind::amax ? __fdiv_rn(w, scale.scale) : w * scale.scale;
      }
      high[i] = fp8_encode4<E4M3>(x[0], x[1], x[2], x[3]);
      float got[4];
      fp8_decode4<E4M3>(high[i], got);
      low[i] = fp8_encode4<E4M3>(x[0] - got[0], x[1] - got[1], x[2] - got[2], x[3] - got[3]);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint32_t (&four)[4] = is_low(true, part) ? low : high;
      store(to + part * kRanks + j, uint4{four[0], four[1], four[2], four[3]});
    }
  }
}

}  // namespace

template <>
void run(const QuantizeLora& p, Stream stream) {
  const DeviceGuard guard(p.w2.data.device);
  const int64_t rank = p.factor.shape[p.rank_first ? 1 : 2], c = p.w2.data.shape[1];
  const QuantizeParams params = {.factor = p.factor.as<const uint16_t>(),
                                 .w2 = p.w2.data.as<uint8_t>(),
                                 .scale_inv = p.w2.scale_inv.as<float>(),
                                 .c = static_cast<int>(c),
                                 .rank = static_cast<int>(rank),
                                 .eps = p.rule.eps,
                                 .kind = p.rule.kind};
  const dim3 blocks(static_cast<unsigned>(cdiv(c, kTile)),
                    static_cast<unsigned>(p.factor.shape[0]));
  with_ranks(rank, [&]<int kRanks>() {
    const auto go = [&]<bool kRankFirst>() {
      launch("quantize_lora", quantize_parts<kRanks, kRankFirst>, blocks, kThreads, 0,
             stream_of(stream), params);
    };
    p.rank_first ? go.template operator()<true>() : go.template operator()<false>();
  });
}

}  // namespace fp8moe::cuda
