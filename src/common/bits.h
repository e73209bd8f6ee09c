// Reinterpreting bits, and bf16 / fp16 <-> f32, the same on both backends.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace fp8moe {

template <typename To, typename From>
FP8MOE_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Storage types: 16 bits whose meaning is the type's name.
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

FP8MOE_HD float to_float(float x) { return x; }
FP8MOE_HD float to_float(Bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
FP8MOE_HD float to_float(Fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7FFFu;
  const uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
  const uint32_t special = (magnitude << 13) | 0x7F800000u;
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  const uint32_t bits = magnitude >= 0x7C00u  ? special
                        : magnitude >= 0x400u ? normal
                                              : bit_cast<uint32_t>(subnormal);
  return bit_cast<float>(bits | sign);
}

// Round to nearest even; every NaN becomes 0x7FFF, as the GPU's conversion has it.
template <typename T>
FP8MOE_HD T from_float(float x);

template <>
FP8MOE_HD float from_float<float>(float x) {
  return x;
}
template <>
FP8MOE_HD Bf16 from_float<Bf16>(float x) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;  // the conversion of one number has a quarter of this one's rate
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(0.0f));
  return {static_cast<uint16_t>(pair >> 16)};
#else
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : rounded)};
#endif
}
template <>
FP8MOE_HD Fp16 from_float<Fp16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t normal =
      (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - ((127u - 15u) << 23)) >> 13;
  // Below 2^-14 the unit is 2^-24: adding 0.5 (whose ulp is 2^-24) rounds there.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  uint32_t code = magnitude < 0x38800000u ? subnormal : normal;
  if (magnitude >= 0x47800000u || code > 0x7C00u) code = 0x7C00u;  // 2^16 and above
  if (magnitude > 0x7F800000u) return {static_cast<uint16_t>(0x7FFFu)};
  return {static_cast<uint16_t>(code | sign)};
}

}  // namespace fp8moe
