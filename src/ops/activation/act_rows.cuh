// What act_quantize and its gradient have in common. Their row kernels are for bf16 operands and
// power-of-two scales: a warp takes 4 rows of one tile of 128 columns of h, 8 lanes per row, 16
// columns per lane (the lanes of tile.cuh).
//
// Of two kinds. kAny = false: I is a multiple of 128, and z is [gate | up] or has no gate. kAny =
// true: any I, so that the last tile may be a part, and z is interleaved or has no gate. A tile of
// h then has two tiles of dz, of 64 pairs each; the second one may be missing. The forward has
// [gate | up] of any I besides.
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

// Gates and ups of 8 bf16 pairs, packed as z [gate | up] has them.
__device__ __forceinline__ void split_pairs(uint4 a, uint4 b, uint4& gates, uint4& ups) {
  gates = {__byte_perm(a.x, a.y, 0x5410), __byte_perm(a.z, a.w, 0x5410),
           __byte_perm(b.x, b.y, 0x5410), __byte_perm(b.z, b.w, 0x5410)};
  ups = {__byte_perm(a.x, a.y, 0x7632), __byte_perm(a.z, a.w, 0x7632),
         __byte_perm(b.x, b.y, 0x7632), __byte_perm(b.z, b.w, 0x7632)};
}

// The kind of row kernel for these operands.
enum class RowKernel { none, whole, any };
inline RowKernel row_kernel_of(const Tensor& z, const Activation& activation,
                               int64_t intermediate) {
  if (z.dtype != DType::bf16) return RowKernel::none;
  if (!activation.interleaved && intermediate % kTile == 0) return RowKernel::whole;
  return activation.interleaved || !activation.traits().gated ? RowKernel::any : RowKernel::none;
}

// body.operator()<kAny>() of a kernel that there is.
template <typename Body>
void with_kind(RowKernel kernel, Body&& body) {
  kernel == RowKernel::any ? body.template operator()<true>() : body.template operator()<false>();
}

}  // namespace fp8moe::cuda
