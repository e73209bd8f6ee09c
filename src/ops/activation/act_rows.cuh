// What act_quantize and its gradient have in common. Their row kernels are for bf16 operands and
// power-of-two scales: a warp takes 4 rows of one tile of 128 columns of h, 8 lanes per row, 16
// columns per lane (the lanes of tile.cuh).
//
// Of three kinds, by I and how z lies:
//   whole  I is a multiple of 128; z is [gate | up] or has no gate.
//   any    Any I, so that the last tile may be a part; z is interleaved or has no gate. A tile of h
//          has two tiles of dz, of 64 pairs each; the second one may be missing.
//   side   [gate | up] of another I. Tiles of dup begin inside those of h, and one tile of dz holds
//          the last gates and the first ups: see SideBySide.
// The forward has no third kind: it takes [gate | up] of any I.
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
enum class RowKernel { none, whole, any, side };
inline RowKernel row_kernel_of(const Tensor& z, const Activation& activation,
                               int64_t intermediate) {
  if (z.dtype != DType::bf16) return RowKernel::none;
  if (!activation.interleaved && intermediate % kTile == 0) return RowKernel::whole;
  return activation.interleaved || !activation.traits().gated ? RowKernel::any : RowKernel::side;
}

// body.operator()<kernel>() of a kernel that there is.
template <typename Body>
void with_kernel(RowKernel kernel, Body&& body) {
  switch (kernel) {
    case RowKernel::whole: return body.template operator()<RowKernel::whole>();
    case RowKernel::any: return body.template operator()<RowKernel::any>();
    case RowKernel::side: return body.template operator()<RowKernel::side>();
    case RowKernel::none: return;
  }
}

// Tiles of [gate | up] whose I is no multiple of 128. Items are tiles of h, in ascending order,
// with the tile of dgate that has the same columns. The tile of dup that ends in an item began in
// the one before: places of an item from 128 - rest on keep their dup for the next one, which has
// places of its own no more to add. Item I / 128 has `rest` columns of h; its other places take the
// first columns again, for their dup stands beside the last dgate. An item with nothing but a tile
// of dup may follow.
struct SideBySide {
  int inner, whole, rest;  // I, I / 128, I % 128

  __device__ __forceinline__ explicit SideBySide(int inner)
      : inner(inner), whole(inner / 128), rest(inner % 128) {}
  // Whether that place of an item has dup in the tile of dgate.
  __device__ __forceinline__ bool straddles(int item, int place) const {
    return 128 * item + place >= inner;
  }
  // The column of h to read there, or -1.
  __device__ __forceinline__ int column(int item, int place) const {
    const int at = 128 * item + place, again = at - inner;
    return again < 0 ? at : again < min(128 - rest, inner) ? again : -1;
  }
  // Of the tile of dgate, which is that of dz: where its columns end.
  __device__ __forceinline__ int end() const { return min(2 * inner, 128 * (whole + 1)); }
  // Whether dup there is of the next item's tile.
  __device__ __forceinline__ bool waits(int place) const { return place >= 128 - rest; }
  // The column of h whose dup is there, in tile `whole + item` of dz, or -1.
  __device__ __forceinline__ int up_column(int item, int place) const {
    const int at = 128 * (waits(place) ? item - 1 : item) + place;
    return item > 0 && at < inner ? at : -1;
  }
};
inline int64_t side_items(int64_t inner) { return cdiv(2 * inner, kTile) - inner / kTile; }

}  // namespace fp8moe::cuda
