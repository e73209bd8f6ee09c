// What a CTA keeps in shared memory, where, and how its roles wait for one another there.
#pragma once

#include <cutlass/arch/barrier.h>

#include "gemm/schedule.h"
#include "gemm/stage.h"

namespace fp8moe::cuda::gemm {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using Barrier = cutlass::arch::ClusterBarrier;

// The ring of stages in shared memory; every stage has its parts at the same offsets. Beside it the
// smaller ring of scale batches.
template <Kind kKind, int TileM, int TileN>
struct Ring {
  using S = Stage<kKind, TileM, TileN>;
  uint8_t* base;

  __device__ uint8_t* box(int s, int i) const {  // those of A, then those of B
    return base + s * S::kTileBytes + i * S::kBoxBytes;
  }
  __device__ uint8_t* staging(int warp) const {
    return box(kStages, 0) + warp * (S::kStagingBuffers * kStagingBytes);
  }
  __device__ uint8_t* scales(int s) const {
    return staging(S::kConsumerWarps) + s * S::kScaleBytes;
  }
  __device__ float* scale_a(int s) const { return reinterpret_cast<float*>(scales(s)); }
  __device__ float* scale_b(int s) const {
    return reinterpret_cast<float*>(scales(s) + S::kScaleBAt);
  }
  __device__ float4* scale_batch(int r) const {
    return reinterpret_cast<float4*>(scales(kStages) + r * kScaleBatchBytes);
  }
  __device__ Tile& tile(int s) const {  // whose first K-block the stage holds
    return reinterpret_cast<Tile*>(scale_batch(kScaleBatches))[s];
  }
  __device__ Tile& planned(int i) const { return (&tile(kStages))[i]; }
  __device__ uint64_t* barrier(int i) const {
    return reinterpret_cast<uint64_t*>(&planned(kPlanned)) + i;
  }
  __device__ FullBarrier& full(int s) const { return *reinterpret_cast<FullBarrier*>(barrier(s)); }
  __device__ Barrier& empty(int s) const {
    return *reinterpret_cast<Barrier*>(barrier(kStages + s));
  }
  __device__ Barrier& batch_full(int r) const {
    return *reinterpret_cast<Barrier*>(barrier(2 * kStages + r));
  }
  __device__ Barrier& batch_empty(int r) const {
    return *reinterpret_cast<Barrier*>(barrier(2 * kStages + kScaleBatches + r));
  }
  __device__ Barrier& planned_full(int i) const {
    return *reinterpret_cast<Barrier*>(barrier(2 * (kStages + kScaleBatches) + i));
  }
  __device__ Barrier& planned_empty(int i) const {
    return *reinterpret_cast<Barrier*>(barrier(2 * (kStages + kScaleBatches) + kPlanned + i));
  }
  __device__ FullBarrier* staging_full(int warp) const {
    return reinterpret_cast<FullBarrier*>(barrier(2 * (kStages + kScaleBatches + kPlanned))) +
           warp * S::kStagingBuffers;
  }
  // Of Kind::fprop.
  __device__ int* row_offsets() const { return reinterpret_cast<int*>(barrier(S::kBarriers)); }
};

constexpr int after(int stage) { return stage + 1 == kStages ? 0 : stage + 1; }

// cutlass's barriers do not tell the compiler that they order memory.
template <typename SomeBarrier>
__device__ __forceinline__ void await(const SomeBarrier& barrier, uint32_t phase) {
  barrier.wait(phase);
  asm volatile("" ::: "memory");
}

template <typename SomeBarrier>
__device__ __forceinline__ void arrive(const SomeBarrier& barrier) {
  asm volatile("" ::: "memory");
  barrier.arrive();
}

// Where one is in a ring of Length, and the phase there.
template <int Length>
struct Cursor {
  uint32_t passed = 0;

  __device__ int at() const { return static_cast<int>(passed % Length); }
  __device__ uint32_t phase() const { return passed / Length % 2; }
  __device__ void advance() { ++passed; }
};

}  // namespace fp8moe::cuda::gemm
