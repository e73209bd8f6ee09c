// Zeroing the padding rows inside the experts, as blocks of a kernel that moves rows.
#pragma once

#include "device/memory.cuh"
#include "device/plan.cuh"

namespace fp8moe::cuda {

constexpr int kZeroRows = 16;  // padding rows of one block

// An expert has at most align - 1 padding rows.
inline unsigned zero_padding_blocks_an_expert(const RoutingPlan& plan) {
  return static_cast<unsigned>(cdiv(plan.align - 1, kZeroRows));
}

// Block `block` of experts * blocks_an_expert: its padding rows of y [R, vectors] of 16 bytes.
__device__ __forceinline__ void zero_padding(const PlanView& plan, unsigned block,
                                             unsigned blocks_an_expert, char* y, int vectors) {
  const unsigned e = block / blocks_an_expert;
  const int first = plan.row_offsets[e] + plan.tokens_per_expert[e] +
                    static_cast<int>(block % blocks_an_expert) * kZeroRows;
  const int rows = min(kZeroRows, plan.row_offsets[e + 1] - first);
  char* from = y + int64_t{first} * vectors * 16;
  for (int v = threadIdx.x; v < rows * vectors; v += blockDim.x)
    store_streaming(from + int64_t{v} * 16, uint4{0, 0, 0, 0});
}

}  // namespace fp8moe::cuda
