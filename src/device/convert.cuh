// Packed registers <-> f32, with the hardware's conversions; bit-equal to common/bits.h and
// common/fp8.h (tests/gpu compares them over every input of 16 bits).
#pragma once

#include <cstdint>

#include "common/bits.h"
#include "common/fp8.h"

namespace fp8moe::cuda {

// Two values of a 16-bit type in one register, the first in the low half.
template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t w);

template <>
__device__ __forceinline__ float2 unpack2<Bf16>(uint32_t w) {
  return {__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u)};
}
template <>
__device__ __forceinline__ float2 unpack2<Fp16>(uint32_t w) {
  float2 v;
  asm("{\n .reg .b16 lo, hi;\n mov.b32 {lo, hi}, %2;\n cvt.f32.f16 %0, lo;\n cvt.f32.f16 %1, hi;\n}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(w));
  return v;
}

// Round to nearest even, NaN to 0x7FFF.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float first, float second);

template <>
__device__ __forceinline__ uint32_t pack2<Bf16>(float first, float second) {
  uint32_t w;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(second), "f"(first));
  return w;
}
template <>
__device__ __forceinline__ uint32_t pack2<Fp16>(float first, float second) {
  uint32_t w;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(second), "f"(first));
  return w;
}

// Packed words of T -> f32. N values: N words for f32, N / 2 for the 16-bit types.
template <typename T, int N>
__device__ __forceinline__ void unpack(const uint32_t* words, float (&v)[N]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = __uint_as_float(words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float2 pair = unpack2<T>(words[i]);
      v[2 * i] = pair.x;
      v[2 * i + 1] = pair.y;
    }
  }
}

// f32 -> 16 bytes of T.
template <typename T>
__device__ __forceinline__ uint4 pack(const float (&v)[16 / sizeof(T)]) {
  if constexpr (sizeof(T) == 4)
    return {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
            __float_as_uint(v[3])};
  else
    return {pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]), pack2<T>(v[4], v[5]), pack2<T>(v[6], v[7])};
}

// fp8_encode of two values, the first in the low byte: round to nearest even, saturating, NaN 0x7F.
template <typename F>
__device__ __forceinline__ uint32_t fp8_encode2(float first, float second) {
  uint16_t codes;
  if constexpr (F::kMantissa == 3)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
}

template <typename F>
__device__ __forceinline__ uint32_t fp8_encode4(float a, float b, float c, float d) {
  return fp8_encode2<F>(a, b) | fp8_encode2<F>(c, d) << 16;
}

// v times `scale`, or divided by it: rounded to nearest, under any compiler flag.
template <bool kDivides>
__device__ __forceinline__ float scaled(float v, float scale) {
  return kDivides ? __fdiv_rn(v, scale) : v * scale;
}

// The codes of eight values times `scale`, or divided by it.
template <typename F, bool kDivides = false>
__device__ __forceinline__ uint2 fp8_encode8(const float* v, float scale) {
  const auto of = [&](int i) { return scaled<kDivides>(v[i], scale); };
  return {fp8_encode4<F>(of(0), of(1), of(2), of(3)), fp8_encode4<F>(of(4), of(5), of(6), of(7))};
}

// fp8_decode of the two codes in the low 16 bits; exact (NaNs keep no payload).
template <typename F>
__device__ __forceinline__ float2 fp8_decode2(uint32_t codes) {
  uint32_t halves;
  if constexpr (F::kMantissa == 3)
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  else
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  return unpack2<Fp16>(halves);
}

template <typename F>
__device__ __forceinline__ void fp8_decode4(uint32_t codes, float* v) {
  const float2 low = fp8_decode2<F>(codes), high = fp8_decode2<F>(codes >> 16);
  v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
}

}  // namespace fp8moe::cuda
