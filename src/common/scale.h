// The scale rule: from the largest magnitude of a tile to the scale of its codes.
// TransformerEngine's blockwise quantizers have the same rule but for the cap at 2^126, which keeps
// scale_inv a normal number (theirs may be 2^-127, a subnormal that flush-to-zero code loses), and
// holds for every dtype (theirs is 2^15 for a float16 tile whose scale overflows).
#pragma once

#include <cstdint>

#include "common/bits.h"
#include "common/host_device.h"
#include "fp8moe/ops.h"

namespace fp8moe {

struct TileScale {
  float scale;      // codes are encode(x * scale); by the amax rule, encode(x / scale)
  float scale_inv;  // what is stored: x is about decode(code) * scale_inv
};

// The power-of-two rule. amax: fmax over |x| of the tile, NaNs ignored. fp8_max: F::kMax.
// Both formats' maxima are 1.75 2^n, so 2^floor(log2(RN(fp8_max / a))) needs no division: a's
// exponent, one more where its significand is over 1.75. At most 2^126.
FP8MOE_HD TileScale pow2_scale(float amax, float fp8_max, float eps) {
  const float a = amax < eps ? eps : amax;
  const uint32_t exponent = (bit_cast<uint32_t>(a) + 0x1FFFFFu) >> 23;
  const uint32_t field = (bit_cast<uint32_t>(fp8_max) >> 23) + 127u - exponent;
  uint32_t scale = field > 253u ? 253u : field;
  if (!(a > 0.0f) || a > 0x1.fffffep127f) scale = 127u;  // 0, NaN or Inf
  return {bit_cast<float>(scale << 23), bit_cast<float>((254u - scale) << 23)};
}

// The float32 scales of most other libraries: scale = scale_inv = RN(a / fp8_max), and values are
// divided by it. At least 2^-126: then a normal number, and every quotient is in FP8's range.
FP8MOE_HD TileScale amax_scale(float amax, float fp8_max, float eps) {
  const float a = amax < eps ? eps : amax;
  if (!(a > 0.0f) || a > 0x1.fffffep127f) return {1.0f, 1.0f};  // 0, NaN or Inf
  const float scale = a / fp8_max;
  return scale < 0x1p-126f ? TileScale{0x1p-126f, 0x1p-126f} : TileScale{scale, scale};
}

// The float32 scales of SGLang and DeepEP: scale_inv = a RN(1 / fp8_max), at least 2^-126, and
// values are multiplied by fp8_max / a, which a GPU approximates as they do.
FP8MOE_HD TileScale approx_scale(float amax, float fp8_max, float eps) {
  const float a = amax < eps ? eps : amax;
  if (!(a > 0.0f) || a > 0x1.fffffep127f) return {1.0f, 1.0f};  // 0, NaN or Inf
  const float scale_inv = a * (1.0f / fp8_max);
  if (scale_inv < 0x1p-126f) return {0x1p126f, 0x1p-126f};
#if defined(__CUDA_ARCH__)
  float scale;  // a is at most 2^126 here, or the instruction gives 0
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(scale) : "f"(fp8_max), "f"(a));
  return {a > 0x1p126f ? fp8_max / a : scale, scale_inv};
#else
  return {fp8_max / a, scale_inv};
#endif
}

// By a rule's kind. overflow: the largest finite value of x's dtype, for when fp8_max / amax
// overflows.
FP8MOE_HD TileScale tile_scale(float amax, float fp8_max, ScaleKind kind, float eps,
                               float overflow) {
  if (kind == ScaleKind::pow2) return pow2_scale(amax, fp8_max, eps);
  if (kind == ScaleKind::amax) return amax_scale(amax, fp8_max, eps);
  if (kind == ScaleKind::approx) return approx_scale(amax, fp8_max, eps);
  const float a = amax < eps ? eps : amax;
  if (!(a > 0.0f) || a > 0x1.fffffep127f) return {1.0f, 1.0f};  // 0, NaN or Inf
  float scale = fp8_max / a;
  if (scale > 0x1.fffffep127f) scale = overflow;
  return {scale, 1.0f / scale};
}

// A positive normal power of two: what the FP8-domain transposes accept.
FP8MOE_HD bool is_pow2_scale(float s) {
  const uint32_t bits = bit_cast<uint32_t>(s);
  return (bits & 0x807FFFFFu) == 0 && bits != 0 && bits != 0x7F800000u;
}

// log2(s) + 127 of such a scale.
FP8MOE_HD int exponent_field(float s) { return static_cast<int>(bit_cast<uint32_t>(s) >> 23); }

}  // namespace fp8moe
