// Vec8 neighbouring values of a dense tensor as packed registers: what one lane loads at a time.
#pragma once

#include "device/convert.cuh"
#include "device/memory.cuh"
#include "device/runtime.h"

namespace fp8moe::cuda {

template <typename T>  // float, Fp16 or Bf16
struct Vec8 {
  static constexpr int kWords = 2 * sizeof(T);
  uint32_t word[kWords];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t& w : word) w = 0;
  }
  // p: the first of the eight, 16-byte aligned.
  __device__ __forceinline__ void load(const T* p, uint64_t policy = kLeavesInTurn) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 w = cuda::load<uint4>(reinterpret_cast<const uint32_t*>(p) + i, policy);
      word[i] = w.x, word[i + 1] = w.y, word[i + 2] = w.z, word[i + 3] = w.w;
    }
  }
  __device__ __forceinline__ void values(float (&v)[8]) const { unpack<T>(word, v); }
};

// The largest finite value of a source type: the scale where FMAX / amax overflows.
inline float max_finite(DType dtype) {
  return dtype == DType::f16 ? 65504.0f : dtype == DType::bf16 ? 0x1.fep127f : 0x1.fffffep127f;
}

}  // namespace fp8moe::cuda
