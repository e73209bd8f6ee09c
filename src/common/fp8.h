// FP8 codes (OCP E4M3 without infinities, E5M2): encode, decode, and which codes a shift by a power
// of two makes zero. Branch-free where a loop over them should vectorize.
#pragma once

#include <cstdint>

#include "common/bits.h"
#include "common/host_device.h"

namespace fp8moe {

struct E4M3 {
  static constexpr int kMantissa = 3;
  static constexpr int kBias = 7;
  static constexpr uint32_t kMaxCode = 0x7E;   // 448
  static constexpr uint32_t kFirstNan = 0x7F;  // codes from here on are copied, never shifted
  static constexpr float kMax = 448.0f;
};

struct E5M2 {
  static constexpr int kMantissa = 2;
  static constexpr int kBias = 15;
  static constexpr uint32_t kMaxCode = 0x7B;   // 57344
  static constexpr uint32_t kFirstNan = 0x7C;  // infinity, then NaNs
  static constexpr float kMax = 57344.0f;
};

// Round to nearest even, saturating: |x| over the maximum and Inf become it, NaN becomes 0x7F.
template <typename F>
FP8MOE_HD uint8_t fp8_encode(float x) {
  constexpr int kDrop = 23 - F::kMantissa;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - F::kBias) << F::kMantissa;
  constexpr uint32_t kMinNormal = static_cast<uint32_t>(127 - F::kBias + 1) << 23;
  // A float whose ulp is the subnormal unit 2^(1 - bias - mantissa): adding it rounds there.
  constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 1 - F::kBias - F::kMantissa + 23) << 23;

  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t round = (1u << (kDrop - 1)) - 1u + ((magnitude >> kDrop) & 1u);
  const uint32_t normal = ((magnitude + round) >> kDrop) - kRebias;
  const uint32_t subnormal =
      bit_cast<uint32_t>(bit_cast<float>(magnitude) + bit_cast<float>(kMagic)) - kMagic;
  uint32_t code = magnitude < kMinNormal ? subnormal : normal;
  code = code > F::kMaxCode ? F::kMaxCode : code;
  const uint32_t nan = magnitude > 0x7F800000u;
  return static_cast<uint8_t>(nan ? 0x7Fu : (code | sign));
}

template <typename F>
FP8MOE_HD float fp8_decode(uint8_t code) {
  constexpr int kDrop = 23 - F::kMantissa;
  constexpr float kUnit = F::kMantissa == 3 ? 0x1p-9f : 0x1p-16f;
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7Fu;
  const uint32_t normal = (magnitude << kDrop) + (static_cast<uint32_t>(127 - F::kBias) << 23);
  const uint32_t subnormal = bit_cast<uint32_t>(static_cast<float>(magnitude) * kUnit);
  uint32_t bits = magnitude < (1u << F::kMantissa) ? subnormal : normal;
  // E4M3 has the one NaN 0x7F; E5M2 Inf 0x7C and NaN 0x7D..0x7F.
  if (F::kMantissa == 3) {
    bits = magnitude == 0x7Fu ? 0x7FC00000u : bits;
  } else {
    bits = magnitude == 0x7Cu ? 0x7F800000u : magnitude > 0x7Cu ? 0x7FC00000u : bits;
  }
  return bit_cast<float>(bits | sign);
}

// Every finite code is zero after a shift by this much.
template <typename F>
constexpr int kFp8ShiftToZero = (1 << (7 - F::kMantissa)) + F::kMantissa + 1;

// The largest magnitude code whose decode(code) * 2^-k, k >= 0, rounds to zero; 0: none. Those
// codes stand for at most half the subnormal unit after the shift, and half of it is even's.
template <typename F>
FP8MOE_HD uint32_t fp8_flushed_by(int k) {
  constexpr int kM = F::kMantissa;
  if (k <= 0) return 0;
  const uint32_t code = k <= kM ? 1u << (k - 1) : static_cast<uint32_t>(k - kM) << kM;
  return code < F::kMaxCode ? code : F::kMaxCode;
}

// Its inverse: the smallest k that makes the magnitude code zero. 0: it is zero, or never is (Inf,
// NaN).
template <typename F>
FP8MOE_HD int fp8_flushing_shift(uint32_t magnitude) {
  constexpr int kM = F::kMantissa;
  if (magnitude == 0 || magnitude >= F::kFirstNan) return 0;
  const uint32_t rest = magnitude - 1;
  return static_cast<int>(rest >> kM) + 1 + (rest > 0) + (rest > 1) + (kM > 2 && rest > 3);
}

}  // namespace fp8moe
