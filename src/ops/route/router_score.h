// What both backends of router_topk compute of one value: its place in the order, its score, and
// the score's slope. exp, log1p and expm1 are each backend's own, so scores agree within 2^-21 of
// their value, not bit for bit; the order is the same.
#pragma once

#include <cmath>

#include "common/bits.h"
#include "common/host_device.h"
#include "fp8moe/ops.h"

namespace fp8moe {

// Integers in the order of the values: -0 as +0, NaN above infinity. None is 0.
FP8MOE_HD uint32_t order_key(float v) {
  if (v != v) return 0xFFFFFFFFu;
  const auto bits = bit_cast<uint32_t>(v + 0.0f);  // -0 + 0 is +0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

FP8MOE_HD float value_of_key(uint32_t key) {
  return bit_cast<float>(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

constexpr float kScoreFloor = 0x1p-63f;  // of sqrt(softplus): the root of the least normal number

// kSigmoid or kSqrtSoftplus
FP8MOE_HD float score_of(int64_t score, float logit) {
  if (score == kSigmoid) return 1.0f / (1.0f + std::exp(-logit));
  const float softplus = (logit > 0.0f ? logit : 0.0f) + std::log1p(std::exp(-std::fabs(logit)));
  return softplus < 0x1p-126f ? kScoreFloor : std::sqrt(softplus);
}

// d score / d logit, from the score alone.
FP8MOE_HD float slope_of(int64_t score, float s) {
  if (score == kSigmoid) return s * (1.0f - s);
  return s <= kScoreFloor ? 0.0f : -std::expm1(-s * s) / (2.0f * s);  // sigmoid / (2 s)
}

}  // namespace fp8moe
