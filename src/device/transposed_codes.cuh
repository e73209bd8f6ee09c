// A 128x128 tile of codes on its way from token-major registers to channel-major memory.
#pragma once

#include <cstdint>

#include "device/memory.cuh"

namespace fp8moe::cuda {

// 4x4 bytes transposed: byte i of word j becomes byte j of word i.
__device__ __forceinline__ void transpose_4x4(uint32_t (&w)[4]) {
  const uint32_t low01 = __byte_perm(w[0], w[1], 0x5140), low23 = __byte_perm(w[2], w[3], 0x5140);
  const uint32_t high01 = __byte_perm(w[0], w[1], 0x7362), high23 = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(low01, low23, 0x5410), w[1] = __byte_perm(low01, low23, 0x7632);
  w[2] = __byte_perm(high01, high23, 0x5410), w[3] = __byte_perm(high01, high23, 0x7632);
}

// Codes of two channels at two tokens each, twice -> the first channel's at all four tokens, and
// the second's. Half of what transpose_4x4 takes, where codes come in pairs anyway.
__device__ __forceinline__ void transpose_pairs(uint32_t& tokens01, uint32_t& tokens23) {
  const uint32_t first = __byte_perm(tokens01, tokens23, 0x6420);
  tokens23 = __byte_perm(tokens01, tokens23, 0x7531), tokens01 = first;
}

// In shared memory. 16 lanes share a token, 8 channels each, and a warp writes two neighbouring
// groups of 4 tokens. Word g of a channel, its codes at tokens 4 g ... 4 g + 3, lies at g ^
// swizzle: no bank conflicts, and 4 aligned words stay together, from channel 64 on swapped by
// twos.
struct TransposedCodes {
  alignas(16) uint32_t word[128][32];

  static __device__ __forceinline__ int swizzle(int channel) { return 4 * (channel / 8 & 7); }
  static __device__ __forceinline__ int swap(int channel) { return channel / 64 * 2; }

  // codes[j]: 4 channels from `channel` on at token 4 group + j.
  __device__ __forceinline__ void put(int channel, int group, uint32_t (&codes)[4]) {
    transpose_4x4(codes);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      word[channel + i][group ^ (swizzle(channel) | swap(channel))] = codes[i];
  }
  // Channels below `channels` to rows of out, `ld` apart, tokens below `tokens` (a multiple of 16)
  // of each: 8 threads a channel, 16 tokens a thread. 256 threads, after a barrier.
  __device__ __forceinline__ void store_to(uint8_t* out, int64_t ld, int channels,
                                           int tokens) const {
    constexpr int kStep = 32;
    const int chunk = threadIdx.x % 8, begin = threadIdx.x / 8;
    const int at = 4 * chunk ^ swizzle(begin);
    uint4 codes[128 / kStep];  // read whether stored or not: no branches
#pragma unroll
    for (int i = 0; i < 128 / kStep; ++i) {  // begin < kStep: the swizzles have no bits in common
      codes[i] = *reinterpret_cast<const uint4*>(&word[begin + i * kStep][at ^ swizzle(i * kStep)]);
      if (swap(i * kStep) != 0) codes[i] = {codes[i].z, codes[i].w, codes[i].x, codes[i].y};
    }
    if (16 * chunk >= tokens) channels = 0;
    out += begin * ld + 16 * chunk;
#pragma unroll
    for (int i = 0; i < 128 / kStep; ++i, out += kStep * ld)
      if (begin + i * kStep < channels) store(out, codes[i]);
  }
};

}  // namespace fp8moe::cuda
