// Global memory in vectors. V is uint32_t, uint2 or uint4 (4, 8, 16 bytes), naturally aligned.
#pragma once

#include <cstdint>

namespace fp8moe::cuda {

// Read once and never written by this kernel: passes by L1.
template <typename V>
__device__ __forceinline__ V load_once(const void* p);

template <>
__device__ __forceinline__ uint32_t load_once<uint32_t>(const void* p) {
  uint32_t v;
  asm("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
template <>
__device__ __forceinline__ uint2 load_once<uint2>(const void* p) {
  uint2 v;
  asm("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
template <>
__device__ __forceinline__ uint4 load_once<uint4>(const void* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}

// Read again by another block soon (a gathered row): stays in L1 and L2.
template <typename V>
__device__ __forceinline__ V load_shared_by_blocks(const void* p) {
  return __ldg(static_cast<const V*>(p));
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
// The same of 4 bytes (or 0).
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
