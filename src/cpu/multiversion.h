// Function multiversioning for the hot row kernels of the CPU backend.
#pragma once

// A row kernel marked FP8MOE_CLONES is compiled for AVX-512, for AVX2 and for the baseline, and the
// loader picks one; contraction is off, so all give the same bits. Never on a function that holds
// an OpenMP pragma: call the row kernel from inside the loop.
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FP8MOE_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(FP8MOE_SANITIZED)
#define FP8MOE_CLONES
#elif defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define FP8MOE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FP8MOE_CLONES
#endif
