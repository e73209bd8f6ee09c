// Sums in wgmma's register layout to global memory, without shared memory: B's rows are loaded in
// an order that leaves a lane four adjacent columns, so every store of a quad writes whole 32-byte
// sectors, and any row may be left out.
#pragma once

#include <cuda_bf16.h>

#include "cuda/gemm/params.h"

namespace fp8moe::cuda::gemm {

__device__ __forceinline__ uint2 round_bf16(float4 v) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y),
                       high = __floats2bfloat162_rn(v.z, v.w);
  return make_uint2(reinterpret_cast<const uint32_t&>(low),
                    reinterpret_cast<const uint32_t&>(high));
}

// v, in other registers. A vector store wants its operand in four adjacent registers; if those were
// the sums themselves, each would lie in the register bank of its part, and every multiply-add of
// the promotion would take two cycles. threadIdx.y is 0, which the compiler does not know.
__device__ __forceinline__ float4 elsewhere(float4 v) {
  const auto other = [](float x) { return __uint_as_float(__float_as_uint(x) ^ threadIdx.y); };
  return make_float4(other(v.x), other(v.y), other(v.z), other(v.w));
}

__device__ __forceinline__ void put(float* to, float4 v) {
  __stcs(reinterpret_cast<float4*>(to), elsewhere(v));
}

__device__ __forceinline__ void put(__nv_bfloat16* to, float4 v) {
  __stcs(reinterpret_cast<uint2*>(to), round_bf16(v));
}

// Each element has one writer, so reductions are as deterministic as read, add, write, and faster.
__device__ __forceinline__ void add(float* to, float4 sum) {
  const float4 v = elsewhere(sum);
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// Rounds the product to bf16 first, then the sum: what adding two bf16 tensors gives.
__device__ __forceinline__ void add(__nv_bfloat16* to, float4 v) {
  const uint2 rounded = round_bf16(v);
  asm volatile("red.relaxed.gpu.global.add.noftz.v2.bf16x2 [%0], {%1, %2};" ::"l"(to),
               "r"(rounded.x), "r"(rounded.y)
               : "memory");
}

// Where a warpgroup's [64, N] part of a tile goes in D.
struct Destination {
  int64_t element = 0;  // of row 0, column 0 of the part
  int rows = 0;         // rows to write
  int columns = 0;      // columns to write, a multiple of 16
};

// A thread of a warpgroup holds, of a [64, N] part: sum[8 g + 0, 1, 4, 5] at row r, columns
// 16 g + 4 q + 0..3, and sum[8 g + 2, 3, 6, 7] at row r + 8, with r = 16 warp + lane / 4, q = lane
// % 4.
template <bool Add, typename D, int N>
__device__ __forceinline__ void write(const float (&sum)[N / 2], const Params& params,
                                      const Destination& to) {
  const int lane = threadIdx.x % 32, q = lane % 4;
  const int row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  D* d = static_cast<D*>(params.d) + to.element + int64_t{row} * params.n + 4 * q;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half < to.rows) {
#pragma unroll
      for (int g = 0; g < N / 16; ++g) {
        const float* s = &sum[8 * g + 2 * half];
        if (16 * g < to.columns) {
          if constexpr (Add)
            add(d + 16 * g, make_float4(s[0], s[1], s[4], s[5]));
          else
            put(d + 16 * g, make_float4(s[0], s[1], s[4], s[5]));
        }
      }
    }
    d += int64_t{8} * params.n;
  }
}

template <Kind kKind, int N>
__device__ __forceinline__ void store(const float (&sum)[N / 2], const Params& params,
                                      const Destination& to) {
  const Output output = params.output;
  if (params.column_group == 32) {
    write_eights<N>(sum, params, to);
  } else if (output == Output::store_bf16) {
    write<false, __nv_bfloat16, N>(sum, params, to);
  } else if (output == Output::store_f32) {
    write<false, float, N>(sum, params, to);
  } else if constexpr (kKind != Kind::rows) {
    if (output == Output::add_f32)
      write<true, float, N>(sum, params, to);
    else
      write<true, __nv_bfloat16, N>(sum, params, to);
  }
}

// bf16 where B was loaded by groups of 32: the thread's sum[16 g + 4 j + 0, 1], j < 4, are columns
// 32 g + 8 q + 2 j + 0, 1 of row r, and those two further on of row r + 8.
template <int N>
__device__ __forceinline__ void write_eights(const float (&sum)[N / 2], const Params& params,
                                             const Destination& to) {
  const int lane = threadIdx.x % 32, q = lane % 4;
  const int row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  auto* d = static_cast<__nv_bfloat16*>(params.d) + to.element + int64_t{row} * params.n + 8 * q;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half < to.rows) {
#pragma unroll
      for (int g = 0; g < N / 32; ++g) {
        const float* s = &sum[16 * g + 2 * half];
        if (32 * g < to.columns) {
          const uint2 low = round_bf16(make_float4(s[0], s[1], s[4], s[5]));
          const uint2 high = round_bf16(make_float4(s[8], s[9], s[12], s[13]));
          __stcs(reinterpret_cast<uint4*>(d + 32 * g), make_uint4(low.x, low.y, high.x, high.y));
        }
      }
    }
    d += int64_t{8} * params.n;
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
