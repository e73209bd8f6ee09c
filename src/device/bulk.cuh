// Contiguous bytes between global and shared memory by the copy engine of an SM: one thread starts
// a copy of any multiple of 16 bytes, 16-byte aligned on both sides.
#pragma once

#include <cstdint>

namespace fp8moe::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A barrier that completes each time the bytes announced by one arrive_expecting have arrived.
// Started by one thread; the others must not wait on it before they know that it has been.
__device__ __forceinline__ void start_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
// Waits for the barrier's completion number 0, 1, ..., of which only the parity counts.
__device__ __forceinline__ void wait_barrier(uint64_t* barrier, unsigned completion) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "WAIT:\n mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      " @done bra DONE;\n bra WAIT;\nDONE:\n}" ::"r"(shared_address(barrier)),
      "r"(completion & 1)
      : "memory");
}

// global -> shared; completes on the barrier.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// shared -> global, to leave the L2 early: a stream of whole rows then reaches DRAM in the order it
// was written, 6% sooner than when it displaces older lines. What threads wrote to shared memory
// must be fenced first (bulk_fence), and shared memory must live until bulk_wait_read.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  uint64_t evict_first;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(evict_first));
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
          global),
      "r"(shared_address(shared)), "r"(bytes), "l"(evict_first)
      : "memory");
}
__device__ __forceinline__ void bulk_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Waits until this thread's bulk stores are done: what reads them may be another device.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.commit_group;\n cp.async.bulk.wait_group 0;" ::: "memory");
}
// Waits until this thread's bulk stores have read their shared memory.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.commit_group;\n cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace fp8moe::cuda
