// dz = Q([dgate | dup]) [R, 2I] and dprob [R] of dh [R, I] and z [R, 2I]; optional columns of dz
// [2I, Kcap] and of h [I, Kcap], h recomputed.
#include "core/backends.h"
#include "core/dispatch.h"
#include "cuda/device/swiglu.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {
namespace {

// dprob[row]: a warp a row, 16 lanes a tile of 128 terms; tiles in ascending order
// (common/reduce.h).
__global__ void __launch_bounds__(256)
    sum_dprobs(const __grid_constant__ GradSource source, const __grid_constant__ PlanView plan,
               int rows, float* dprobs) {
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int end = plan.row_of != nullptr ? plan.row_offsets[plan.experts] : rows;
  if (row >= end) return;
  if (plan.row_of != nullptr && plan.token_of_row[row] < 0) {
    if (lane == 0) dprobs[row] = 0.0f;
    return;
  }
  float sum = 0.0f;
  for (int first = 0; first < source.intermediate; first += 256) {
    const int column = first + 8 * lane;
    float term[8] = {};
    if (column < source.intermediate) source.terms(row, column, term);
    const float tile_sum = lanes_tree_sum<16>(tree_sum<8>(term));
    sum += __shfl_sync(kFullWarp, tile_sum, 0);
    if (first + 128 < source.intermediate) sum += __shfl_sync(kFullWarp, tile_sum, 16);
  }
  if (lane == 0) dprobs[row] = sum;
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
  const char* op = "swiglu_quantize_backward";
  const GradSource source = {.z = pre_activation(z, z_q),
                             .dh = {dh.data, dh.dtype},
                             .probs = probs.as<float>(),
                             .clamp = clamp,
                             .intermediate = static_cast<int>(intermediate)};
  const Scaling scaling = {rule.pow2, rule.eps, kMaxFloat};
  dispatch_fp8(dz.data.dtype, [&]<typename F>() {
    launch_quantize_source<F>(op, source, plan, rows, 2 * intermediate, dz, dz_columns, scaling,
                              stream_of(stream));
  });
  if (h_columns.defined())
    dispatch_fp8(h_columns.data.dtype, [&]<typename F>() {
      launch_quantize_source<F>(
          op, HiddenSource{source.z, source.probs, clamp, source.intermediate}, plan, rows,
          intermediate, {}, h_columns, scaling, stream_of(stream));
    });
  if (dprobs.defined())
    launch(op, sum_dprobs, static_cast<unsigned>(cdiv(rows, 8)), 256, 0, stream_of(stream), source,
           view_of(plan), static_cast<int>(rows), dprobs.as<float>());
}

}  // namespace fp8moe::cuda
