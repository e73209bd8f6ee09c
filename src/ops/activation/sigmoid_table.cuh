// The sigmoid of bf16 gates, read from shared memory: 4 instructions a value instead of 16.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "device/convert.cuh"

namespace fp8moe::cuda {

// Below kLow the sigmoid is that of 0, from kHigh on it is constant: 3,824 magnitudes of either
// sign for SwiGLU. Negative gates lie where bit 14 of a 16-bit byte address, the sign shifted by
// one, puts them (31,680 bytes).
template <class Act>
struct SigmoidTable {
  static constexpr uint32_t kLow = Act::kLowGate, kHigh = 0x42AF;  // 87.5 as bf16
  static constexpr int kMagnitudes = kHigh - kLow + 1;
  static constexpr int kNegative = (1 << 14) / sizeof(float);
  static_assert(kMagnitudes <= kNegative);
  float of[kNegative + kMagnitudes];
  uint32_t minus_low;  // of two gates; one of two immediates costs an instruction at every use

  // By the whole block; the caller synchronizes.
  __device__ __forceinline__ void fill(const Act& act) {
    if (threadIdx.x == 0) minus_low = 0x10001u * (0x10000u - kLow);
    for (int i = threadIdx.x; i < 2 * kMagnitudes; i += blockDim.x) {
      const bool negative = i >= kMagnitudes;
      const int m = negative ? i - kMagnitudes : i;
      const float gate = __uint_as_float((kLow + m) << 16);
      of[(negative ? kNegative : 0) + m] = act.sigmoid(negative ? -gate : gate);
    }
  }

  // Sigmoids of two packed gates. Of NaNs some value: every use multiplies by the gate.
  __device__ __forceinline__ float2 two(uint32_t gates) const {
    const uint32_t m =
        __viaddmin_s16x2_relu(gates & 0x7FFF7FFFu, minus_low, 0x10001u * (kHigh - kLow));
    const uint32_t sign = gates >> 1 & 0x10001u << 14;
    const uint32_t at = m << 2 | sign;
    const auto* bytes = reinterpret_cast<const unsigned char*>(of);
    return {*reinterpret_cast<const float*>(bytes + (at & 0xFFFFu)),
            *reinterpret_cast<const float*>(bytes + (at >> 16))};
  }

  __device__ __forceinline__ void eight(const uint4& gates, float (&sigmoid)[8]) const {
    const uint32_t words[4] = {gates.x, gates.y, gates.z, gates.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = two(words[i]);
      sigmoid[2 * i] = pair.x, sigmoid[2 * i + 1] = pair.y;
    }
  }
};

}  // namespace fp8moe::cuda
