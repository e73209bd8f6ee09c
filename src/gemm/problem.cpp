#include "gemm/problem.h"

#include "common/check.h"
#include "gemm/stage.h"
#include "gemm/tensor_map.h"

namespace fp8moe::cuda::gemm {
namespace {

void check_experts(const char* op, int64_t experts) {
  FP8MOE_CHECK(experts <= kMaxExperts, "[", op, "] the CUDA kernel takes at most ", kMaxExperts,
               " experts; got ", experts);
}

// How D [experts, m, n] is written.
void set_output(const char* op, const char* name, Kind kind, const Tensor& d, int64_t experts,
                int64_t m, int64_t n, const Candidate& candidate, Params& params) {
  params.d = d.data;
  params.bf16 = d.dtype == DType::bf16;
  const int rows = output_box_rows(kind, params.bf16);
  params.d_box = output_box_map(op, name, d, experts, m, n, rows);
  params.strips =
      (kind != Kind::fprop || params.bf16) && n * size_of(d.dtype) % kOutputBoxBytes == 0;
  if (params.strips)
    params.d_strip = output_strip_map(op, name, d, experts, m, n, rows,
                                      strip_boxes(candidate.tile_n, params.bf16));
}

}  // namespace

Params fprop_problem(const GroupedGemm& p, const Candidate& candidate) {
  const auto& [a, w, plan, d, a2, w2] = p;
  const char* op = "grouped_gemm";
  check_experts(op, plan.experts);
  const int64_t rows = a.data.shape[0], n = w.data.shape[1], k = w.data.shape[2];
  const int64_t k_blocks = cdiv(k, kTile);
  Params params{};
  params.pair[0].a = operand_map(op, "a", a.data.data, rows, k, candidate.tile_m);
  params.pair[0].b = operand_map(op, "w", w.data.data, plan.experts * n, k, candidate.tile_n);
  if (shape_of(candidate).tail) {
    params.pair[0].a_tail = operand_map(op, "a", a.data.data, rows, k, kBox);
    params.pair[0].b_tail = operand_map(op, "w", w.data.data, plan.experts * n, k, kTailColumns);
  }
  params.pair[0].scale_a =
      scale_map(op, "a.scale_inv", a.scale_inv.data, k_blocks, pad4(rows), kScaleBox);
  set_output(op, "d", Kind::fprop, d, 1, rows, n, candidate, params);
  params.block_scale_b = w.scale_inv.as<const float>();
  params.row_offsets = plan.row_offsets();
  params.experts = static_cast<int>(plan.experts);
  params.n = static_cast<int>(n);
  params.k_blocks = params.first_k_blocks = static_cast<int>(k_blocks);
  params.raster_group = candidate.raster_group;
  if (a2.defined()) {
    const int64_t k2 = a2.data.shape[1];
    params.pair[1].a = operand_map(op, "a2", a2.data.data, rows, k2, candidate.tile_m);
    params.pair[1].b = operand_map(op, "w2", w2.data.data, plan.experts * n, k2, candidate.tile_n);
    if (shape_of(candidate).tail) {
      params.pair[1].a_tail = operand_map(op, "a2", a2.data.data, rows, k2, kBox);
      params.pair[1].b_tail =
          operand_map(op, "w2", w2.data.data, plan.experts * n, k2, kTailColumns);
    }
    params.pair[1].scale_a =
        scale_map(op, "a2.scale_inv", a2.scale_inv.data, 1, pad4(rows), kScaleBox);
    params.block_scale_b2 = w2.scale_inv.as<const float>();
    ++params.k_blocks;
  }
  return params;
}

Params wgrad_problem(const Fp8Tensor& dy_t, const Fp8Tensor& x_t, const RoutingPlan& plan,
                     const Tensor& dw, bool accumulate, const Candidate& candidate) {
  const char* op = "grouped_gemm_wgrad";
  const int64_t m = dy_t.data.shape[0], n = x_t.data.shape[0], columns = plan.columns();
  Params params{};
  params.add = accumulate;
  params.pair[0].a = operand_map(op, "dy_t", dy_t.data.data, m, columns, candidate.tile_m);
  params.pair[0].b = operand_map(op, "x_t", x_t.data.data, n, columns, candidate.tile_n);
  set_output(op, "dw", Kind::wgrad_128x128, dw, plan.experts, m, n, candidate, params);
  if (dy_t.layout == ScaleLayout::gemm) {
    const int64_t k_blocks = columns / kTile;
    params.pair[0].scale_a =
        scale_map(op, "dy_t.scale_inv", dy_t.scale_inv.data, k_blocks, pad4(m), kScaleBox);
    params.scale_b =
        scale_map(op, "x_t.scale_inv", x_t.scale_inv.data, k_blocks, pad4(n), candidate.tile_n);
  } else {
    params.block_scale_a = dy_t.scale_inv.as<const float>();
    params.block_scale_b = x_t.scale_inv.as<const float>();
  }
  params.tokens_per_expert = plan.tokens_per_expert();
  params.col_offsets = plan.col_offsets();
  params.experts = static_cast<int>(plan.experts);
  params.m = static_cast<int>(m);
  params.n = static_cast<int>(n);
  params.k_blocks = static_cast<int>(columns / kTile);
  params.raster_group = candidate.raster_group;
  params.load_d = candidate.load_d;
  return params;
}

}  // namespace fp8moe::cuda::gemm
