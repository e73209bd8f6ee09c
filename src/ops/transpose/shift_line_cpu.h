// The shift of FP8 codes by powers of two, a line of 128 at a time: code' = RNE(code * 2^-k).
//
// A normal code that stays normal loses k from its exponent field, which is one subtraction of
// bytes (shift_line). Any code by any shift takes the longer way of shift_any, in bytes as well.
// Both are inlined into the clones of their callers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/fp8.h"
#include "fp8moe/tensor.h"

namespace fp8moe::cpu {

template <typename F>
struct Steps {
  static constexpr int kOne = 1 << F::kMantissa;  // what a doubling adds to a normal code
  static constexpr int kMostLower = 248;          // more than any code, raised or not
  static constexpr int kRaises = 128 / kOne + 1;  // no code raised by fewer overflows a byte
};

// What the codes of 128 tokens lose, modulo 256. Right for codes over `floor`, and for zeros.
struct alignas(64) LineShift {
  uint8_t lower[kTile];
  uint8_t floor[kTile];
};

// Token t goes lower[t] steps down and `raise` doublings up.
template <typename F>
FP8MOE_HD void set_shift(const uint8_t* __restrict lower, int raise, LineShift& shift) {
  constexpr int kOne = Steps<F>::kOne;
  for (int t = 0; t < kTile; ++t) {
    const int less = lower[t] - raise * kOne;
    const int floor = less == 0 ? 0 : std::max(less, 0) + kOne - 1;
    shift.lower[t] = static_cast<uint8_t>(less);
    shift.floor[t] = static_cast<uint8_t>(floor);
  }
}

// odd[t] is not zero where the code takes shift_any: a subnormal before or after, or a NaN.
template <typename F>
FP8MOE_HD void shift_line(const uint8_t* __restrict in, const LineShift& shift,
                          uint8_t* __restrict out, uint8_t* __restrict odd) {
  for (int t = 0; t < kTile; ++t) {
    const uint8_t magnitude = in[t] & 0x7F;
    const uint8_t code = magnitude == 0 ? 0 : magnitude - shift.lower[t];
    const bool under = static_cast<uint8_t>(magnitude - 1) < shift.floor[t];  // not for a zero
    odd[t] = under | (magnitude >= F::kFirstNan) ? 1 : 0;
    out[t] = code | (in[t] & 0x80);
  }
}

// bytes: a multiple of eight of them.
FP8MOE_HD bool any_of(const uint8_t* bytes, int n) {
  uint64_t any = 0;
  for (int i = 0; i < n; i += 8) {
    uint64_t eight;
    memcpy(&eight, bytes + i, sizeof(eight));
    any |= eight;
  }
  return any != 0;
}

// Magnitudes by their steps above the smallest that may round to a code: kOne steps a doubling,
// code 2^kM (the first normal one) at kNormal. from[j - 1] is where rounding gives the subnormal j.
template <typename F>
struct StepScale {
  static constexpr int kM = F::kMantissa;
  static constexpr int kNormal = (kM + 1) << kM;
  uint8_t from[1 << kM] = {};

  constexpr StepScale() {
    for (int steps = kNormal; steps-- > 0;) {
      const int drop = kM + 1 - (steps >> kM);  // bits the significand loses
      const int significand = (1 << kM) + steps % (1 << kM);
      const int rounded =
          (significand + (1 << (drop - 1)) - 1 + ((significand >> drop) & 1)) >> drop;
      for (int j = 1; j <= rounded; ++j) from[j - 1] = static_cast<uint8_t>(steps);
    }
  }
};

// The steps of 128 tokens from their scales to that of exponent field `field`, saturating.
struct alignas(64) AnyShift {
  int field = -1;
  uint8_t down[kTile];
  uint8_t up[kTile];
};

// exponent[t]: the exponent field of token t's scale, 0 for a scale of zero.
template <typename F>
FP8MOE_HD void set_any(const int* __restrict exponent, int field, AnyShift& shift) {
  shift.field = field;
  for (int t = 0; t < kTile; ++t) {
    const int steps = exponent[t] == 0 ? 255 : (field - exponent[t]) * Steps<F>::kOne;
    shift.down[t] = static_cast<uint8_t>(std::clamp(steps, 0, 255));
    shift.up[t] = static_cast<uint8_t>(std::clamp(-steps, 0, 255));
  }
}

template <typename F>
FP8MOE_HD void shift_any(const uint8_t* __restrict in, const AnyShift& shift,
                         uint8_t* __restrict out) {
  constexpr int kM = F::kMantissa;
  constexpr int kOne = 1 << kM;
  constexpr uint8_t kNormal = StepScale<F>::kNormal;
  constexpr StepScale<F> kScale;
  for (int t = 0; t < kTile; ++t) {
    const uint8_t magnitude = in[t] & 0x7F;
    // The steps of a code: linear where it is normal, below that the least of kM lines.
    const uint8_t low = std::min<uint8_t>(magnitude, kOne);
    uint8_t steps = low << kM;
    for (int i = 1; i < kM; ++i)
      steps = std::min(steps, static_cast<uint8_t>((low << i) + ((kM - i) << kM)));
    steps += magnitude - low;
    steps = static_cast<uint8_t>(std::max(steps, shift.down[t]) - shift.down[t]);
    steps += magnitude == 0 ? 0 : shift.up[t];
    uint8_t code = static_cast<uint8_t>(std::max(steps, kNormal) - kNormal);
    for (int j = 0; j < kOne; ++j) code += steps >= kScale.from[j];
    code = magnitude >= F::kFirstNan ? magnitude : code;
    out[t] = code | (in[t] & 0x80);
  }
}

}  // namespace fp8moe::cpu
