/* SPDX-License-Identifier: Apache-2.0 */
/* What stands between the two projections of an expert: h of z. For C, too: c_api.h. */
#ifndef FP8MOE_ACTIVATION_H_
#define FP8MOE_ACTIVATION_H_

/* Values of fp8moe_activation.kind. */
enum {
  FP8MOE_SWIGLU = 0,             /* (up + offset) gate sigmoid(alpha gate), within the limit */
  FP8MOE_SWIGLU_LIMIT_AFTER = 1, /* up silu(gate), of silu(gate) and up within the limit */
  FP8MOE_GELU_TANH = 2,          /* up gelu(gate), by the tanh formula */
  FP8MOE_RELU2 = 3               /* relu(z)^2, without a gate */
};

#ifdef __cplusplus
#include <cstdint>
#include <limits>

namespace fp8moe {

enum class ActivationKind : int32_t {
  swiglu = FP8MOE_SWIGLU,
  swiglu_limit_after = FP8MOE_SWIGLU_LIMIT_AFTER,
  gelu_tanh = FP8MOE_GELU_TANH,
  relu2 = FP8MOE_RELU2,
};

// What there is to say of each kind, in their order; Python reads it.
struct ActivationTraits {
  const char* name;
  bool gated;    // z has 2I columns, not I
  bool limited;  // has a limit
  bool scaled;   // has alpha and offset
};
constexpr ActivationTraits kActivations[] = {{"swiglu", true, true, true},
                                             {"swiglu_limit_after", true, true, false},
                                             {"gelu_tanh", true, false, false},
                                             {"relu2", false, false, false}};

// z is [R, 2I], gate and up side by side: [gate | up], or interleaved: gate 0, up 0, gate 1, ...
// Of a kind without a gate it is [R, I].
struct Activation {
  ActivationKind kind = ActivationKind::swiglu;
  float alpha = 1.0f;   // within [1, 4]
  float offset = 0.0f;  // finite
  // Positive; infinity: none. gate, or silu(gate), at most limit; up within [-limit, limit]. What
  // is beyond has no gradient.
  float limit = std::numeric_limits<float>::infinity();
  bool interleaved = false;

  // Of a checked kind.
  constexpr const ActivationTraits& traits() const { return kActivations[static_cast<int>(kind)]; }
};

// What of a plain SwiGLU is rounded to bf16 before it is quantized, as inference engines do:
// silu(gate) up; or silu(gate), and then the product. An `int64_t rounding`.
enum ActRounding : int64_t { kRoundNothing = 0, kRoundProduct = 1, kRoundSilu = 2 };

}  // namespace fp8moe
#endif
#endif
