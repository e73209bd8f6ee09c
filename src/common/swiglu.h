// SwiGLU and its derivative in f32, in one pinned order of operations.
#pragma once

#include <cmath>

#include "common/bits.h"
#include "common/host_device.h"

namespace fp8moe {

// 1 / (1 + e^-x), relative error under 2^-22; 0 where that is under 2^-126 (x below about -87.3).
// Made of operations that both backends round alike, few enough for a GPU to do at memory speed. A
// NaN need not come out: every use multiplies by x.
FP8MOE_HD float pinned_sigmoid(float x) {
  constexpr float kBound = 88.0f;  // e^88 is under 2^127, and 1 + e^-88 is 1
#if defined(__CUDA_ARCH__)
  const float y = fminf(fmaxf(-x, -kBound), kBound);
#else
  const float y = -x < -kBound ? -kBound : -x > kBound ? kBound : -x;
#endif
  // e^y = 2^n 2^f, |f| <= 1/2: adding 1.5 2^23 rounds y log2(e) to an integer, in the low bits.
  constexpr float kRound = 0x1.8p23f;
  const float shifted = std::fma(y, 0x1.715476p+0f, kRound);
  const float n = shifted - kRound;
  const float f = std::fma(y, 0x1.4ae0cp-26f, std::fma(y, 0x1.715476p+0f, -n));
  float p = std::fma(f, 0x1.5bb9e4p-10f, 0x1.3ceab4p-7f);  // 2^f, minimax
  p = std::fma(p, f, 0x1.c6b754p-5f);
  p = std::fma(p, f, 0x1.ebf9bcp-3f);
  p = std::fma(p, f, 0x1.62e42ap-1f);
  p = std::fma(p, f, 1.0f);
  const float e = bit_cast<float>(bit_cast<uint32_t>(p) + (bit_cast<uint32_t>(shifted) << 23));
  const float d = 1.0f + e;
#if defined(__CUDA_ARCH__)
  // One Newton step from the hardware's estimate rounds 1 / d correctly for d in [1, 2^126]; above,
  // the estimate is 0 and stays 0.
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(d));
  return std::fma(estimate, std::fma(-d, estimate, 1.0f), estimate);
#else
  return d > 0x1p126f ? 0.0f : 1.0f / d;
#endif
}

struct SwigluInput {
  float gate;      // after the limit
  float up;        // after the limit
  bool gate_open;  // the limit lets the gradient through
  bool up_open;
};

// limit > 0: gate <= limit, |up| <= limit; NaN passes. Without branches, so that a loop vectorizes.
FP8MOE_HD SwigluInput clamp_swiglu(float gate, float up, float limit) {
  const float bound = limit > 0.0f ? limit : bit_cast<float>(0x7F800000u);
  const bool gate_open = !(gate > bound);
  const bool up_open = !(up > bound) & !(up < -bound);
  return {gate_open ? gate : bound,
          up > bound    ? bound
          : up < -bound ? -bound
                        : up,
          gate_open, up_open};
}

// ((gate sigmoid(gate)) up) prob
FP8MOE_HD float swiglu(SwigluInput z, float sigmoid, float prob) {
  return ((z.gate * sigmoid) * z.up) * prob;
}

struct SwigluGrad {
  float dgate;
  float dup;
  float dprob;  // this element's term of the sum
};

// prob comes last, as in swiglu: a kernel may fold it into the scale of the codes
// (docs/reference/numerics.md).
FP8MOE_HD SwigluGrad swiglu_grad(SwigluInput z, float sigmoid, float prob, float dh) {
  const float silu = z.gate * sigmoid;
  const float dsilu = std::fma(silu, 1.0f - sigmoid, sigmoid);
  const float dup = dh * silu;
  const float dgate = (dh * dsilu) * z.up;
  return {z.gate_open ? dgate * prob : 0.0f, z.up_open ? dup * prob : 0.0f, dup * z.up};
}

}  // namespace fp8moe
