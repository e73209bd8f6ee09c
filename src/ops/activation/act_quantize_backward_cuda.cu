// dz = Q([dgate | dup]) [R, 2I] and dprob [R] of dh [R, I] and z [R, 2I]; optional columns of dz
// [2I, Kcap] and of h [I, Kcap], h recomputed.
//
// bf16 operands and I % 128 == 0 take one pass: backward_rows (device/swiglu_backward.cuh), or
// backward_tiles (device/swiglu_backward_tiles.cuh) where columns are asked for. The rest takes a
// pass an output.
#include <algorithm>
#include <cmath>

#include "common/dispatch.h"
#include "device/runtime.h"
#include "ops/activation/swiglu_backward_tiles.cuh"
#include "ops/backends.h"

namespace fp8moe::cuda {
namespace {

constexpr const char* kOp = "act_quantize_backward";

// dprob[row]: a warp a row, 16 lanes a tile of 128 terms; tiles in ascending order
// (common/reduce.h).
__global__ void __launch_bounds__(256)
    sum_dprobs(const __grid_constant__ GradSource source, const __grid_constant__ PlanView plan,
               int rows, float* dprobs) {
  const int64_t row = int64_t{8} * blockIdx.x + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const RowKind kind = row_kind(plan, row, rows);
  if (!kind.written) return;
  float sum = 0.0f;
  for (int first = 0; kind.token && first < source.intermediate; first += 256) {
    const int column = first + 8 * lane;
    float term[8] = {};
    if (column < source.intermediate) source.terms(row, column, term);
    const float tile_sum = lanes_tree_sum<16>(tree_sum<8>(term));
    sum += __shfl_sync(kFullWarp, tile_sum, 0);
    if (first + 128 < source.intermediate) sum += __shfl_sync(kFullWarp, tile_sum, 16);
  }
  if (lane == 0) dprobs[row] = sum;
}

void launch_dprobs(const GradSource& source, const RoutingPlan& plan, int64_t rows,
                   const Tensor& dprobs, cudaStream_t stream) {
  launch(kOp, sum_dprobs, static_cast<unsigned>(cdiv(rows, 8)), 256, 0, stream, source,
         view_of(plan), static_cast<int>(rows), dprobs.as<float>());
}

void launch_any(const GradSource& source, const RoutingPlan& plan, int64_t rows,
                const Fp8Tensor& dz, const Tensor& dprobs, const Fp8Tensor& dz_columns,
                const Fp8Tensor& h_columns, ScaleRule rule, cudaStream_t stream) {
  const int64_t intermediate = source.intermediate;
  dispatch_fp8(dz.data.dtype, [&]<typename F>() {
    if (dz_columns.defined())
      quantize_columns_from<F>(kOp, source, plan, rows, 2 * intermediate, dz, dz_columns, rule,
                               kMaxFloat, stream);
    else
      quantize_rows_from<F>(kOp, source, plan, rows, 2 * intermediate, dz, rule, kMaxFloat, stream);
  });
  if (h_columns.defined()) {
    const HiddenSource hidden = {source.z, source.probs, source.limit, source.intermediate};
    quantize_columns_from<E4M3>(kOp, hidden, plan, rows, intermediate, {}, h_columns, rule,
                                kMaxFloat, stream);
  }
  if (dprobs.defined()) launch_dprobs(source, plan, rows, dprobs, stream);
}

// Rows a block of backward_rows takes: 8 where its 4 sets of tile lanes find work, else 16 or 32.
int rows_per_block(int64_t tiles) {
  int best = 8;
  double best_use = 0.0;
  for (int rows = 8; rows <= 32; rows *= 2) {
    const int64_t lanes = 32 / rows;
    const double use = static_cast<double>(tiles) / static_cast<double>(lanes * cdiv(tiles, lanes));
    if (use > best_use + 0.05) best = rows, best_use = use;
  }
  return best;
}

template <typename F>
void launch_rows(SwigluBackward p, cudaStream_t stream) {
  p.rows_per_block = rows_per_block(p.tiles);
  const size_t shared =
      sizeof(BackwardRowsShared) + static_cast<size_t>(p.rows_per_block * p.tiles) * sizeof(float);
  launch(kOp, p.limit > 0.0f ? backward_rows<F, true> : backward_rows<F, false>,
         static_cast<unsigned>(cdiv(p.rows, p.rows_per_block)), 256, shared, stream, p);
}

// Tiles that a range of backward_tiles has at least. Where sums of dprob are handed on, a block of
// tokens takes as long as a range of it and a wait, of about half a tile's time, a range.
int64_t fewest_tiles(const SwigluBackward& p) {
  return p.dprobs == nullptr ? 1 : std::lround(std::sqrt(static_cast<double>(p.tiles)));
}

template <typename F>
void launch_tiles(const SwigluBackward& p, int64_t tiles, const Fp8Tensor& dz_columns,
                  const Fp8Tensor& h_columns, Device device, cudaStream_t stream) {
  const SwigluBackwardColumns to = {columns_out(dz_columns), columns_out(h_columns)};
  const int64_t ranges = std::min<int64_t>(cdiv(tiles, fewest_tiles(p)), kMostRanges);
  const unsigned grid = persistent_grid(device, ranges, 1);
  const auto go = [&]<ColumnKind kKind>() {
    launch(kOp, p.limit > 0.0f ? backward_tiles<F, kKind, true> : backward_tiles<F, kKind, false>,
           grid, BackwardTile::kThreads, sizeof(BackwardTilesShared), stream, p, to);
  };
  const ColumnKind kind = kind_of(dz_columns.defined() ? dz_columns : h_columns);
  kind == ColumnKind::block ? go.template operator()<ColumnKind::block>()
                            : go.template operator()<ColumnKind::column>();
}

}  // namespace

template <>
void run(const ActQuantizeBackward& p, Stream stream) {
  const int64_t rows = p.dh.shape[0], intermediate = p.dh.shape[1];
  if (rows == 0 || intermediate == 0) return;
  const DeviceGuard guard(p.dh.device);
  SwigluBackward params = {.z = p.z.as<uint16_t>(),
                           .dh = p.dh.as<uint16_t>(),
                           .probs = p.probs.as<float>(),
                           .limit = p.limit,
                           .sigmoid_of_limit = pinned_sigmoid(p.limit),
                           .rows = static_cast<int>(rows),
                           .intermediate = static_cast<int>(intermediate),
                           .tiles = static_cast<int>(intermediate / kTile),
                           .plan = view_of(p.plan),
                           .dz = rows_out(p.dz),
                           .dprobs = p.dprobs.as<float>(),
                           .scaling = {p.rule.eps}};
  const bool columns = p.dz_columns.defined() || p.h_columns.defined();
  const bool one_pass = p.z.dtype == DType::bf16 && p.dh.dtype == DType::bf16 &&
                        intermediate % kTile == 0 && p.rule.kind == ScaleKind::pow2;
  if (one_pass && !columns)
    return dispatch_fp8(p.dz.data.dtype,
                        [&]<typename F>() { launch_rows<F>(params, stream_of(stream)); });
  const GradSource source = {.z = float_source(p.z),
                             .dh = float_source(p.dh),
                             .probs = p.probs.as<float>(),
                             .limit = p.limit,
                             .intermediate = static_cast<int>(intermediate)};
  if (one_pass) {
    const int64_t tiles = p.plan.columns() / kTile * params.tiles;
    if (tiles == 0) return;
    params.carry_ready = p.workspace.as<unsigned>();
    dispatch_fp8(p.dz.data.dtype, [&]<typename F>() {
      launch_tiles<F>(params, tiles, p.dz_columns, p.h_columns, p.dh.device, stream_of(stream));
    });
    return;
  }
  launch_any(source, p.plan, rows, p.dz, p.dprobs, p.dz_columns, p.h_columns, p.rule,
             stream_of(stream));
}

}  // namespace fp8moe::cuda
