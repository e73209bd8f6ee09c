// Transposed operands [C, Kcap] on the CPU: which tokens each 128-column tile holds, and the tile's
// way from token-major codes to channel-major rows.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "cpu/plan_check.h"
#include "cpu/tile.h"
#include "cpu/transpose_band.h"
#include "fp8moe/plan.h"

namespace fp8moe::cpu {

// Columns [col, col + 128) of a transposed operand: `tokens` rows from `row` on, then zeros.
struct TokenTile {
  int64_t row;
  int64_t col;
  int tokens;  // 1..128
};

// The tiles of every expert's segment, in order of columns.
inline std::vector<TokenTile> token_tiles(const char* op, const RoutingPlan& plan) {
  check_columns(op, plan);
  std::vector<TokenTile> tiles;
  tiles.reserve(static_cast<size_t>(plan.columns() / kTile));
  for (int64_t e = 0; e < plan.experts; ++e) {
    const int64_t count = plan.tokens_per_expert()[e];
    const int64_t row = plan.row_offsets()[e];
    const int64_t col = plan.col_offsets()[e];
    for (int64_t i = 0; i < count; i += kTile)
      tiles.push_back({row + i, col + i, static_cast<int>(std::min(kTile, count - i))});
  }
  return tiles;
}

// Where the tile of those tokens and of 128 channels from `channel` on lies in a transposed
// operand.
struct ColumnsAt {
  uint8_t* data;     // [channels][128], rows `stride` apart
  int64_t stride;    // Kcap
  float* scale_inv;  // one, or one a channel (gemm layout)
};

inline ColumnsAt columns_at(const Fp8Tensor& columns, const TokenTile& tokens, int64_t channel) {
  const int64_t kcap = columns.data.shape[1];
  const int64_t token_tile = tokens.col / kTile;
  const int64_t scale = columns.layout == ScaleLayout::gemm
                            ? token_tile * columns.scale_inv.shape[1] + channel
                            : channel / kTile * columns.scale_inv.shape[1] + token_tile;
  return {columns.data.as<uint8_t>() + channel * kcap + tokens.col, kcap,
          columns.scale_inv.as<float>() + scale};
}

// turned[c][t] = tile[t][c]
inline void turn_tile(const CodeTile& tile, CodeTile& turned) {
  for (int t = 0; t < kTile; t += kBand) turn_band(tile.code + t, t, turned);
}

// out[c][t] = tile[t][c] for all 128 tokens and `channels` channels. finish_lines() comes after it.
inline void transpose_tile(const CodeTile& tile, int channels, uint8_t* out, int64_t out_stride) {
  CodeTile turned;
  turn_tile(tile, turned);
  write_lines(turned.code, channels, out, out_stride);
}

// Q of x [tokens, channels] (at most 128 x 128, rows `stride` apart) along the tokens, transposed
// into `out`, zero past `tokens`. One scale_inv for the tile, or one a channel.
template <typename F, typename T>
FP8MOE_HD void quantize_columns(const T* x, int64_t stride, int tokens, int channels,
                                bool per_channel, ScaleRule rule, const ColumnsAt& out) {
  CodeTile tile;
  if (per_channel) {
    float amax[kTile] = {};
    float scale[kTile];
    for (int t = 0; t < tokens; ++t)
      for (int c = 0; c < channels; ++c) {
        const float magnitude = std::fabs(to_float(x[t * stride + c]));
        amax[c] = magnitude > amax[c] ? magnitude : amax[c];  // false for a NaN
      }
    for (int c = 0; c < channels; ++c) {
      const TileScale s = tile_scale_of<F, T>(amax[c], rule);
      scale[c] = s.scale;
      out.scale_inv[c] = s.scale_inv;
    }
    const auto encode = [&](auto scaled) FP8MOE_INLINE {
      for (int t = 0; t < tokens; ++t)
        for (int c = 0; c < channels; ++c)
          tile.code[t][c] = fp8_encode<F>(scaled(to_float(x[t * stride + c]), scale[c]));
    };
    if (rule.kind == ScaleKind::amax)
      encode(std::divides<float>());
    else
      encode(std::multiplies<float>());
  } else {
    const TileMax max = tile_max(x, stride, tokens, channels);
    const TileScale s = tile_scale_of<F, T>(max.amax, rule);
    tile_encode<F>(x, stride, tokens, channels, s.scale, rule.kind, max.finite, tile.code[0],
                   kTile);
    *out.scale_inv = s.scale_inv;
  }
  if (tokens < kTile) memset(tile.code[tokens], 0, static_cast<size_t>(kTile - tokens) * kTile);
  transpose_tile(tile, channels, out.data, out.stride);
}

}  // namespace fp8moe::cpu
