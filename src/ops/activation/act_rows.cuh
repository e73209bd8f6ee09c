// What act_quantize and its gradient have in common. Their row kernels are for bf16 operands and I
// a multiple of 128: a warp takes 4 rows of one tile, 8 lanes per row, 16 columns per lane (the
// lanes of tile.cuh).
#pragma once

#include "device/activation.cuh"

namespace fp8moe::cuda {

// What a row is to an op with or without a plan.
struct RowKind {
  bool written;  // below row_offsets[E], or below R without a plan
  bool token;    // and not padding
};

__device__ __forceinline__ RowKind row_kind(const PlanView& plan, int64_t row, int64_t rows) {
  if (plan.row_of == nullptr) return {row < rows, row < rows};
  const bool written = row < plan.row_offsets[plan.experts];
  return {written, written && plan.token_of_row[row] >= 0};
}

// 16 bf16 of a lane.
__device__ __forceinline__ void unpack16(const uint4& low, const uint4& high, float (&v)[16]) {
  const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  unpack<Bf16>(words, v);
}

inline PairSource pairs_of(const Tensor& z, const Activation& activation, int64_t intermediate) {
  return {float_source(z), activation, activation.traits().gated, static_cast<int>(intermediate)};
}

// Whether rows of these operands have kernels of their own.
inline bool whole_tiles(const Tensor& z, const Activation& activation, int64_t intermediate,
                        ScaleRule rule) {
  return z.dtype == DType::bf16 && !activation.interleaved && intermediate % kTile == 0 &&
         rule.kind == ScaleKind::pow2;
}

}  // namespace fp8moe::cuda
