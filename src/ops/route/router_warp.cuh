// A token's values over a warp: expert e = lane + 32 r is v[r] of its lane.
#pragma once

#include <cstdint>

#include "device/reduce.cuh"
#include "device/runtime.h"
#include "fp8moe/ops.h"
#include "ops/route/router_score.h"

namespace fp8moe::cuda {

// v of expert `e` of each lane's own; 0 for one past kPer 32.
template <int kPer>
__device__ __forceinline__ float of_expert(const float (&v)[kPer], unsigned e) {
  float found = 0.0f;
#pragma unroll
  for (unsigned r = 0; r < kPer; ++r) {
    const float here = __shfl_sync(kFullWarp, v[r], e % 32);
    if (e / 32 == r) found = here;
  }
  return found;
}

template <int kPer>
__device__ __forceinline__ float warp_sum(const float (&v)[kPer]) {
  float sum = v[0];
#pragma unroll
  for (int r = 1; r < kPer; ++r) sum += v[r];
  return lanes_tree_sum(sum);
}

// body.template operator()<kPer>() with room for so many experts: 32 kPer of them.
template <typename Body>
void dispatch_experts(int64_t experts, Body&& body) {
  if (experts <= 32) return body.template operator()<1>();
  if (experts <= 64) return body.template operator()<2>();
  if (experts <= 128) return body.template operator()<4>();
  if (experts <= 256) return body.template operator()<8>();
  if (experts <= 512) return body.template operator()<16>();
  body.template operator()<32>();
}

}  // namespace fp8moe::cuda
