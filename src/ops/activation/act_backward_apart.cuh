// act_quantize_backward where each output takes its own pass over z and dh.
#pragma once

#include "ops/activation/act_backward.cuh"

namespace fp8moe::cuda {

// dprob[row]: a warp per row, 16 lanes per tile of 128 terms; tiles in ascending order
// (common/reduce.h).
template <class Grad>
__global__ void __launch_bounds__(256)
    sum_dprobs(const __grid_constant__ Grad source, const __grid_constant__ PlanView plan, int rows,
               int intermediate, float* dprobs) {
  const int64_t row = int64_t{8} * blockIdx.x + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const RowKind kind = row_kind(plan, row, rows);
  if (!kind.written) return;
  float sum = 0.0f;
  for (int first = 0; kind.token && first < intermediate; first += 256) {
    const int column = first + 8 * lane;
    float term[8] = {};
    if (column < intermediate) source.terms(row, column, term);
    const float tile_sum = lanes_tree_sum<16>(tree_sum<8>(term));
    sum += __shfl_sync(kFullWarp, tile_sum, 0);
    if (first + 128 < intermediate) sum += __shfl_sync(kFullWarp, tile_sum, 16);
  }
  if (lane == 0) dprobs[row] = sum;
}

// By a source of dz, which has the terms of dprob, too, and one of h.
template <class Grad, class Hidden>
void launch_apart(const ActQuantizeBackward& p, const Grad& source, const Hidden& hidden,
                  cudaStream_t stream) {
  const int64_t rows = p.dh.shape[0], intermediate = p.dh.shape[1], width = p.z.shape[1];
  dispatch_fp8(p.dz.data.dtype, [&]<typename F>() {
    if (p.dz_columns.defined())
      quantize_columns_from<F>(kBackward, source, p.plan, rows, width, p.dz, p.dz_columns, p.rule,
                               kMaxFloat, stream);
    else
      quantize_rows_from<F>(kBackward, source, p.plan, rows, width, p.dz, p.rule, kMaxFloat,
                            stream);
  });
  if (p.h_columns.defined())
    quantize_columns_from<E4M3>(kBackward, hidden, p.plan, rows, intermediate, {}, p.h_columns,
                                p.rule, kMaxFloat, stream);
  if (p.dprobs.defined())
    launch(kBackward, sum_dprobs<Grad>, static_cast<unsigned>(cdiv(rows, 8)), 256, 0, stream,
           source, view_of(p.plan), static_cast<int>(rows), static_cast<int>(intermediate),
           p.dprobs.as<float>());
}

// Whether launch_side_by_side has kernels for these operands: bf16 [gate | up] of any I.
inline bool has_side_kernels(const ActQuantizeBackward& p) {
  return p.z.dtype == DType::bf16 && p.dh.dtype == DType::bf16 && p.rule.kind == ScaleKind::pow2 &&
         p.activation.traits().gated && !p.activation.interleaved;
}
void launch_side_by_side(const ActQuantizeBackward& p, cudaStream_t stream);

}  // namespace fp8moe::cuda
