// Reductions over a warp or aligned groups of its lanes; every lane gets the result.
#pragma once

#include <cstdint>

#include "common/reduce.h"
#include "device/convert.cuh"

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

// max over the warp of values that are at least +0: their bits order as integers.
__device__ __forceinline__ float warp_max(float v) {
  return __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(v)));
}

// The balanced tree of neighbours of common/reduce.h over groups of kLanes lanes: lane l holds term
// l. (Addition commutes, so both partners of a step get the same bits.)
template <int kLanes = 32>
__device__ __forceinline__ float lanes_tree_sum(float v) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) v += __shfl_xor_sync(kFullWarp, v, step, 32);
  return v;
}

// Of N maxima over two lanes kStep apart each lane keeps half, the upper one the last.
template <int kStep, int N>
__device__ __forceinline__ void max_of_halves(const float (&m)[N], float (&kept)[N / 2]) {
  const bool upper = (threadIdx.x & kStep) != 0;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const float given = upper ? m[i] : m[N / 2 + i];
    kept[i] = fmaxf(upper ? m[N / 2 + i] : m[i], __shfl_xor_sync(kFullWarp, given, kStep));
  }
}

// N maxima at once over groups of kLanes lanes, N <= kLanes: lane l of a group gets that of m[l N /
// kLanes]. A lane gives away half of what it holds at each step, so N values cost about as much as
// two.
template <int kLanes, int N, int kStep = kLanes / 2>
__device__ __forceinline__ float lanes_max_each(const float (&m)[N]) {
  if constexpr (kStep == 0) {
    return m[0];
  } else if constexpr (N == 1) {
    const float both[1] = {fmaxf(m[0], __shfl_xor_sync(kFullWarp, m[0], kStep))};
    return lanes_max_each<kLanes, 1, kStep / 2>(both);
  } else {
    float kept[N / 2];
    max_of_halves<kStep>(m, kept);
    return lanes_max_each<kLanes, N / 2, kStep / 2>(kept);
  }
}

// The same of the balanced trees of lanes_tree_sum, for N = 4: lane l gets the sum of terms
// 2 (l % 2) + l / 2 % 2.
template <int kLanes>
__device__ __forceinline__ float lanes_tree_sum_each(const float (&term)[4]) {
  const bool odd = (threadIdx.x & 1) != 0, upper = (threadIdx.x & 2) != 0;
  float pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    pair[i] =
        (odd ? term[2 + i] : term[i]) + __shfl_xor_sync(kFullWarp, odd ? term[i] : term[2 + i], 1);
  float sum =
      (upper ? pair[1] : pair[0]) + __shfl_xor_sync(kFullWarp, upper ? pair[0] : pair[1], 2);
#pragma unroll
  for (int step = 4; step < kLanes; step *= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
  return sum;
}

// Four maxima a lane over the groups of kLanes lanes of a warp, of as many fours as there are
// groups: lanes of group g get those of m[4 g] ... m[4 g + 3], each over their own lane of all
// groups.
template <int kLanes, int kStep = 16, int N>
__device__ __forceinline__ float4 groups_max_each(const float (&m)[N]) {
  if constexpr (kStep < kLanes) {
    static_assert(N == 4);
    return {m[0], m[1], m[2], m[3]};
  } else {
    float kept[N / 2];
    max_of_halves<kStep>(m, kept);
    return groups_max_each<kLanes, kStep / 2>(kept);
  }
}

// max |v|, NaNs ignored; NaN if there is nothing else, for who takes the maximum with 0 later.
template <int N>
__device__ __forceinline__ float amax_or_nan(const float (&v)[N]) {
  float m = fabsf(v[0]);
#pragma unroll
  for (int i = 1; i < N; ++i) m = fmaxf(m, fabsf(v[i]));
  return m;
}

// max |v|, NaNs ignored.
template <int N>
__device__ __forceinline__ float amax(const float (&v)[N]) {
  return fmaxf(amax_or_nan(v), 0.0f);
}

// max |v weight|: rounding is monotone, so one product does. A NaN weight is ignored as its
// products are, or makes a NaN of the first form.
template <int N>
__device__ __forceinline__ float weighted_amax_or_nan(const float (&v)[N], float weight) {
  return amax_or_nan(v) * fabsf(weight);
}
template <int N>
__device__ __forceinline__ float weighted_amax(const float (&v)[N], float weight) {
  return fmaxf(weighted_amax_or_nan(v, weight), 0.0f);
}

}  // namespace fp8moe::cuda
