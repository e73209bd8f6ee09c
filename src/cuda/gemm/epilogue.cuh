// Sums in wgmma's register layout to global memory, without shared memory: lanes of a quad exchange
// values until each holds 16 contiguous bytes, so that every store writes whole 32-byte sectors and
// any row may be left out.
#pragma once

#include <cuda_bf16.h>

#include "cuda/gemm/params.h"

namespace fp8moe::cuda::gemm {

// A thread of a warpgroup holds, of a [64, N] tile: sum[4 j + 0..1] at row r, columns 8 j + 2 q +
// 0..1 and sum[4 j + 2..3] at row r + 8, with r = 16 warp + lane / 4 and q = lane % 4.

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Lane q of a quad holds word[c] of column group c; afterwards the four words of group q.
__device__ __forceinline__ void transpose_quad(uint32_t (&word)[4], int q) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = q & bit;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int low = bit == 1 ? 2 * pair : pair;
      const int high = low + bit;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? word[low] : word[high], bit);
      if (upper)
        word[low] = got;
      else
        word[high] = got;
    }
  }
}

// Two column groups of 8: lane q gives away half of what it holds and keeps four contiguous
// columns, 8 (q % 2) + 4 (q / 2) of the 16.
__device__ __forceinline__ float4 gather_four(const float* group0, const float* group1, int q) {
  const bool odd = q & 1;
  const float x = __shfl_xor_sync(0xffffffffu, odd ? group0[0] : group1[0], 1);
  const float y = __shfl_xor_sync(0xffffffffu, odd ? group0[1] : group1[1], 1);
  return odd ? make_float4(x, y, group1[0], group1[1]) : make_float4(group0[0], group0[1], x, y);
}

__device__ __forceinline__ void put(float* to, float4 v) {
  __stcs(reinterpret_cast<float4*>(to), v);
}

__device__ __forceinline__ void add(float* to, float4 v) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// Rounds the product to bf16 first, then the sum: what adding two bf16 tensors gives.
__device__ __forceinline__ void add(__nv_bfloat16* to, uint4 v) {
  asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void put(__nv_bfloat16* to, uint4 v) {
  __stcs(reinterpret_cast<uint4*>(to), v);
}

// Where a warpgroup's [64, N] part of a tile goes in D.
struct Destination {
  int64_t element = 0;  // of row 0, column 0 of the part
  int rows = 0;         // rows to write
  int columns = 0;      // columns to write, a multiple of 16
};

// [rows, columns] of bf16 at d + element, leading dimension n; Add: onto what is there.
template <bool Add, int N>
__device__ __forceinline__ void write_bf16(const float (&sum)[N / 2], const Params& params,
                                           const Destination& to) {
  const int lane = threadIdx.x % 32, q = lane % 4;
  const int row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  auto* d = static_cast<__nv_bfloat16*>(params.d) + to.element + int64_t{row} * params.n + 8 * q;
  const int64_t next = int64_t{8} * params.n;
#pragma unroll
  for (int group = 0; group < N / 32; ++group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t word[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int i = 4 * (4 * group + c) + 2 * half;
        word[c] = pack_bf16(sum[i], sum[i + 1]);
      }
      transpose_quad(word, q);
      if (row + 8 * half < to.rows && 32 * group + 8 * q < to.columns) {
        const uint4 eight = make_uint4(word[0], word[1], word[2], word[3]);
        if constexpr (Add)
          add(d + half * next + 32 * group, eight);
        else
          put(d + half * next + 32 * group, eight);
      }
    }
  }
}

// The same in f32.
template <bool Add, int N>
__device__ __forceinline__ void write_f32(const float (&sum)[N / 2], const Params& params,
                                          const Destination& to) {
  const int lane = threadIdx.x % 32, q = lane % 4;
  const int row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int column = 8 * (q % 2) + 4 * (q / 2);
  float* d = static_cast<float*>(params.d) + to.element + int64_t{row} * params.n + column;
  const int64_t next = int64_t{8} * params.n;
#pragma unroll
  for (int group = 0; group < N / 16; ++group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 four =
          gather_four(&sum[8 * group + 2 * half], &sum[8 * group + 4 + 2 * half], q);
      if (row + 8 * half < to.rows && 16 * group < to.columns) {
        if constexpr (Add)
          add(d + half * next + 16 * group, four);
        else
          put(d + half * next + 16 * group, four);
      }
    }
  }
}

template <Kind kKind, int N>
__device__ __forceinline__ void store(const float (&sum)[N / 2], const Params& params,
                                      const Destination& to) {
  const Output output = params.output;
  if (output == Output::store_bf16) {
    write_bf16<false, N>(sum, params, to);
  } else if (output == Output::store_f32) {
    write_f32<false, N>(sum, params, to);
  } else if constexpr (kKind != Kind::rows) {
    if (output == Output::add_f32)
      write_f32<true, N>(sum, params, to);
    else
      write_bf16<true, N>(sum, params, to);
  }
}

// Zeros, for an expert without tokens. One warpgroup.
template <int N>
__device__ void store_zeros(const Params& params, const Destination& to) {
  const int bytes = params.output == Output::store_bf16 ? 2 : 4;
  const int per_row = to.columns * bytes / 16;  // 16-byte words
  for (int i = threadIdx.x % 128; i < 64 * per_row; i += 128) {
    const int row = i / per_row, word = i - row * per_row;
    if (row >= to.rows) break;
    const int64_t at = (to.element + int64_t{row} * params.n) * bytes + 16 * word;
    __stcs(reinterpret_cast<uint4*>(static_cast<uint8_t*>(params.d) + at), make_uint4(0, 0, 0, 0));
  }
}

}  // namespace fp8moe::cuda::gemm
