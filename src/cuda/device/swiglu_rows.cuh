// The row kernels of SwiGLU for bf16 operands and I a multiple of 128: a warp takes 4 rows of one
// tile, 8 lanes a row, 16 columns a lane (the lanes of tile.cuh).
#pragma once

#include "cuda/device/swiglu.cuh"

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

// A lane's 16 bf16 of a tile's row, still packed.
struct Packed16 {
  uint4 half[2];

  __device__ __forceinline__ void load(const uint16_t* tile_of_row) {
    half[0] = load_once<uint4>(tile_of_row + Tile<8>::column(0));
    half[1] = load_once<uint4>(tile_of_row + Tile<8>::column(1));
  }
  __device__ __forceinline__ void clear() { half[0] = half[1] = uint4{0, 0, 0, 0}; }
  __device__ __forceinline__ void unpack16(float (&v)[16]) const {
    const uint32_t words[8] = {half[0].x, half[0].y, half[0].z, half[0].w,
                               half[1].x, half[1].y, half[1].z, half[1].w};
    unpack<Bf16>(words, v);
  }
};

}  // namespace fp8moe::cuda
