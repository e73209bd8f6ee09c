// Each tile's codes are shifted to one scale S (a 128x128 tile, or a column of it) and transposed:
// code' = RNE(code * s_r / S), exact wherever the result is a normal code.
#include "cpu/shift_columns.h"

#include <array>
#include <memory>

#include "core/dispatch.h"
#include "cpu/clones.h"
#include "cpu/columns.h"
#include "cpu/row_scales.h"

namespace fp8moe::cpu {
namespace {

// The rows of one tile: their codes, and the exponent field of their scale (0 for a zero scale).
struct TileRows {
  const uint8_t* code[kTile];
  int exponent[kTile];
  bool nonzero[kTile];  // some code of the row is not zero
  int tokens;
  int channels;
};

float scale_of_field(int field) { return bit_cast<float>(static_cast<uint32_t>(field) << 23); }

// A shift by k as comparisons of bytes: a magnitude from `normal` on loses k from its exponent
// field; one below becomes the subnormal j for the most j with from[j - 1] <= magnitude.
template <typename F>
struct Shift {
  static constexpr int kSteps = 1 << F::kMantissa;
  uint8_t normal;
  uint8_t less;
  uint8_t from[kSteps];
};

template <typename F>
const Shift<F>& shift_by(int k) {
  static const auto shifts = [] {
    std::array<Shift<F>, kFp8ShiftToZero<F> + 1> all;
    for (int k = 0; k <= kFp8ShiftToZero<F>; ++k) {
      const int normal = std::min<int>((k + 1) << F::kMantissa, F::kFirstNan);
      all[k].normal = static_cast<uint8_t>(normal);
      all[k].less = static_cast<uint8_t>(k << F::kMantissa);
      for (int j = 1; j <= Shift<F>::kSteps; ++j) {
        int m = 0;
        while (m < normal && fp8_shift_down<F>(static_cast<uint8_t>(m), k) < j) ++m;
        all[k].from[j - 1] = static_cast<uint8_t>(m);
      }
    }
    return all;
  }();
  return shifts[k];
}

template <typename F>
FP8MOE_HD void shift_row(const uint8_t* __restrict in, int n, const Shift<F> shift,
                         uint8_t* __restrict out) {
  for (int c = 0; c < n; ++c) {
    const uint8_t magnitude = in[c] & 0x7F;
    uint8_t code = 0;
    for (int j = 0; j < Shift<F>::kSteps; ++j) code += magnitude >= shift.from[j];
    code = magnitude >= shift.normal ? static_cast<uint8_t>(magnitude - shift.less) : code;
    code = magnitude >= F::kFirstNan ? magnitude : code;
    out[c] = code | (in[c] & 0x80);
  }
}

// S = the largest scale among rows that hold a nonzero code; 1 where none does.
template <typename F>
FP8MOE_HD void shift_to_block(const TileRows& rows, CodeTile& tile, float* scale_inv) {
  int top = 0;
  for (int t = 0; t < rows.tokens; ++t)
    if (rows.nonzero[t]) top = std::max(top, rows.exponent[t]);
  if (top == 0) top = 127;
  *scale_inv = scale_of_field(top);
  for (int t = 0; t < rows.tokens; ++t) {
    const int e = rows.exponent[t];
    const int k = e == 0 ? kFp8ShiftToZero<F> : std::clamp(top - e, 0, kFp8ShiftToZero<F>);
    if (k == 0) {
      memcpy(tile.code[t], rows.code[t], static_cast<size_t>(rows.channels));
    } else if (rows.channels == kTile) {
      shift_row<F>(rows.code[t], kTile, shift_by<F>(k), tile.code[t]);
    } else {
      shift_row<F>(rows.code[t], rows.channels, shift_by<F>(k), tile.code[t]);
    }
  }
}

// S of a channel = the smallest power of two whose largest code holds the channel's largest value.
// Values are ranked as exponent << mantissa bits | mantissa, which knows no overflow.
template <typename F>
FP8MOE_HD void shift_to_channels(const TileRows& rows, CodeTile& tile, float* scale_inv) {
  constexpr int kM = F::kMantissa;
  constexpr int kMaxExponent = static_cast<int>(F::kMaxCode >> kM) - F::kBias;
  constexpr int kMaxMantissa = F::kMaxCode & ((1u << kM) - 1);
  int top[kTile] = {};
  for (int t = 0; t < rows.tokens; ++t) {
    const int e = rows.exponent[t];
    if (e == 0) continue;
    const uint8_t* code = rows.code[t];
    for (int c = 0; c < rows.channels; ++c) {
      const uint8_t magnitude = code[c] & 0x7F;
      const int rank = static_cast<int>(bit_cast<uint32_t>(fp8_decode<F>(magnitude)) >> (23 - kM));
      const bool counts = magnitude != 0 && magnitude < F::kFirstNan;
      top[c] = std::max(top[c], counts ? rank + (e << kM) : 0);
    }
  }
  int field[kTile];
  for (int c = 0; c < rows.channels; ++c) {
    const int carry = (top[c] & ((1 << kM) - 1)) > kMaxMantissa;
    const int tight = std::max((top[c] >> kM) - 127 - kMaxExponent + carry, 1);
    field[c] = top[c] == 0 ? 127 : tight;
    scale_inv[c] = scale_of_field(field[c]);
  }
  for (int t = 0; t < rows.tokens; ++t) {
    const int e = rows.exponent[t];
    const uint8_t* __restrict code = rows.code[t];
    uint8_t* __restrict out = tile.code[t];
    for (int c = 0; c < rows.channels; ++c) {
      const int k = e == 0 ? kFp8ShiftToZero<F>
                           : std::clamp(field[c] - e, -kFp8ShiftToZero<F>, kFp8ShiftToZero<F>);
      const uint8_t magnitude = code[c] & 0x7F;
      const float value = fp8_decode<F>(magnitude) * scale_of_field(127 - k);
      const uint32_t shifted = encode_in_range<F>(value) | (code[c] & 0x80u);
      out[c] = static_cast<uint8_t>(magnitude < F::kFirstNan ? shifted : code[c]);
    }
  }
}

template <typename F>
FP8MOE_CLONES void shift_tile(const TileRows& rows, bool per_channel, const ColumnsAt& out) {
  CodeTile tile;
  if (per_channel) {
    shift_to_channels<F>(rows, tile, out.scale_inv);
  } else {
    shift_to_block<F>(rows, tile, out.scale_inv);
  }
  if (rows.tokens < kTile) tile.zero_from(rows.tokens);
  transpose_tile(tile, rows.channels, out.data, out.stride);
}

// nonzero[t] of each 128-channel tile of one row: read along the row, where it streams.
FP8MOE_CLONES void find_nonzero(const uint8_t* code, int64_t c, bool* nonzero) {
  for (int64_t first = 0; first < c; first += kTile) {
    uint8_t any = 0;
    const int64_t n = std::min(kTile, c - first);
    for (int64_t i = 0; i < n; ++i) any |= code[first + i];
    nonzero[first / kTile] = (any & 0x7F) != 0;
  }
}

void check_scales(const char* op, const std::vector<TokenTile>& tiles, const int32_t* source,
                  const RowScales& scales, int64_t channel_tiles) {
  int64_t bad = -1;  // the last bad scale in memory: one value whatever the threads
#pragma omp parallel for schedule(static) reduction(max : bad)
  for (size_t n = 0; n < tiles.size(); ++n) {
    for (int64_t r = tiles[n].row; r < tiles[n].row + tiles[n].tokens; ++r) {
      const int64_t at = (source != nullptr ? source[r] : r) * scales.row;
      for (int64_t t = 0; t < channel_tiles; ++t) {
        const float s = scales.data[at + t * scales.tile];
        if (!is_pow2_scale(s) && bit_cast<uint32_t>(s) != 0)
          bad = std::max(bad, at + t * scales.tile);
      }
    }
  }
  FP8MOE_CHECK(bad < 0, "[", op,
               "] scales must be positive powers of two (0 only where a row is empty); got ",
               scales.data[std::max<int64_t>(bad, 0)]);
}

}  // namespace

void shift_columns(const char* op, const Fp8Tensor& q, const RoutingPlan& plan,
                   const int32_t* source, const Fp8Tensor& columns) {
  const int64_t c = q.data.shape[1];
  const int64_t stride = q.data.stride();
  const int64_t channel_tiles = cdiv(c, kTile);
  const bool per_channel = columns.layout == ScaleLayout::gemm;
  const uint8_t* codes = q.data.as<uint8_t>();
  const RowScales scales(q);
  const std::vector<TokenTile> tiles = token_tiles(op, plan);
  check_scales(op, tiles, source, scales, channel_tiles);

  dispatch_fp8(q.data.dtype, [&]<typename F>() {
#pragma omp parallel for schedule(dynamic)
    for (size_t n = 0; n < tiles.size(); ++n) {
      const TokenTile t = tiles[n];
      const auto nonzero = std::make_unique<bool[]>(kTile * channel_tiles);
      const auto row_of = [&](int i) { return source != nullptr ? source[t.row + i] : t.row + i; };
      for (int i = 0; i < t.tokens; ++i)
        find_nonzero(codes + row_of(i) * stride, c, &nonzero[i * channel_tiles]);
      TileRows rows;
      rows.tokens = t.tokens;
      for (int64_t ct = 0; ct < channel_tiles; ++ct) {
        rows.channels = static_cast<int>(std::min(kTile, c - ct * kTile));
        for (int i = 0; i < t.tokens; ++i) {
          const int64_t row = row_of(i);
          rows.code[i] = codes + row * stride + ct * kTile;
          rows.exponent[i] = exponent_field(scales.of(row)[ct * scales.tile]);
          rows.nonzero[i] = nonzero[i * channel_tiles + ct];
        }
        shift_tile<F>(rows, per_channel, columns_at(columns, t, ct * kTile));
      }
    }
  });
}

}  // namespace fp8moe::cpu
