// As wide as the machine allows. Not by target_clones: here the width is part of the source, and
// sanitizer builds, which have no clones, run these too.
#include "cpu/transpose_band.h"

#include <cstring>
#include <utility>

#include "common/host_device.h"
#include "cpu/multiversion.h"

#if FP8MOE_MULTIVERSION
#include <immintrin.h>
#endif

namespace fp8moe::cpu {
namespace {

template <int kSize>
struct Vector {
  typedef uint8_t type __attribute__((vector_size(kSize)));
};
template <int kSize>
using Bytes = typename Vector<kSize>::type;

// x0 y0 x1 y1 .. within each 16 bytes, of their first (kHalf 0) or last (1) eight. Vectors go by
// reference: the calling convention of wide ones differs by target.
template <int kHalf, int kSize, size_t... I>
FP8MOE_HD void interleave(const Bytes<kSize>& x, const Bytes<kSize>& y, Bytes<kSize>& to,
                          std::index_sequence<I...>) {
#if defined(__clang__)
  to = __builtin_shufflevector(x, y, (I / 16 * 16 + I % 16 / 2 + 8 * kHalf + I % 2 * kSize)...);
#else  // GCC 11 has this one alone, clang the other alone
  to = __builtin_shuffle(x, y,
                         Bytes<kSize>{(I / 16 * 16 + I % 16 / 2 + 8 * kHalf + I % 2 * kSize)...});
#endif
}

// Bytes [kFirst, kFirst + 16) of x.
template <int kFirst, int kSize>
FP8MOE_HD void store_16(const Bytes<kSize>& x, uint8_t* to) {
  memcpy(to, reinterpret_cast<const uint8_t*>(&x) + kFirst, 16);
}

// kSize channels at a time, a 16x16 of bytes in each 16 bytes of the vectors.
template <int kSize>
FP8MOE_HD void turn(const uint8_t (*band)[kTile], int first, CodeTile& turned) {
  constexpr auto kEvery = std::make_index_sequence<kSize>();
  for (int c = 0; c < kTile; c += kSize) {
    Bytes<kSize> a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) memcpy(&a[i], &band[i][c], kSize);
    // Four rounds of interleaving rows i and i + 8 transpose a 16x16.
#pragma GCC unroll 4
    for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        interleave<0, kSize>(a[i], a[i + 8], b[2 * i], kEvery);
        interleave<1, kSize>(a[i], a[i + 8], b[2 * i + 1], kEvery);
      }
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) a[i] = b[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      store_16<0, kSize>(a[i], &turned.code[c + i][first]);
      if constexpr (kSize == 32) store_16<16, kSize>(a[i], &turned.code[c + 16 + i][first]);
    }
  }
}

using Turn = void(const uint8_t (*)[kTile], int, CodeTile&);
using Write = void(const uint8_t (*)[kTile], int, uint8_t*, int64_t);

void turn_16(const uint8_t (*band)[kTile], int first, CodeTile& turned) {
  turn<16>(band, first, turned);
}

#if FP8MOE_MULTIVERSION
#define FP8MOE_V3 __attribute__((target("arch=x86-64-v3")))
#define FP8MOE_V4 __attribute__((target("arch=x86-64-v4")))

FP8MOE_V3 void turn_v3(const uint8_t (*band)[kTile], int first, CodeTile& turned) {
  turn<32>(band, first, turned);
}
FP8MOE_V4 void turn_v4(const uint8_t (*band)[kTile], int first, CodeTile& turned) {
  turn<32>(band, first, turned);  // for its 32 registers
}

void stream_16(const uint8_t (*lines)[kTile], int n, uint8_t* out, int64_t stride) {
  for (int i = 0; i < n; ++i, out += stride)
    for (int t = 0; t < kTile; t += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + t),
                       _mm_load_si128(reinterpret_cast<const __m128i*>(lines[i] + t)));
}
FP8MOE_V4 void stream_v4(const uint8_t (*lines)[kTile], int n, uint8_t* out, int64_t stride) {
  for (int i = 0; i < n; ++i, out += stride)
    for (int t = 0; t < kTile; t += 64)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out + t),
                          _mm512_load_si512(reinterpret_cast<const __m512i*>(lines[i] + t)));
}
#endif

Turn* widest_turn() {
#if FP8MOE_MULTIVERSION
  if (has_v4()) return turn_v4;
  if (has_v3()) return turn_v3;
#endif
  return turn_16;
}

}  // namespace

void turn_band(const uint8_t (*band)[kTile], int first, CodeTile& turned) {
  static Turn* const widest = widest_turn();
  widest(band, first, turned);
}

void write_lines(const uint8_t (*lines)[kTile], int n, uint8_t* out, int64_t stride) {
#if FP8MOE_MULTIVERSION
  static Write* const stream = has_v4() ? stream_v4 : stream_16;
  const bool whole = (reinterpret_cast<uintptr_t>(out) | static_cast<uintptr_t>(stride)) % 64 == 0;
  if (whole) return stream(lines, n, out, stride);
#endif
  for (int i = 0; i < n; ++i) memcpy(out + i * stride, lines[i], kTile);
}

void finish_lines() {
#if FP8MOE_MULTIVERSION
  _mm_sfence();
#endif
}

}  // namespace fp8moe::cpu
