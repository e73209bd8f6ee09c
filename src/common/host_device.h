// Marks a function for both backends. common/ is compiled without contraction (-ffp-contract=off,
// --fmad=false): a fused multiply-add that is meant is written std::fma, so both give the same
// bits.
#pragma once

#if defined(__CUDACC__)
#define FP8MOE_HD __host__ __device__ __forceinline__
#else
#define FP8MOE_HD inline __attribute__((always_inline))
#endif
