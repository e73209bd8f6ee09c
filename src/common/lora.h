// The parts of a low-rank K-block (ops.h, "low-rank terms"), the same on both backends.
#pragma once

#include "common/fp8.h"
#include "common/host_device.h"
#include "common/scale.h"
#include "fp8moe/ops.h"

namespace fp8moe {

struct HighLow {
  uint8_t high, low;
};

// x is about (high + low) * scale_inv.
template <typename F>
FP8MOE_HD HighLow high_low(float x, float scale, bool divide) {
  const float scaled = divide ? x / scale : x * scale;
  const uint8_t high = fp8_encode<F>(scaled);
  return {high, fp8_encode<F>(scaled - fp8_decode<F>(high))};
}

// Whether part `part` of an operand of r' columns per part is its low one.
FP8MOE_HD bool is_low(bool of_w2, int part) { return of_w2 ? part == 2 : part == 1; }

FP8MOE_HD TileScale lora_scale(float amax, float fp8_max, ScaleKind kind, float eps) {
  return tile_scale(amax, fp8_max, kind, eps, 0x1.fffffep127f);
}

}  // namespace fp8moe
