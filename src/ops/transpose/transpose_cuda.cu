// transpose_fp8 and permute_transpose_fp8: rows to token-transposed operands, in the FP8 domain.
#include <algorithm>
#include <bit>
#include <cstdint>

#include "common/backends.h"
#include "common/dispatch.h"
#include "device/activation.cuh"
#include "device/runtime.h"
#include "ops/transpose/shift_blocks.cuh"
#include "ops/transpose/shift_channels.cuh"

namespace fp8moe::cuda {

// ---- the shift ----------------------------------------------------------------------------------
// Each 128-token by 128-channel tile: codes shifted to one scale S (of the tile: shift_blocks.cuh,
// or of each channel: shift_channels.cuh) and transposed, code' = RNE(code * s_r / S). One block a
// tile.

namespace {

// Experts share tokens, and each has all of its own in a row: of many tokens a slice of gathered
// rows would be gone from L2 before the next expert wants it. So they come in windows of at most so
// many tokens; two such windows still fit (docs/notes). The kernels count up to 2^6 windows.
constexpr int64_t kWindowTokens = 16384;
int log_windows(int64_t tokens) {
  if (tokens <= 2 * kWindowTokens) return 0;
  const auto windows = static_cast<uint64_t>((tokens - 1) / kWindowTokens);
  return std::min(static_cast<int>(std::bit_width(windows)), 6);
}

// Row r of the plan is row r of q, or under `gather` row token_of_row[r]. Scales that are neither
// zero nor a positive power of two are counted in the plan's status and make their tiles' scales
// infinite. On the current device, q and columns not empty.
void shift_columns(const char* op, const Fp8Tensor& q, const RoutingPlan& plan, bool gather,
                   const Fp8Tensor& columns, Stream stream) {
  const RowsOut rows = rows_out(q);
  const bool by_row = q.layout == ScaleLayout::row;
  const int64_t scale_row = by_row ? q.scale_inv.stride() : 1;
  const bool per_channel = columns.layout == ScaleLayout::gemm;
  const shift::Params params = {
      .codes = rows.data,
      .scale_inv = rows.scale,
      .scale_end = rows.scale + (q.data.shape[0] - 1) * scale_row + cdiv(rows.ld, kTile),
      .scale_tile = rows.scale_tile,
      .scale_row = static_cast<uint32_t>(scale_row),
      .stride = static_cast<uint32_t>(q.data.stride()),
      .channels = static_cast<int>(rows.ld),
      .gather = gather,
      .log_windows = gather ? log_windows(plan.tokens) : 0,
      .plan = view_of(plan),
      .out = columns_out(columns)};
  // Neighbours take neighbouring tokens: they end the lines of the output that they share, and the
  // slice of gathered rows stays in L2. Blocks past the plan's columns end at once.
  const dim3 grid(static_cast<unsigned>(plan.columns() / kTile),
                  static_cast<unsigned>(cdiv(rows.ld, kTile)));
  const auto run = [&]<typename F, bool kScalesByRow>() {
    launch(
        op,
        per_channel ? shift::shift_channels<F, kScalesByRow> : shift::shift_tiles<F, kScalesByRow>,
        grid, shift::kThreads, 0, stream_of(stream), params);
  };
  dispatch_fp8(q.data.dtype, [&]<typename F>() {
    if (by_row && reinterpret_cast<uintptr_t>(rows.scale) % 16 == 0)
      run.template operator()<F, true>();
    else
      run.template operator()<F, false>();
  });
}

}  // namespace

// ---- transpose_fp8 ------------------------------------------------------------------------------
// columns = the rows of q transposed expert by expert: codes shifted to one scale per tile, or,
// under requantize, dequantized to f32 and quantized again along the tokens.

namespace {

// Vec8 dequantized values.
template <typename F>
struct DequantizedSource {
  RowsOut q;

  __device__ __forceinline__ void operator()(int64_t row, int column, float (&v)[8]) const {
    const uint2 codes = load<uint2>(q.data + row * q.ld + column);
    const float s = __ldg(q.scale + row * q.scale_row + column / 128 * q.scale_tile);
    fp8_decode4<F>(codes.x, v), fp8_decode4<F>(codes.y, v + 4);
#pragma unroll
    for (float& x : v) x *= s;
  }
};

}  // namespace

template <>
void run(const TransposeFp8& p, Stream stream) {
  if (p.q.data.numel() == 0) return;
  const DeviceGuard guard(p.q.data.device);
  if (!p.requantize) return shift_columns("transpose_fp8", p.q, p.plan, false, p.columns, stream);
  dispatch_fp8(p.q.data.dtype, [&]<typename F>() {
    quantize_columns_from<F>("transpose_fp8", DequantizedSource<F>{rows_out(p.q)}, p.plan,
                             p.q.data.shape[0], p.q.data.shape[1], {}, p.columns, p.rule, kMaxFloat,
                             stream_of(stream));
  });
}

// ---- permute_transpose_fp8 ----------------------------------------------------------------------
// columns = transpose_fp8(permute_pad(q)): the tokens are gathered on the way.

template <>
void run(const PermuteTransposeFp8& p, Stream stream) {
  if (p.columns.data.numel() == 0) return;
  const DeviceGuard guard(p.q.data.device);
  shift_columns("permute_transpose_fp8", p.q, p.plan, true, p.columns, stream);
}

}  // namespace fp8moe::cuda
