// Zeroing the padding rows inside the experts, as blocks of a kernel that moves rows.
#pragma once

#include "cuda/device/memory.cuh"
#include "cuda/device/plan.cuh"

namespace fp8moe::cuda {

constexpr int kZeroRows = 16;  // padding rows of one block

// An expert has at most align - 1 padding rows.
inline unsigned zero_padding_blocks_an_expert(const RoutingPlan& plan) {
  return static_cast<unsigned>(cdiv(plan.align - 1, kZeroRows));
}

struct PaddingRows {
  int first;
  int count;  // none if not positive
};

// Of block `block` of experts * blocks_an_expert.
__device__ __forceinline__ PaddingRows padding_rows(const PlanView& plan, unsigned block,
                                                    unsigned blocks_an_expert) {
  const unsigned e = block / blocks_an_expert;
  const int first = plan.row_offsets[e] + plan.tokens_per_expert[e] +
                    static_cast<int>(block % blocks_an_expert) * kZeroRows;
  return {.first = first, .count = min(kZeroRows, plan.row_offsets[e + 1] - first)};
}

// Zeroes a block's padding rows of y [R, vectors] of 16 bytes.
__device__ __forceinline__ void zero_padding(const PlanView& plan, unsigned block,
                                             unsigned blocks_an_expert, char* y, int vectors) {
  const PaddingRows rows = padding_rows(plan, block, blocks_an_expert);
  char* from = y + int64_t{rows.first} * vectors * 16;
  for (int v = threadIdx.x; v < rows.count * vectors; v += blockDim.x)
    store_streaming(from + int64_t{v} * 16, uint4{0, 0, 0, 0});
}

}  // namespace fp8moe::cuda
