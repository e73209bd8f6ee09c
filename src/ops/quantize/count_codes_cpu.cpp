// What quantization and the FP8-domain transpose lost, counted over every stride-th row.
#include <algorithm>

#include "common/dispatch.h"
#include "common/fp8.h"
#include "common/scale.h"
#include "cpu/multiversion.h"
#include "cpu/plan_check.h"
#include "cpu/row_scales.h"
#include "ops/backends.h"

namespace fp8moe::cpu {
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
