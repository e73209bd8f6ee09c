// wgmma on FP8 operands in 128-byte-swizzled shared memory, through the instruction wrappers of
// cute.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>
#include <utility>

#include "fp8moe/tensor.h"

namespace fp8moe::cuda::gemm {

// The m64 x N x k32 instruction of A in E4M3 or E5M2 (gradients) and B in E4M3.
template <DType A, int N>
struct Instruction;

#define FP8MOE_WGMMA(N, A, NAME)                                      \
  template <>                                                         \
  struct Instruction<DType::A, N> {                                   \
    using Op = cute::SM90::GMMA::MMA_64x##N##x32_F32##NAME##_SS_TN<>; \
  };
#define FP8MOE_WGMMA_FORMATS(N)   \
  FP8MOE_WGMMA(N, e4m3, E4M3E4M3) \
  FP8MOE_WGMMA(N, e5m2, E5M2E4M3)
FP8MOE_WGMMA_FORMATS(128)
FP8MOE_WGMMA_FORMATS(192)
#undef FP8MOE_WGMMA_FORMATS
#undef FP8MOE_WGMMA

// Lower half of the descriptor of a K-major tile of rows of 128 bytes at a multiple of 1024 bytes:
// its address in units of 16 bytes. The leading-dimension field is not used under this swizzle.
__device__ __forceinline__ uint32_t descriptor(const void* tile) {
  return cute::cast_smem_ptr_to_uint(tile) >> 4 | 1u << 16;
}

// Upper half: 128-byte swizzle, 1024 bytes from one group of 8 rows to the next.
inline constexpr uint32_t kDescriptorHigh = 1u << 30 | 1024 >> 4;

__device__ __forceinline__ uint64_t whole(uint32_t descriptor) {
  return uint64_t{kDescriptorHigh} << 32 | descriptor;
}

template <typename Op, size_t... I>
__device__ __forceinline__ void issue(uint64_t a, uint64_t b, float* sum, bool add,
                                      std::index_sequence<I...>) {
  Op::fma(a, b, sum[I]...,
          add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

// part [64, N] = a [64, 128] b [N, 128]^T, asynchronously: part, N / 2 values, is undefined until
// `finish`. Between `begin_multiply` of all parts and `cute::warpgroup_commit_batch`.
template <DType A, int N>
__device__ __forceinline__ void multiply(uint32_t a, uint32_t b, float* part) {
#pragma unroll
  for (int k = 0; k < 4; ++k)  // 32 bytes of K are 2 units of the descriptor's address
    issue<typename Instruction<A, N>::Op>(whole(a + 2 * k), whole(b + 2 * k), part, k > 0,
                                          std::make_index_sequence<N / 2>{});
}

// Nothing that touched part before passes the multiplies that follow.
template <int N>
__device__ __forceinline__ void begin_multiply(float (&part)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) cute::warpgroup_fence_operand(part[i]);
  cute::warpgroup_arrive();
}

template <int N>
__device__ __forceinline__ void finish(float (&part)[N]) {
  cute::warpgroup_wait<0>();
#pragma unroll
  for (int i = 0; i < N; ++i) cute::warpgroup_fence_operand(part[i]);
}

}  // namespace fp8moe::cuda::gemm
