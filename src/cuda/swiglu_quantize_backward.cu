// dz = Q([dgate | dup]) [R, 2I] and dprob [R] of dh [R, I] and z [R, 2I]; optional columns of dz
// [2I, Kcap] and of h [I, Kcap], h recomputed.
//
// bf16 operands and I % 128 == 0 take one pass: quantize_rows, or quantize_tiles where columns are
// asked for (device/swiglu_backward.cuh). The rest takes a pass an output.
#include "core/backends.h"
#include "core/dispatch.h"
#include "cuda/device/swiglu_backward_tiles.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {
namespace {

constexpr const char* kOp = "swiglu_quantize_backward";
using AnyGradSource = GradSource<PreActivation, FloatSource>;

// dprob[row]: a warp a row, 16 lanes a tile of 128 terms; tiles in ascending order
// (common/reduce.h).
__global__ void __launch_bounds__(256)
    sum_dprobs(const __grid_constant__ AnyGradSource source, const __grid_constant__ PlanView plan,
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

template <typename F>
void launch_any(const AnyGradSource& source, const RoutingPlan& plan, int64_t rows,
                const Fp8Tensor& dz, const Tensor& dprobs, const Fp8Tensor& dz_columns,
                const Fp8Tensor& h_columns, Scaling scaling, cudaStream_t stream) {
  const int64_t intermediate = source.intermediate;
  launch_quantize_source<F>(kOp, source, plan, rows, 2 * intermediate, dz, dz_columns, scaling,
                            stream);
  if (h_columns.defined()) {
    const HiddenSource<PreActivation> hidden = {source.z, source.probs, source.clamp,
                                                source.intermediate};
    dispatch_fp8(h_columns.data.dtype, [&]<typename H>() {
      launch_quantize_source<H>(kOp, hidden, plan, rows, intermediate, {}, h_columns, scaling,
                                stream);
    });
  }
  if (dprobs.defined())
    launch(kOp, sum_dprobs, static_cast<unsigned>(cdiv(rows, 8)), 256, 0, stream, source,
           view_of(plan), static_cast<int>(rows), dprobs.as<float>());
}

// Rows a block of quantize_rows takes: 8 where its 4 sets of tile lanes find work, else 16 or 32.
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
  const auto shared = static_cast<size_t>(p.rows_per_block * p.tiles) * sizeof(float);
  launch(kOp, p.clamp > 0.0f ? backward_rows<F, true> : backward_rows<F, false>,
         static_cast<unsigned>(cdiv(p.rows, p.rows_per_block)), 256, shared, stream, p);
}

// Blocks a cluster of quantize_tiles: more of them split a token block finer, fewer keep more tiles
// in the pipeline of each. 0: the sums of that many tiles do not fit.
int cluster_size(const SwigluBackward& p, const DeviceInfo& device) {
  for (int ranks = p.tiles >= 8 ? 4 : p.tiles >= 2 ? 2 : 1; ranks <= 8; ranks *= 2)
    if (backward_tiles_bytes(cdiv(p.tiles, ranks)) <= static_cast<size_t>(device.shared_per_block))
      return ranks;
  return 0;
}

template <typename F>
void launch_tiles(const SwigluBackward& p, int ranks, const Fp8Tensor& dz_columns,
                  const Fp8Tensor& h_columns, int64_t blocks, cudaStream_t stream) {
  const int64_t tiles = cdiv(p.tiles, ranks);
  const SwigluBackwardColumns to = {columns_out(dz_columns), columns_out(h_columns),
                                    static_cast<int>(tiles)};
  launch_clusters(kOp, p.clamp > 0.0f ? backward_tiles<F, true> : backward_tiles<F, false>,
                  static_cast<unsigned>(blocks * ranks), 512, ranks, backward_tiles_bytes(tiles),
                  stream, p, to);
}

}  // namespace

void swiglu_quantize_backward(const Tensor& dh, const Tensor& z, const Fp8Tensor& z_q,
                              const RoutingPlan& plan, const Tensor& probs, float clamp,
                              const Fp8Tensor& dz, const Tensor& dprobs,
                              const Fp8Tensor& dz_columns, const Fp8Tensor& h_columns,
                              ScaleRule rule, Stream stream) {
  const int64_t rows = dh.shape[0], intermediate = dh.shape[1];
  if (rows == 0 || intermediate == 0) return;
  const DeviceGuard guard(dh.device);
  const Scaling scaling = {rule.pow2, rule.eps, kMaxFloat};
  const bool columns = dz_columns.defined() || h_columns.defined();
  const bool bf16 = z.defined() && z.dtype == DType::bf16 && dh.dtype == DType::bf16;
  const SwigluBackward params = {.z = z.as<uint16_t>(),
                                 .dh = dh.as<uint16_t>(),
                                 .probs = probs.as<float>(),
                                 .clamp = clamp,
                                 .rows = static_cast<int>(rows),
                                 .intermediate = static_cast<int>(intermediate),
                                 .tiles = static_cast<int>(intermediate / kTile),
                                 .plan = view_of(plan),
                                 .dz = rows_out(dz),
                                 .dprobs = dprobs.as<float>(),
                                 .scaling = scaling};
  const bool one_pass = bf16 && intermediate % kTile == 0;
  const int ranks = one_pass ? cluster_size(params, device_info(dh.device)) : 0;
  const bool e4m3_h = !h_columns.defined() || h_columns.data.dtype == DType::e4m3;
  dispatch_fp8(dz.data.dtype, [&]<typename F>() {
    if (one_pass && !columns) return launch_rows<F>(params, stream_of(stream));
    if (ranks > 0 && e4m3_h)
      return launch_tiles<F>(params, ranks, dz_columns, h_columns, plan.columns() / kTile,
                             stream_of(stream));
    const AnyGradSource source = {.z = pre_activation(z, z_q),
                                  .dh = {dh.data, dh.dtype},
                                  .probs = probs.as<float>(),
                                  .clamp = clamp,
                                  .intermediate = static_cast<int>(intermediate)};
    launch_any<F>(source, plan, rows, dz, dprobs, dz_columns, h_columns, scaling,
                  stream_of(stream));
  });
}

}  // namespace fp8moe::cuda
