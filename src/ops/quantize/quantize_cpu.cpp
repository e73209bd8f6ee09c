// quantize, quantize_weight, turn_weight, dequantize, count_codes on the CPU: their definition.
#include <algorithm>

#include "common/backends.h"
#include "common/dispatch.h"
#include "common/fp8.h"
#include "common/scale.h"
#include "cpu/columns.h"
#include "cpu/multiversion.h"
#include "cpu/plan_check.h"
#include "cpu/row_scales.h"
#include "cpu/tile.h"

namespace fp8moe::cpu {

// ---- quantize -----------------------------------------------------------------------------------
// q = Q(x): x [M, K], one scale per tile of 1x128.

namespace {

template <typename F, typename T>
FP8MOE_CLONES void quantize_row(const T* x, int64_t k, ScaleRule rule, uint8_t* q, float* scale_inv,
                                int64_t scale_stride) {
  quantize_tiles<F>(x, k, rule, q, scale_inv, scale_stride);
}

}  // namespace

template <>
void run(const Quantize& p, Stream) {
  const int64_t m = p.x.shape[0];
  const int64_t k = p.x.shape[1];
  const int64_t tiles = cdiv(k, kTile);
  const bool gemm = p.q.layout == ScaleLayout::gemm;
  dispatch_fp8(p.q.data.dtype, [&]<typename F>() {
    dispatch_float(p.x.dtype, [&]<typename T>() {
#pragma omp parallel for schedule(static)
      for (int64_t i = 0; i < m; ++i)
        quantize_row<F>(p.x.as<T>() + i * k, k, p.rule, p.q.data.as<uint8_t>() + i * k,
                        p.q.scale_inv.as<float>() + (gemm ? i : i * tiles), gemm ? pad4(m) : 1);
    });
  });
}

// ---- quantize_weight ----------------------------------------------------------------------------
// q = Q(w) by 128x128 tiles of w [E, N, K], in E4M3; q_t [E, K, N] holds the same codes transposed.
// The rows of an expert may lie in two tensors, w and below.

namespace {

// One tile of w [rows, cols] -> its codes and scale_inv; past the edge the codes are zero.
template <typename T>
FP8MOE_CLONES float encode_tile(const T* w, int64_t stride, int rows, int cols, ScaleRule rule,
                                CodeTile& tile) {
  const TileMax max = tile_max(w, stride, rows, cols);
  const TileScale s = tile_scale_of<E4M3, T>(max.amax, rule);
  tile_encode<E4M3>(w, stride, rows, cols, s.scale, rule.kind, max.finite, tile.code[0], kTile);
  return s.scale_inv;
}

void transpose(const CodeTile& tile, int rows, int cols, uint8_t* out, int64_t stride) {
  if (rows == kTile) return transpose_tile(tile, cols, out, stride);
  CodeTile turned;
  turn_tile(tile, turned);
  for (int c = 0; c < cols; ++c)
    memcpy(out + c * stride, turned.code[c], static_cast<size_t>(rows));
}

// A 128x128 tile of weights [E, N, K], and where it begins: in codes [E, N, K] and [E, K, N], and
// in the scales of both.
struct WeightTile {
  int64_t expert, row, at, at_t, scale, scale_t;
  int rows, cols;
};

// f(tile) for every tile, on many threads.
template <typename F>
void for_each_tile(int64_t experts, int64_t n, int64_t k, const F& f) {
  const int64_t n_tiles = cdiv(n, kTile), k_tiles = cdiv(k, kTile);
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t e = 0; e < experts; ++e)
    for (int64_t nt = 0; nt < n_tiles; ++nt) {
      const int64_t row = nt * kTile;
      for (int64_t kt = 0; kt < k_tiles; ++kt) {
        const int64_t col = kt * kTile;
        f(WeightTile{.expert = e,
                     .row = row,
                     .at = (e * n + row) * k + col,
                     .at_t = (e * k + col) * n + row,
                     .scale = (e * n_tiles + nt) * k_tiles + kt,
                     .scale_t = (e * k_tiles + kt) * n_tiles + nt,
                     .rows = static_cast<int>(std::min(kTile, n - row)),
                     .cols = static_cast<int>(std::min(kTile, k - col))});
      }
      finish_lines();
    }
}

}  // namespace

template <>
void run(const QuantizeWeight& p, Stream) {
  const int64_t n = p.rows(), upper = p.w.shape[1];
  const int64_t k = p.w.shape[2];
  dispatch_float(p.w.dtype, [&]<typename T>() {
    for_each_tile(p.w.shape[0], n, k, [&](const WeightTile& t) {
      CodeTile tile;
      // at - expert (n - upper) k: the same tile in w; the rows of `below` likewise.
      const T* in = t.row < upper ? p.w.as<T>() + t.at - t.expert * (n - upper) * k
                                  : p.below.as<T>() + t.at - (t.expert + 1) * upper * k;
      const float scale_inv = encode_tile(in, k, t.rows, t.cols, p.rule, tile);
      if (p.q.defined()) {
        uint8_t* out = p.q.data.as<uint8_t>() + t.at;
        for (int i = 0; i < t.rows; ++i)
          memcpy(out + i * k, tile.code[i], static_cast<size_t>(t.cols));
        p.q.scale_inv.as<float>()[t.scale] = scale_inv;
      }
      if (p.q_t.defined()) {
        transpose(tile, t.rows, t.cols, p.q_t.data.as<uint8_t>() + t.at_t, n);
        p.q_t.scale_inv.as<float>()[t.scale_t] = scale_inv;
      }
    });
  });
}

// ---- turn_weight --------------------------------------------------------------------------------
// q_t [E, K, N] = q [E, N, K] transposed by 128x128 tiles, and so are its scales.

template <>
void run(const TurnWeight& p, Stream) {
  const int64_t n = p.q.data.shape[1];
  const int64_t k = p.q.data.shape[2];
  for_each_tile(p.q.data.shape[0], n, k, [&](const WeightTile& t) {
    CodeTile tile{};
    const uint8_t* in = p.q.data.as<const uint8_t>() + t.at;
    for (int i = 0; i < t.rows; ++i) memcpy(tile.code[i], in + i * k, static_cast<size_t>(t.cols));
    transpose(tile, t.rows, t.cols, p.q_t.data.as<uint8_t>() + t.at_t, n);
    p.q_t.scale_inv.as<float>()[t.scale_t] = p.q.scale_inv.as<const float>()[t.scale];
  });
}

// ---- dequantize ---------------------------------------------------------------------------------
// x = decode(q) * scale_inv in f32, rounded to x's dtype; q [M, K], or [E, M, K] in block layout.

namespace {

// One row [k] with its scales `scale_stride` apart.
template <typename F, typename T>
FP8MOE_CLONES void dequantize_row(const uint8_t* __restrict q, int64_t k, const float* scale_inv,
                                  int64_t scale_stride, T* __restrict x) {
  for (int64_t c = 0; c < k; c += kTile) {
    const float s = scale_inv[c / kTile * scale_stride];
    const int64_t end = std::min(c + kTile, k);
    for (int64_t i = c; i < end; ++i) x[i] = from_float<T>(fp8_decode<F>(q[i]) * s);
  }
}

}  // namespace

template <>
void run(const Dequantize& p, Stream) {
  const int64_t k = p.x.shape[p.x.ndim - 1];
  const int64_t m = p.x.shape[p.x.ndim - 2];
  const int64_t rows = p.x.numel() / k;
  const int64_t k_tiles = cdiv(k, kTile);
  const int64_t m_tiles = cdiv(m, kTile);
  const auto scales_of_row = [&](int64_t i) {
    switch (p.q.layout) {
      case ScaleLayout::row: return i * k_tiles;
      case ScaleLayout::gemm: return i;
      default: return (i / m * m_tiles + i % m / kTile) * k_tiles;
    }
  };
  dispatch_fp8(p.q.data.dtype, [&]<typename F>() {
    dispatch_float(p.x.dtype, [&]<typename T>() {
#pragma omp parallel for schedule(static)
      for (int64_t i = 0; i < rows; ++i)
        dequantize_row<F>(p.q.data.as<uint8_t>() + i * k, k,
                          p.q.scale_inv.as<float>() + scales_of_row(i),
                          p.q.layout == ScaleLayout::gemm ? pad4(m) : 1, p.x.as<T>() + i * k);
    });
  });
}

// ---- count_codes --------------------------------------------------------------------------------
// What quantization and the FP8-domain transpose lost, counted over every stride-th row.

namespace {

FP8MOE_CLONES int64_t nonzero_codes(const uint8_t* q, int n) {
  int32_t found = 0;
  for (int i = 0; i < n; ++i) found += (q[i] & 0x7F) != 0;
  return found;
}

// Nonzero codes of at most `limit` in magnitude.
FP8MOE_CLONES int64_t codes_up_to(const uint8_t* q, int n, uint32_t limit) {
  int32_t found = 0;
  for (int i = 0; i < n; ++i) found += (q[i] & 0x7Fu) - 1u < limit;
  return found;
}

// One live tile of a row, moved onto the scales of column tile `tile`.
template <typename F>
void count_shift(const uint8_t* q, int n, float scale, const Fp8Tensor& columns, int64_t channel,
                 int64_t tile, int64_t* counts) {
  const float* to = columns.scale_inv.as<const float>();
  const int from = exponent_field(scale);
  int k = 0;
  if (columns.layout == ScaleLayout::block) {
    k = exponent_field(to[channel / kTile * columns.scale_inv.shape[1] + tile]) - from;
    counts[kFlushed] += codes_up_to(q, n, fp8_flushed_by<F>(k));
  } else {
    to += tile * columns.scale_inv.shape[1] + channel;
    k = exponent_field(*std::max_element(to, to + n)) - from;
    for (int i = 0; i < n; ++i)
      counts[kFlushed] += codes_up_to(q + i, 1, fp8_flushed_by<F>(exponent_field(to[i]) - from));
  }
  ++counts[kFirstShift + std::clamp(k, 0, 16)];
}

// The column tile of a row of the plan.
int64_t tile_of(const RoutingPlan& plan, int64_t row) {
  const int32_t* offsets = plan.row_offsets();
  const int64_t e = std::upper_bound(offsets + 1, offsets + plan.experts, row) - (offsets + 1);
  return (plan.col_offsets()[e] + row - offsets[e]) / kTile;
}

}  // namespace

template <>
void run(const CountCodes& p, Stream) {
  const bool of_tokens = p.q.layout == ScaleLayout::row;
  if (p.columns.defined()) {
    check_columns("count_codes", p.plan);
    check_row_of("count_codes", p.plan);
  } else if (!of_tokens) {
    check_rows("count_codes", p.plan);
  }
  const int64_t rows = of_tokens ? p.q.data.shape[0] : p.plan.row_offsets()[p.plan.experts];
  const int64_t c = p.q.data.shape[1];
  const RowScales scales(p.q);
  int64_t total[kCodeCounts] = {};
  dispatch_fp8(p.q.data.dtype, [&]<typename F>() {
#pragma omp parallel for schedule(static) reduction(+ : total[ : kCodeCounts])
    for (int64_t r = 0; r < rows; r += p.stride) {
      if (!of_tokens && p.plan.token_of_row()[r] < 0) continue;
      for (int64_t first = 0; first < c; first += kTile) {
        const uint8_t* tile = p.q.data.as<const uint8_t>() + r * p.q.data.stride() + first;
        const int n = static_cast<int>(std::min(kTile, c - first));
        const int64_t nonzero = nonzero_codes(tile, n);
        if (nonzero == 0) continue;
        total[kLive] += n;
        total[kUnderflowed] += n - nonzero;
        if (!p.columns.defined()) continue;
        for (int64_t s = 0; s < p.plan.slots; ++s) {
          const int32_t row = p.plan.row_of()[r * p.plan.slots + s];
          if (row < 0) continue;
          total[kMoved] += nonzero;
          count_shift<F>(tile, n, scales.of(r)[first / kTile * scales.tile], p.columns, first,
                         tile_of(p.plan, row), total);
        }
      }
    }
  });
  for (int i = 0; i < kCodeCounts; ++i) p.counts.as<int64_t>()[i] += total[i];
}

}  // namespace fp8moe::cpu
