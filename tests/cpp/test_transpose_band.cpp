// The transpose and the stores of a tile, at every width this machine has; and the shift of a line.
// The kernels are private to the library: their source is compiled into the test.
#include <cmath>

#include "check.h"
#include "cpu/transpose_band.cpp"
#include "ops/transpose/shift_line_cpu.h"

using namespace fp8moe;
using namespace fp8moe::cpu;
using namespace fp8moe::test;

namespace {

void turns(Turn* turn, Random& random) {
  CodeTile tile, turned;
  for (auto& row : tile.code)
    for (auto& code : row) code = static_cast<uint8_t>(random());
  for (int t = 0; t < kTile; t += kBand) turn(tile.code + t, t, turned);
  for (int t = 0; t < kTile; ++t)
    for (int c = 0; c < kTile; ++c) CHECK(turned.code[c][t] == tile.code[t][c]);
}

// Lines at any place of memory, aligned or not, and nothing around them.
void writes(Write* write, int64_t step, Random& random) {
  CodeTile tile;
  for (auto& row : tile.code)
    for (auto& code : row) code = static_cast<uint8_t>(random());
  for (int64_t stride = kTile; stride <= 4 * kTile; stride += step)
    for (int64_t offset = 0; offset < 128; offset += step)
      for (int n : {4, 16, 128}) {
        const size_t size = static_cast<size_t>((n - 1) * stride + kTile + offset);
        std::unique_ptr<uint8_t, decltype(&std::free)> memory(
            static_cast<uint8_t*>(std::aligned_alloc(64, (size + 127) / 64 * 64)), &std::free);
        std::memset(memory.get(), 0xA5, size);
        write(tile.code, n, memory.get() + offset, stride);
        finish_lines();
        for (int64_t at = 0; at < static_cast<int64_t>(size); ++at) {
          const int64_t line = (at - offset) / stride, t = (at - offset) % stride;
          const bool inside = at >= offset && t < kTile;
          CHECK(memory.get()[at] == (inside ? tile.code[line][t] : 0xA5));
        }
      }
}

// The code nearest (ties to even) to decode(code) * 2^-k; sign, NaN and Inf are kept.
template <typename F>
uint8_t shifted(uint8_t code, int k) {
  if ((code & 0x7Fu) >= F::kFirstNan) return code;
  return fp8_encode<F>(std::ldexp(fp8_decode<F>(code), -k));
}

// Every code by every shift: shift_any is `shifted`, shift_line too or says that it is not;
// what is told of the codes it makes zero holds.
template <typename F>
void shifts() {
  for (int k = 0; k <= 254; ++k)
    for (int first = 0; first < 256; first += kTile) {
      uint8_t in[kTile], any[kTile], line[kTile], odd[kTile], lower[kTile];
      int exponent[kTile];
      for (int t = 0; t < kTile; ++t) {
        in[t] = static_cast<uint8_t>(first + t);
        exponent[t] = k == 254 ? 0 : 254 - k;
        lower[t] = static_cast<uint8_t>(std::min(k * Steps<F>::kOne, Steps<F>::kMostLower));
      }
      AnyShift any_shift;
      set_any<F>(exponent, 254, any_shift);
      shift_any<F>(in, any_shift, any);
      LineShift shift;
      set_shift<F>(lower, 0, shift);
      shift_line<F>(in, shift, line, odd);
      for (int t = 0; t < kTile; ++t) {
        const uint8_t expected = shifted<F>(in[t], k);
        CHECK(any[t] == expected);
        CHECK(odd[t] != 0 || line[t] == expected);
        // Bytes are enough for a zero, and for a normal code that stays one.
        const int magnitude = in[t] & 0x7F;
        const bool finite = magnitude < static_cast<int>(F::kFirstNan);
        if (k == 0 || magnitude == 0 || magnitude >= (k + 1) * Steps<F>::kOne)
          CHECK((odd[t] == 0) == finite);
        const int flushing = fp8_flushing_shift<F>(in[t] & 0x7Fu);
        const bool flushed = magnitude != 0 && finite && (expected & 0x7F) == 0;
        CHECK(flushed == (flushing != 0 && k >= flushing));
        CHECK(flushed == (magnitude != 0 && magnitude <= static_cast<int>(fp8_flushed_by<F>(k))));
      }
    }
}

}  // namespace

int main() {
  Random random(31);
  turns(turn_16, random);
  turns(turn_band, random);
#if FP8MOE_MULTIVERSION
  if (has_v3()) turns(turn_v3, random);
  if (has_v4()) turns(turn_v4, random);
  writes(stream_16, 64, random);
  if (has_v4()) writes(stream_v4, 64, random);
#endif
  writes(write_lines, 16, random);
  writes(write_lines, 24, random);
  shifts<E4M3>();
  shifts<E5M2>();
}
