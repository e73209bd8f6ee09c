// Reductions over a warp or aligned groups of its lanes; every lane gets the result.
#pragma once

#include <cstdint>

#include "common/reduce.h"

namespace fp8moe::cuda {

constexpr unsigned kFullWarp = 0xFFFFFFFFu;

// max over groups of kLanes lanes; NaNs are ignored (fmaxf).
template <int kLanes = 32>
__device__ __forceinline__ float lanes_max(float v) {
#pragma unroll
  for (int step = kLanes / 2; step >= 1; step /= 2)
    v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, step, 32));
  return v;
}

// The balanced tree of neighbours of common/reduce.h over groups of kLanes lanes: lane l holds term
// l. (Addition commutes, so both partners of a step get the same bits.)
template <int kLanes = 32>
__device__ __forceinline__ float lanes_tree_sum(float v) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) v += __shfl_xor_sync(kFullWarp, v, step, 32);
  return v;
}

// max |v|, NaNs ignored.
template <int N>
__device__ __forceinline__ float amax(const float (&v)[N]) {
  float m = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) m = fmaxf(m, fabsf(v[i]));
  return m;
}

}  // namespace fp8moe::cuda
