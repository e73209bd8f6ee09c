// transpose_fp8 and permute_transpose_fp8 on the CPU: their definition.
#include <omp.h>

#include "common/backends.h"
#include "common/dispatch.h"
#include "cpu/columns.h"
#include "cpu/multiversion.h"
#include "cpu/plan_check.h"
#include "cpu/row_scales.h"
#include "ops/transpose/shift_line_cpu.h"

namespace fp8moe::cpu {

// ---- the shift ----------------------------------------------------------------------------------
// Each tile's codes are turned and shifted to one scale S (of a 128x128 tile, or of a column of
// it): code' = RNE(code * s_r / S), exact wherever the result is a normal code.

namespace {

constexpr int kUnscaled = 127;  // exponent field of 1
constexpr uint8_t kZeroRow[kTile] = {};

float scale_of_field(int field) { return bit_cast<float>(static_cast<uint32_t>(field) << 23); }

// The rows of one tile, by token; those past the last token hold zero codes, under any scale.
struct TileRows {
  const uint8_t* code[kTile];
  int exponent[kTile];          // exponent field of the scale, 0 for a zero scale
  const uint8_t* ahead[kTile];  // what is read next
  int channels;
};

// The largest exponent field among rows that hold a nonzero code; 0 where none does.
FP8MOE_HD int top_exponent(const TileRows& rows) {
  for (int below = 256;;) {
    int top = 0;
    for (int t = 0; t < kTile; ++t)
      top = std::max(top, rows.exponent[t] < below ? rows.exponent[t] : 0);
    if (top == 0) return 0;
    for (int t = 0; t < kTile; ++t) {
      if (rows.exponent[t] != top) continue;
      uint8_t any = 0;
      for (int c = 0; c < rows.channels; ++c) any |= rows.code[t][c];
      if ((any & 0x7F) != 0) return top;
    }
    below = top;
  }
}

// lower[t]: the steps from the scale of token t up to the tile's top one.
template <typename F>
FP8MOE_HD void steps_below(const TileRows& rows, int top, uint8_t* __restrict lower) {
  constexpr int kMost = Steps<F>::kMostLower;
  for (int t = 0; t < kTile; ++t) {
    const int e = rows.exponent[t];
    const int steps = std::clamp((top - e) * Steps<F>::kOne, 0, kMost);
    lower[t] = static_cast<uint8_t>(e == 0 ? kMost : steps);
  }
}

// Over the tokens of each channel: the largest magnitude, and the largest that `lower` leaves.
struct alignas(64) ChannelTops {
  uint8_t magnitude[kTile] = {};
  uint8_t left[kTile] = {};
};

FP8MOE_HD void take_rows(const uint8_t (*rows)[kTile], const uint8_t* lower,
                         uint8_t* __restrict magnitude, uint8_t* __restrict left) {
  const uint8_t lower0 = lower[0], lower1 = lower[1], lower2 = lower[2], lower3 = lower[3];
  const uint8_t* __restrict codes = rows[0];
  const auto less = [](uint8_t m, uint8_t by)
                        FP8MOE_INLINE { return static_cast<uint8_t>(std::max(m, by) - by); };
  for (int c = 0; c < kTile; ++c) {
    const uint8_t m0 = codes[c] & 0x7F, m1 = codes[kTile + c] & 0x7F;
    const uint8_t m2 = codes[2 * kTile + c] & 0x7F, m3 = codes[3 * kTile + c] & 0x7F;
    const uint8_t m01 = std::max(m0, m1), m23 = std::max(m2, m3);
    const uint8_t left01 = std::max(less(m0, lower0), less(m1, lower1));
    const uint8_t left23 = std::max(less(m2, lower2), less(m3, lower3));
    magnitude[c] = std::max(magnitude[c], std::max(m01, m23));
    left[c] = std::max(left[c], std::max(left01, left23));
  }
}

// turned.code[c][t] = rows.code[t][c], and the channels' tops on the way if they are wanted.
FP8MOE_HD void turn(const TileRows& rows, const uint8_t* lower, ChannelTops* tops,
                    CodeTile& turned) {
  // Rows mostly lie a power of two apart: only a copy of few at a time stays in the cache.
  alignas(64) uint8_t band[kBand][kTile] = {};
  for (int first = 0; first < kTile; first += kBand) {
    for (int t = 0; t < kBand; ++t) {
      if (rows.channels == kTile) {
        memcpy(band[t], rows.code[first + t], kTile);
      } else {
        memcpy(band[t], rows.code[first + t], static_cast<size_t>(rows.channels));
      }
    }
    if (tops != nullptr)
      for (int t = 0; t < kBand; t += 4)
        take_rows(band + t, lower + first + t, tops->magnitude, tops->left);
    turn_band(band, first, turned);
  }
}

// S of a channel = the smallest power of two whose largest code holds the channel's largest value.
// Values are ranked as exponent << mantissa bits | mantissa, which knows no overflow.
template <typename F>
FP8MOE_HD void rank_channels(const TileRows& rows, int* __restrict field) {
  constexpr int kM = F::kMantissa;
  constexpr int kMaxExponent = static_cast<int>(F::kMaxCode >> kM) - F::kBias;
  constexpr int kMaxMantissa = F::kMaxCode & ((1u << kM) - 1);
  int top[kTile] = {};
  for (int t = 0; t < kTile; ++t) {
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
  for (int c = 0; c < rows.channels; ++c) {
    const int carry = (top[c] & ((1 << kM) - 1)) > kMaxMantissa;
    const int tight = std::max((top[c] >> kM) - 127 - kMaxExponent + carry, 1);
    field[c] = top[c] == 0 ? kUnscaled : tight;
  }
}

// The same from the tops, if they tell: what `lower` leaves of a largest code is exact where that
// is still normal; elsewhere the largest value may have been a subnormal of its row.
template <typename F>
FP8MOE_HD void channel_fields(const TileRows& rows, const ChannelTops& tops, int tile_top,
                              int* __restrict field) {
  uint8_t unsure = 0;
  for (int c = 0; c < kTile; ++c)
    unsure |= (tops.magnitude[c] >= F::kFirstNan) |
              ((tops.magnitude[c] != 0) & (tops.left[c] < Steps<F>::kOne));
  if (unsure != 0) return rank_channels<F>(rows, field);
  for (int c = 0; c < rows.channels; ++c) {
    const int raise = (static_cast<int>(F::kMaxCode) - tops.left[c]) >> F::kMantissa;
    field[c] = tops.left[c] == 0 ? kUnscaled : std::max(tile_top - raise, 1);
  }
}

template <typename F>
FP8MOE_CLONES void shift_tile(const TileRows& rows, bool per_channel, const ColumnsAt& out) {
  const int top = top_exponent(rows);
  alignas(64) uint8_t lower[kTile];
  steps_below<F>(rows, top, lower);
  CodeTile turned;
  ChannelTops tops;
  turn(rows, lower, per_channel ? &tops : nullptr, turned);
  int field[kTile];
  if (per_channel && top != 0) {
    channel_fields<F>(rows, tops, top, field);
  } else {
    std::fill_n(field, kTile, top == 0 ? kUnscaled : top);
  }
  for (int c = 0; c < (per_channel ? rows.channels : 1); ++c)
    out.scale_inv[c] = scale_of_field(field[c]);

  constexpr int kGroup = 4;  // channels written at a time
  LineShift shifts[Steps<F>::kRaises];
  bool have[Steps<F>::kRaises] = {};
  AnyShift any;
  alignas(64) uint8_t line[kGroup][kTile], odd[kGroup][kTile];
  for (int first = 0; first < rows.channels; first += kGroup) {
    for (int i = 0; i < kGroup; ++i) {
      __builtin_prefetch(rows.ahead[first + i], 0, 2);
      __builtin_prefetch(rows.ahead[first + i] + 64, 0, 2);
      const int raise = top == 0 ? 0 : top - field[first + i];
      if (raise < 0 || raise >= Steps<F>::kRaises) {
        memset(odd[i], 1, kTile);
        continue;
      }
      if (!have[raise]) set_shift<F>(lower, raise, shifts[raise]);
      have[raise] = true;
      shift_line<F>(turned.code[first + i], shifts[raise], line[i], odd[i]);
    }
    if (any_of(odd[0], kGroup * kTile))
      for (int i = 0; i < kGroup; ++i)
        if (any_of(odd[i], kTile)) {
          if (any.field != field[first + i]) set_any<F>(rows.exponent, field[first + i], any);
          shift_any<F>(turned.code[first + i], any, line[i]);
        }
    write_lines(line, kGroup, out.data + first * out.stride, out.stride);
  }
}

void check_scales(const char* op, const std::vector<TokenTile>& tiles, const int32_t* source,
                  const RowScales& scales, int64_t channel_tiles) {
  int64_t bad = -1;  // the last bad scale in memory: one value whatever the threads
#pragma omp parallel for schedule(static) reduction(max : bad)
  for (size_t n = 0; n < tiles.size(); ++n) {
    const auto check = [&](int64_t r, int64_t t) {
      const int64_t at = (source != nullptr ? source[r] : r) * scales.row + t * scales.tile;
      const float s = scales.data[at];
      if (!is_pow2_scale(s) && bit_cast<uint32_t>(s) != 0) bad = std::max(bad, at);
    };
    const int64_t first = tiles[n].row, end = first + tiles[n].tokens;
    if (scales.row == 1) {  // in the order they lie in
      for (int64_t t = 0; t < channel_tiles; ++t)
        for (int64_t r = first; r < end; ++r) check(r, t);
    } else {
      for (int64_t r = first; r < end; ++r)
        for (int64_t t = 0; t < channel_tiles; ++t) check(r, t);
    }
  }
  FP8MOE_CHECK(bad < 0, "[", op,
               "] scales must be positive powers of two (0 only where a row is empty); got ",
               scales.data[std::max<int64_t>(bad, 0)]);
}

// Row r of the plan is row source[r] of q (null: row r). Throws, before anything is written, where
// a scale of a row that carries a token is neither zero nor a positive power of two.
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

  // Token i of a tile, or its last where it has fewer, from that channel tile on.
  const auto codes_of = [&](const TokenTile& t, int i, int64_t ct) {
    const int64_t row = t.row + std::min(i, t.tokens - 1);
    return codes + (source != nullptr ? source[row] : row) * stride + ct * kTile;
  };
  // Runs of tiles, so that a thread mostly knows what it reads next; eight a thread balance.
  const int64_t shares = 8 * static_cast<int64_t>(omp_get_max_threads());
  const int run = static_cast<int>(std::clamp<int64_t>(tiles.size() / shares, 1, 4));
  dispatch_fp8(q.data.dtype, [&]<typename F>() {
#pragma omp parallel for schedule(dynamic, run)
    for (size_t n = 0; n < tiles.size(); ++n) {
      const TokenTile t = tiles[n];
      const TokenTile next = tiles[std::min(n + 1, tiles.size() - 1)];
      TileRows rows;
      for (int64_t ct = 0; ct < channel_tiles; ++ct) {
        rows.channels = static_cast<int>(std::min(kTile, c - ct * kTile));
        for (int i = 0; i < t.tokens; ++i) {
          const int64_t row = source != nullptr ? source[t.row + i] : t.row + i;
          rows.code[i] = codes_of(t, i, ct);
          rows.exponent[i] = exponent_field(scales.of(row)[ct * scales.tile]);
        }
        for (int i = t.tokens; i < kTile; ++i) {
          rows.code[i] = kZeroRow;
          rows.exponent[i] = kUnscaled;
        }
        for (int i = 0; i < kTile; ++i)
          rows.ahead[i] = ct + 1 < channel_tiles ? codes_of(t, i, ct + 1) : codes_of(next, i, 0);
        shift_tile<F>(rows, per_channel, columns_at(columns, t, ct * kTile));
      }
      finish_lines();
    }
  });
}

}  // namespace

// ---- transpose_fp8 ------------------------------------------------------------------------------
// columns = the rows of q transposed expert by expert: codes shifted to one scale per tile, or,
// under requantize, dequantized to f32 and quantized again along the tokens.

namespace {

// One tile of codes [tokens, channels] with a scale per row, by way of f32.
template <typename F>
FP8MOE_CLONES void requantize_tile(const uint8_t* q, int64_t stride, const float* scale_inv,
                                   int64_t scale_stride, int tokens, int channels, bool per_channel,
                                   ScaleRule rule, const ColumnsAt& out) {
  alignas(64) float value[kTile][kTile];
  for (int t = 0; t < tokens; ++t)
    for (int c = 0; c < channels; ++c)
      value[t][c] = fp8_decode<F>(q[t * stride + c]) * scale_inv[t * scale_stride];
  quantize_columns<F>(value[0], kTile, tokens, channels, per_channel, rule, out);
}

void requantize_columns(const Fp8Tensor& q, const RoutingPlan& plan, const Fp8Tensor& columns,
                        ScaleRule rule) {
  const int64_t c = q.data.shape[1];
  const bool per_channel = columns.layout == ScaleLayout::gemm;
  const RowScales scales(q);
  const std::vector<TokenTile> tiles = token_tiles("transpose_fp8", plan);
  dispatch_fp8(q.data.dtype, [&]<typename F>() {
#pragma omp parallel for schedule(dynamic)
    for (size_t n = 0; n < tiles.size(); ++n) {
      const TokenTile t = tiles[n];
      for (int64_t first = 0; first < c; first += kTile)
        requantize_tile<F>(q.data.as<uint8_t>() + t.row * c + first, c,
                           scales.of(t.row) + first / kTile * scales.tile, scales.row, t.tokens,
                           static_cast<int>(std::min(kTile, c - first)), per_channel, rule,
                           columns_at(columns, t, first));
      finish_lines();
    }
  });
}

}  // namespace

template <>
void run(const TransposeFp8& p, Stream) {
  if (p.requantize) return requantize_columns(p.q, p.plan, p.columns, p.rule);
  shift_columns("transpose_fp8", p.q, p.plan, nullptr, p.columns);
}

// ---- permute_transpose_fp8 ----------------------------------------------------------------------
// columns = transpose_fp8(permute_pad(q)): the tokens are gathered on the way.

template <>
void run(const PermuteTransposeFp8& p, Stream) {
  check_rows("permute_transpose_fp8", p.plan);
  shift_columns("permute_transpose_fp8", p.q, p.plan, p.plan.token_of_row(), p.columns);
}

}  // namespace fp8moe::cpu
