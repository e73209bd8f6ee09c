// Code for several widths of vectors in one library, and the question which of them runs here.
#pragma once

// 1 where the compiler makes code for several levels of x86-64 and asks the CPU: GCC, 11 or newer.
// Another compiler makes the portable code alone, which has the same bits.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FP8MOE_MULTIVERSION 1
#else
#define FP8MOE_MULTIVERSION 0
#endif

// A row kernel marked FP8MOE_CLONES is compiled for AVX-512, for AVX2 and for the baseline, and the
// loader picks one; contraction is off, so all give the same bits. Never on a function that holds
// an OpenMP pragma: call the row kernel from inside the loop.
#if !FP8MOE_MULTIVERSION || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FP8MOE_CLONES
#elif __GNUC__ >= 12
#define FP8MOE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else  // GCC 11 asks the CPU for single features alone
#define FP8MOE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

namespace fp8moe::cpu {

// Whether code for target("arch=x86-64-v3"), or -v4, runs here.
inline bool has_v3() {
#if FP8MOE_MULTIVERSION && __GNUC__ >= 12
  return __builtin_cpu_supports("x86-64-v3");
#elif FP8MOE_MULTIVERSION
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("fma") && __builtin_cpu_supports("lzcnt") &&
         __builtin_cpu_supports("movbe");
#else
  return false;
#endif
}

inline bool has_v4() {
#if FP8MOE_MULTIVERSION && __GNUC__ >= 12
  return __builtin_cpu_supports("x86-64-v4");
#elif FP8MOE_MULTIVERSION
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

}  // namespace fp8moe::cpu
