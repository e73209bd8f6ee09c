// The two passes of every quantizer over one tile [rows, cols]: its largest magnitude, then its
// codes. Inlined into the row kernels (FP8MOE_CLONES) of the ops, so that each clone vectorizes its
// own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/bits.h"
#include "common/fp8.h"
#include "common/scale.h"
#include "fp8moe/ops.h"

namespace fp8moe::cpu {

#define FP8MOE_INLINE __attribute__((always_inline))

// Magnitudes are compared as integers: they order like the floats they are the bits of, NaNs last.
FP8MOE_HD uint32_t magnitude_bits(float x) { return bit_cast<uint32_t>(x) & 0x7FFFFFFFu; }
FP8MOE_HD uint16_t magnitude_bits(Bf16 x) { return x.bits & 0x7FFFu; }
FP8MOE_HD uint16_t magnitude_bits(Fp16 x) { return x.bits & 0x7FFFu; }

template <typename T>
using MagnitudeBits = decltype(magnitude_bits(T{}));

template <typename T>
constexpr MagnitudeBits<T> kInfinityBits = 0x7F800000u;
template <>
inline constexpr uint16_t kInfinityBits<Bf16> = 0x7F80u;
template <>
inline constexpr uint16_t kInfinityBits<Fp16> = 0x7C00u;

// The largest finite value of T: what the scale becomes when FMAX / amax overflows.
template <typename T>
constexpr float kMaxFinite = 0x1.fffffep127f;
template <>
inline constexpr float kMaxFinite<Bf16> = 0x1.fep127f;
template <>
inline constexpr float kMaxFinite<Fp16> = 65504.0f;

template <typename F, typename T>
FP8MOE_HD TileScale tile_scale_of(float amax, ScaleRule rule) {
  return tile_scale(amax, F::kMax, rule.kind, rule.eps, kMaxFinite<T>);
}

struct TileMax {
  float amax;   // NaNs ignored
  bool finite;  // neither NaN nor Inf in the tile
};

// x [rows, cols], rows `stride` elements apart.
template <typename T>
FP8MOE_HD TileMax tile_max(const T* __restrict x, int64_t stride, int rows, int cols) {
  MagnitudeBits<T> top = 0;
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < cols; ++c) top = std::max(top, magnitude_bits(x[r * stride + c]));
  if (top < kInfinityBits<T>) return {to_float(bit_cast<T>(top)), true};
  float amax = 0.0f;
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < cols; ++c) {
      const float magnitude = std::fabs(to_float(x[r * stride + c]));
      amax = magnitude > amax ? magnitude : amax;  // false for a NaN; fmax returns a signaling one
    }
  return {amax, false};
}

// fp8_encode of a finite v >= 0 that rounds to at most kMax, in half the operations: v is added to
// the power of two whose ulp is the spacing of the codes around v.
template <typename F>
FP8MOE_HD uint32_t encode_in_range(float v) {
  constexpr int kDrop = 23 - F::kMantissa;
  constexpr uint32_t kRebias = static_cast<uint32_t>(128 - F::kBias) << F::kMantissa;
  const uint32_t exponent =
      std::max(bit_cast<uint32_t>(v) & 0x7F800000u, static_cast<uint32_t>(128 - F::kBias) << 23);
  const uint32_t magic = exponent + (static_cast<uint32_t>(kDrop) << 23);
  const uint32_t steps = bit_cast<uint32_t>(v + bit_cast<float>(magic)) - magic;
  return steps + (exponent >> kDrop) - kRebias;
}

// One row of codes. `scale` follows from a finite tile (TileMax), so x * scale is in range.
template <typename F, typename T>
FP8MOE_HD void encode_finite(const T* __restrict x, int n, float scale, uint8_t* __restrict q) {
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = bit_cast<uint32_t>(to_float(x[i]) * scale);
    q[i] = static_cast<uint8_t>(encode_in_range<F>(bit_cast<float>(bits & 0x7FFFFFFFu)) |
                                ((bits >> 24) & 0x80u));
  }
}

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
// bf16 in pairs: both halves of a 32-bit word are floats but for a shift and a mask.
template <typename F>
FP8MOE_HD void encode_finite(const Bf16* __restrict x, int n, float scale, uint8_t* __restrict q) {
  for (int i = 0; i < n; i += 2) {  // n is even: columns come in multiples of 16
    uint32_t pair;
    memcpy(&pair, x + i, sizeof(pair));
    const uint32_t low = encode_in_range<F>(bit_cast<float>((pair & 0x7FFFu) << 16) * scale);
    const uint32_t high = encode_in_range<F>(bit_cast<float>(pair & 0x7FFF0000u) * scale);
    const uint16_t codes =
        static_cast<uint16_t>(low | (high << 8) | ((pair >> 8) & 0x80u) | ((pair >> 16) & 0x8000u));
    memcpy(q + i, &codes, sizeof(codes));
  }
}
#endif

// q [rows, cols], rows `q_stride` codes apart; scale by the rule `kind`.
template <typename F, typename T>
FP8MOE_HD void tile_encode(const T* x, int64_t stride, int rows, int cols, float scale,
                           ScaleKind kind, bool finite, uint8_t* q, int64_t q_stride) {
  for (int r = 0; r < rows; ++r, x += stride, q += q_stride) {
    if (kind == ScaleKind::amax) {
      for (int c = 0; c < cols; ++c) q[c] = fp8_encode<F>(to_float(x[c]) / scale);
    } else if (finite) {
      encode_finite<F>(x, cols, scale, q);
    } else {
      for (int c = 0; c < cols; ++c) q[c] = fp8_encode<F>(to_float(x[c]) * scale);
    }
  }
}

// fn(columns of a tile): the whole tile's width is a constant to the compiler.
template <typename Fn>
FP8MOE_HD auto with_width(int64_t cols, Fn fn) {
  return cols >= kTile ? fn(static_cast<int>(kTile)) : fn(static_cast<int>(cols));
}

// A row of 1x128 tiles, x [k] -> q [k], one scale_inv per tile, `scale_stride` apart. The scales of
// a few tiles are computed side by side: one tile's chain of maximum and two divisions takes longer
// than its codes.
template <typename F, typename T>
FP8MOE_HD void quantize_tiles(const T* x, int64_t k, ScaleRule rule, uint8_t* q, float* scale_inv,
                              int64_t scale_stride) {
  constexpr int kTiles = 4;
  for (int64_t first = 0; first < k; first += kTiles * kTile) {
    const int tiles = static_cast<int>(std::min<int64_t>(kTiles, cdiv(k - first, kTile)));
    TileMax max[kTiles];
    TileScale scale[kTiles];
    for (int t = 0; t < tiles; ++t) {
      const int64_t c = first + t * kTile;
      max[t] = with_width(k - c, [&](int n) FP8MOE_INLINE { return tile_max(x + c, k, 1, n); });
    }
    for (int t = 0; t < tiles; ++t) scale[t] = tile_scale_of<F, T>(max[t].amax, rule);
    for (int t = 0; t < tiles; ++t) {
      const int64_t c = first + t * kTile;
      with_width(k - c, [&](int n) FP8MOE_INLINE {
        tile_encode<F>(x + c, k, 1, n, scale[t].scale, rule.kind, max[t].finite, q + c, k);
      });
      scale_inv[c / kTile * scale_stride] = scale[t].scale_inv;
    }
  }
}

}  // namespace fp8moe::cpu
