#include "cuda/gemm/problem.h"

#include "core/check.h"
#include "cuda/gemm/stage.h"
#include "cuda/gemm/tensor_map.h"

namespace fp8moe::cuda::gemm {
namespace {

void check_experts(const char* op, int64_t experts) {
  FP8MOE_CHECK(experts <= kMaxExperts, "[", op, "] the CUDA kernel takes at most ", kMaxExperts,
               " experts; got ", experts);
}

}  // namespace

Params rows_problem(const Fp8Tensor& a, const Fp8Tensor& w, const RoutingPlan& plan,
                    const Tensor& d, const Config& config) {
  const char* op = "grouped_gemm";
  check_experts(op, plan.experts);
  const int64_t rows = a.data.shape[0], n = w.data.shape[1], k = w.data.shape[2];
  const int64_t k_blocks = cdiv(k, kTile);
  Params params{};
  params.bf16 = d.dtype == DType::bf16;
  params.a = operand_map(op, "a", a.data.data, rows, k, kBox);
  params.b = operand_map(op, "w", w.data.data, plan.experts * n, k, kBox);
  params.scale_a = scale_map(op, "a.scale_inv", a.scale_inv.data, k_blocks, pad4(rows), kScaleBox);
  params.d_map = output_map(op, "d", d, 1, rows, n, output_box_rows(Kind::rows, params.bf16));
  params.block_scale_b = w.scale_inv.as<const float>();
  params.row_offsets = plan.row_offsets();
  params.d = d.data;
  params.experts = static_cast<int>(plan.experts);
  params.n = static_cast<int>(n);
  params.k_blocks = static_cast<int>(k_blocks);
  params.flank = has_flank(config.tile_n, n, rows, plan.experts);
  params.band = config.band;
  return params;
}

Params tokens_problem(const Fp8Tensor& dy_t, const Fp8Tensor& x_t, const RoutingPlan& plan,
                      const Tensor& dw, bool accumulate, const Config& config) {
  const char* op = "grouped_gemm_wgrad";
  const int64_t m = dy_t.data.shape[0], n = x_t.data.shape[0], columns = plan.columns();
  Params params{};
  params.bf16 = dw.dtype == DType::bf16;
  params.add = accumulate;
  params.a = operand_map(op, "dy_t", dy_t.data.data, m, columns, kBox);
  params.b = operand_map(op, "x_t", x_t.data.data, n, columns, kBox);
  params.d_map = output_map(op, "dw", dw, plan.experts, m, n,
                            output_box_rows(Kind::tokens_block, params.bf16));
  if (dy_t.layout == ScaleLayout::gemm) {
    const int64_t k_blocks = columns / kTile;
    params.scale_a =
        scale_map(op, "dy_t.scale_inv", dy_t.scale_inv.data, k_blocks, pad4(m), kScaleBox);
    params.scale_b =
        scale_map(op, "x_t.scale_inv", x_t.scale_inv.data, k_blocks, pad4(n), config.tile_n);
  } else {
    params.block_scale_a = dy_t.scale_inv.as<const float>();
    params.block_scale_b = x_t.scale_inv.as<const float>();
  }
  params.tokens_per_expert = plan.tokens_per_expert();
  params.col_offsets = plan.col_offsets();
  params.d = dw.data;
  params.experts = static_cast<int>(plan.experts);
  params.m = static_cast<int>(m);
  params.n = static_cast<int>(n);
  params.k_blocks = static_cast<int>(columns / kTile);
  params.band = config.band;
  params.fetch = accumulate && !params.bf16 && fetches_output(params.k_blocks, plan.experts);
  return params;
}

}  // namespace fp8moe::cuda::gemm
