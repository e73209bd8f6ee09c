// SwiGLU and its derivative in f32, in one pinned order of operations.
#pragma once

#include <cmath>

#include "common/bits.h"
#include "common/hd.h"

namespace fp8moe {

// e^x: Cody-Waite reduction and a degree-6 polynomial, relative error under 2 ulp; overflows to Inf
// above 88.72 and underflows to 0 below -87.34 (no subnormals). NaN stays NaN.
FP8MOE_HD float pinned_exp(float x) {
  const float clamped = x < -104.0f ? -104.0f : x > 104.0f ? 104.0f : x;
  const float n = std::fma(clamped, 0x1.715476p+0f, 0x1.8p23f) - 0x1.8p23f;  // round(x log2 e)
  float r = std::fma(n, -0x1.62e400p-1f, clamped);
  r = std::fma(n, -0x1.7f7d1cp-20f, r);
  float p = 0x1.6a07aep-10f;
  p = std::fma(p, r, 0x1.1117a6p-7f);
  p = std::fma(p, r, 0x1.5554aep-5f);
  p = std::fma(p, r, 0x1.55554ap-3f);
  p = std::fma(p, r, 0.5f);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  // 2^n in two factors, so that n = 128 (p a little under 1) does not overflow early.
  const int half = static_cast<int>(n == n ? n : 0.0f) / 2;
  const int rest = static_cast<int>(n == n ? n : 0.0f) - half;
  const float scaled = p * bit_cast<float>(static_cast<uint32_t>(half + 127) << 23) *
                       bit_cast<float>(static_cast<uint32_t>(rest + 127) << 23);
  return x > 88.72283f ? bit_cast<float>(0x7F800000u) : x < -87.33654f ? 0.0f : scaled;
}

FP8MOE_HD float pinned_sigmoid(float x) { return 1.0f / (1.0f + pinned_exp(-x)); }

struct SwigluInput {
  float gate;       // after the clamp
  float up;         // after the clamp
  bool gate_open;   // the clamp lets the gradient through
  bool up_open;
};

// clamp > 0: gate <= clamp, |up| <= clamp; NaN passes.
FP8MOE_HD SwigluInput clamp_swiglu(float gate, float up, float clamp) {
  if (!(clamp > 0.0f)) return {gate, up, true, true};
  const bool gate_open = !(gate > clamp);
  const bool up_open = !(up > clamp) && !(up < -clamp);
  return {gate_open ? gate : clamp, up > clamp ? clamp : up < -clamp ? -clamp : up, gate_open, up_open};
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

FP8MOE_HD SwigluGrad swiglu_grad(SwigluInput z, float sigmoid, float prob, float dh) {
  const float silu = z.gate * sigmoid;
  const float dsilu = sigmoid * std::fma(z.gate, 1.0f - sigmoid, 1.0f);
  const float dout = dh * prob;
  return {z.gate_open ? (dout * dsilu) * z.up : 0.0f, z.up_open ? dout * silu : 0.0f,
          (silu * z.up) * dh};
}

}  // namespace fp8moe
