// Every activation and its derivative in f32, a functor each, in one pinned order of operations.
//
// A functor computes one element. `sigmoid` is what it makes of a gate as z has it, which a kernel
// may look up; `value` and `grad` take it beside gate and up. The routing weight comes last, by the
// caller: a kernel folds it into the scale of the codes (docs/reference/numerics.md). One more
// activation is one more functor, with its case in with_activation, its kind in
// fp8moe/activation.h and its formula in autograd/activation.py.
#pragma once

#include <cmath>

#include "common/bits.h"
#include "common/host_device.h"
#include "fp8moe/activation.h"

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

// Limits that NaN passes: one instruction of a GPU each; without branches, so that a loop
// vectorizes.
FP8MOE_HD float at_most(float x, float limit) {
#if defined(__CUDA_ARCH__)
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(limit));
  return least;
#else
  return x > limit ? limit : x;
#endif
}
FP8MOE_HD float within(float x, float limit) {
#if defined(__CUDA_ARCH__)
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(at_most(x, limit)), "f"(-limit));
  return most;
#else
  return x > limit ? limit : x < -limit ? -limit : x;
#endif
}
FP8MOE_HD bool is_within(float x, float limit) { return !(std::fabs(x) > limit); }

// Without the routing weight. Of an activation without a gate `dgate` is that of z.
struct ActivationGrad {
  float dgate;
  float dup;
  float dprob;  // this element's term of the sum
};

// gate sigmoid(gate) up
struct Swiglu {
  static constexpr bool kGated = true;
  // The least |gate|, as bf16, from which on the sigmoid may be another than that of 0.
  static constexpr uint32_t kLowGate = 0x33C0;  // 2^-24 1.5

  FP8MOE_HD float sigmoid(float gate) const { return pinned_sigmoid(gate); }
  FP8MOE_HD float value(float gate, float up, float sigmoid) const { return (gate * sigmoid) * up; }
  FP8MOE_HD ActivationGrad grad(float gate, float up, float sigmoid, float dh) const {
    const float silu = gate * sigmoid;
    const float dsilu = std::fma(silu, 1.0f - sigmoid, sigmoid);
    const float dup = dh * silu;
    return {(dh * dsilu) * up, dup, dup * up};
  }
};

// The same of gate <= limit and |up| <= limit.
struct SwigluLimited {
  static constexpr bool kGated = true;
  static constexpr uint32_t kLowGate = Swiglu::kLowGate;
  float limit;

  FP8MOE_HD float sigmoid(float gate) const { return pinned_sigmoid(at_most(gate, limit)); }
  FP8MOE_HD float value(float gate, float up, float sigmoid) const {
    return Swiglu{}.value(at_most(gate, limit), within(up, limit), sigmoid);
  }
  FP8MOE_HD ActivationGrad grad(float gate, float up, float sigmoid, float dh) const {
    const ActivationGrad g = Swiglu{}.grad(at_most(gate, limit), within(up, limit), sigmoid, dh);
    return {gate > limit ? 0.0f : g.dgate, is_within(up, limit) ? g.dup : 0.0f, g.dprob};
  }
};

// (up + offset) gate sigmoid(alpha gate) of gate <= limit and |up| <= limit; 1 <= alpha <= 4.
struct SwigluScaled {
  static constexpr bool kGated = true;
  static constexpr uint32_t kLowGate = 0x32C0;  // a quarter
  float alpha, offset, limit;

  FP8MOE_HD float sigmoid(float gate) const { return pinned_sigmoid(alpha * at_most(gate, limit)); }
  FP8MOE_HD float value(float gate, float up, float sigmoid) const {
    return (at_most(gate, limit) * sigmoid) * (within(up, limit) + offset);
  }
  FP8MOE_HD ActivationGrad grad(float gate, float up, float sigmoid, float dh) const {
    const float glu = at_most(gate, limit) * sigmoid, by = within(up, limit) + offset;
    const float dglu = std::fma(alpha * glu, 1.0f - sigmoid, sigmoid);
    const float dup = dh * glu;
    return {gate > limit ? 0.0f : (dh * dglu) * by, is_within(up, limit) ? dup : 0.0f, dup * by};
  }
};

// silu up of silu = gate sigmoid(gate) <= limit and |up| <= limit
struct SwigluLimitAfter {
  static constexpr bool kGated = true;
  static constexpr uint32_t kLowGate = Swiglu::kLowGate;
  float limit;

  FP8MOE_HD float sigmoid(float gate) const { return pinned_sigmoid(gate); }
  FP8MOE_HD float value(float gate, float up, float sigmoid) const {
    return at_most(gate * sigmoid, limit) * within(up, limit);
  }
  FP8MOE_HD ActivationGrad grad(float gate, float up, float sigmoid, float dh) const {
    const float silu = gate * sigmoid, by = within(up, limit);
    const float dsilu = std::fma(silu, 1.0f - sigmoid, sigmoid);
    const float dup = dh * at_most(silu, limit);
    return {silu > limit ? 0.0f : (dh * dsilu) * by, is_within(up, limit) ? dup : 0.0f, dup * by};
  }
};

// up gate (1 + tanh(u)) / 2 = up gate sigmoid(2 u), u = sqrt(2 / pi) (gate + 0.044715 gate^3). The
// sigmoid is 0 or 1 long before |gate| is kFar, where the cube might overflow.
struct GeluTanh {
  static constexpr bool kGated = true;
  static constexpr uint32_t kLowGate = SwigluScaled::kLowGate;
  static constexpr float kFar = 16.0f, kOne = 0x1.988454p+0f, kCubed = 0x1.2444f2p-4f;

  FP8MOE_HD float sigmoid(float gate) const {
    const float x = within(gate, kFar);
    return pinned_sigmoid(x * std::fma(kCubed, x * x, kOne));
  }
  FP8MOE_HD float value(float gate, float up, float sigmoid) const { return (gate * sigmoid) * up; }
  FP8MOE_HD ActivationGrad grad(float gate, float up, float sigmoid, float dh) const {
    const float gelu = gate * sigmoid, x = within(gate, kFar);
    const float slope = std::fma(3.0f * kCubed, x * x, kOne);  // of 2 u
    const float dgelu = std::fma(slope * gelu, 1.0f - sigmoid, sigmoid);
    const float dup = dh * gelu;
    return {(dh * dgelu) * up, dup, dup * up};
  }
};

// relu(z)^2, z in the gate's place; up and sigmoid are not read.
struct Relu2 {
  static constexpr bool kGated = false;
  static constexpr uint32_t kLowGate = Swiglu::kLowGate;

  FP8MOE_HD float sigmoid(float) const { return 0.0f; }
  FP8MOE_HD float value(float z, float, float) const {
    const float relu = z < 0.0f ? 0.0f : z;
    return relu * relu;
  }
  FP8MOE_HD ActivationGrad grad(float z, float, float, float dh) const {
    const float relu = z < 0.0f ? 0.0f : z, half = dh * relu;
    return {half + half, 0.0f, half * relu};
  }
};

// The same with roundings to bf16, as inference engines compute h. SGLang's product is of a silu
// that its GPU approximates; CUDA has the same instructions here. What is rounded after silu, too,
// does not depend on which sigmoid it is (docs/reference/numerics.md).
template <bool kSilu>
struct SwigluRounded : Swiglu {
  FP8MOE_HD static float rounded(float x) { return to_float(from_float<Bf16>(x)); }

  FP8MOE_HD float sigmoid(float gate) const {
#if defined(__CUDA_ARCH__)
    if constexpr (!kSilu) {
      float e, s;
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(gate * -0x1.715476p+0f));
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
      return s;
    }
#endif
    return pinned_sigmoid(gate);
  }
  FP8MOE_HD float value(float gate, float up, float sigmoid) const {
    const float silu = gate * sigmoid;
    return rounded((kSilu ? rounded(silu) : silu) * up);
  }
};

// body(functor) of a checked activation.
template <typename Body>
FP8MOE_HD void with_activation(const Activation& a, Body&& body) {
  const bool limited = a.limit <= 0x1.fffffep127f;
  switch (a.kind) {
    case ActivationKind::swiglu:
      if (a.alpha != 1.0f || a.offset != 0.0f)
        return body(SwigluScaled{a.alpha, a.offset, a.limit});
      return limited ? body(SwigluLimited{a.limit}) : body(Swiglu{});
    case ActivationKind::swiglu_limit_after:
      return limited ? body(SwigluLimitAfter{a.limit}) : body(Swiglu{});
    case ActivationKind::gelu_tanh: return body(GeluTanh{});
    case ActivationKind::relu2: return body(Relu2{});
  }
}

// body(functor) of an activation with a rounding, an ActRounding, which only a plain SwiGLU has.
template <typename Body>
FP8MOE_HD void with_rounding(const Activation& a, int64_t rounding, Body&& body) {
  if (rounding == kRoundProduct) return body(SwigluRounded<false>{});
  if (rounding == kRoundSilu) return body(SwigluRounded<true>{});
  with_activation(a, body);
}

}  // namespace fp8moe
