// Global memory in vectors. V is uint32_t, uint2 or uint4 (4, 8, 16 bytes), naturally aligned.
#pragma once

#include <cstdint>

namespace fp8moe::cuda {

// Never written by this kernel.
template <typename V>
__device__ __forceinline__ V load(const void* p) {
  return __ldg(static_cast<const V*>(p));
}

// The same by a policy of L2's (runtime.h). L1::no_allocate and __ldcs say kLeavesFirst, too.
template <typename V>
__device__ __forceinline__ V load(const void* p, uint64_t policy);

template <>
__device__ __forceinline__ uint2 load<uint2>(const void* p, uint64_t policy) {
  uint2 v;
  asm("ld.global.nc.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;"
      : "=r"(v.x), "=r"(v.y)
      : "l"(p), "l"(policy));
  return v;
}
template <>
__device__ __forceinline__ uint4 load<uint4>(const void* p, uint64_t policy) {
  uint4 v;
  asm("ld.global.nc.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p), "l"(policy));
  return v;
}

// The line of p is on its way to L2.
__device__ __forceinline__ void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

template <typename V>
__device__ __forceinline__ void store(void* p, V v) {
  *static_cast<V*>(p) = v;
}

// The same if `wanted`. What makes v is done either way: a branch around it would cost a warp more.
__device__ __forceinline__ void store_if(bool wanted, void* p, uint2 v) {
  asm volatile(
      "{\n .reg .pred wanted;\n setp.ne.s32 wanted, %0, 0;\n"
      " @wanted st.global.v2.b32 [%1], {%2, %3};\n}" ::"r"(static_cast<int>(wanted)),
      "l"(p), "r"(v.x), "r"(v.y)
      : "memory");
}
__device__ __forceinline__ void store_if(bool wanted, void* p, uint4 v) {
  asm volatile(
      "{\n .reg .pred wanted;\n setp.ne.s32 wanted, %0, 0;\n"
      " @wanted st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(static_cast<int>(wanted)),
      "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

// Written and not read before it would leave the cache anyway.
template <typename V>
__device__ __forceinline__ void store_streaming(void* p, V v) {
  __stcs(static_cast<V*>(p), v);
}

// 16 bytes from global to shared memory without passing through registers; `bytes` of them
// are read, the rest is zero. Completes by copy_wait.
__device__ __forceinline__ void copy_async(void* shared, const void* global, int bytes = 16) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
               : "memory");
}
// The same where another block reads the line next to it soon: L2 fetches 256 bytes.
__device__ __forceinline__ void copy_async_of_pair(void* shared, const void* global, int bytes) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
               "r"(bytes)
               : "memory");
}
// Of 8 bytes (or 0).
__device__ __forceinline__ void copy_async_half(void* shared, const void* global, int bytes) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(global), "r"(bytes)
               : "memory");
}
// Of 4 bytes (or 0).
__device__ __forceinline__ void copy_async_word(void* shared, const void* global, int bytes) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(global), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kPending of this thread's groups are unfinished.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace fp8moe::cuda
