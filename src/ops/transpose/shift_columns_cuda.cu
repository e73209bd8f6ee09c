// Each 128-token by 128-channel tile: codes shifted to one scale S (of the tile: shift_blocks.cuh,
// or of each channel: shift_channels.cuh) and transposed, code' = RNE(code * s_r / S). One block a
// tile.
#include "ops/transpose/shift_columns_cuda.h"

#include "common/dispatch.h"
#include "device/runtime.h"
#include "ops/transpose/shift_blocks.cuh"
#include "ops/transpose/shift_channels.cuh"

namespace fp8moe::cuda {

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

}  // namespace fp8moe::cuda
