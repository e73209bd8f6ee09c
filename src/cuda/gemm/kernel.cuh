// The grouped GEMM kernel: one producer warp feeds a ring of stages by TMA; two consumer warpgroups
// multiply 64 rows each and promote every K-block into fp32 sums. docs/grouped-gemm.md explains it.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/params.h"
#include "cuda/gemm/promote.cuh"
#include "cuda/gemm/schedule.cuh"
#include "cuda/gemm/stage.h"
#include "cuda/gemm/wgmma.cuh"

namespace fp8moe::cuda::gemm {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

inline constexpr int kThreads = 384;  // warpgroup 0 produces, 1 and 2 consume
inline constexpr int kConsumerWarps = 8;
inline constexpr int kProducerRegisters = 24;
inline constexpr int kConsumerRegisters = 240;

// The ring of stages in shared memory; every stage has its parts at the same offsets.
template <Kind kKind, int TileN>
struct Ring {
  using S = Stage<kKind, TileN>;
  uint8_t* base;
  int stages;

  __device__ uint8_t* a(int s) const { return base + s * S::kTileBytes; }
  __device__ uint8_t* b(int s) const { return a(s) + S::kABytes; }
  __device__ float* scale_a(int s) const {
    return reinterpret_cast<float*>(base + stages * S::kTileBytes + s * S::kScaleBytes);
  }
  __device__ float* scale_b(int s) const { return scale_a(s) + S::kScaleBAt / sizeof(float); }
  __device__ uint64_t* barriers() const {
    return reinterpret_cast<uint64_t*>(base + stages * (S::kTileBytes + S::kScaleBytes));
  }
  __device__ FullBarrier& full(int s) const {
    return *reinterpret_cast<FullBarrier*>(barriers() + s);
  }
  __device__ EmptyBarrier& empty(int s) const {
    return *reinterpret_cast<EmptyBarrier*>(barriers() + stages + s);
  }
  __device__ int* first_unit() const { return reinterpret_cast<int*>(barriers() + 2 * stages); }
};

struct Position {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// One box of an operand; `both` writes it to the same place in the shared memory of both CTAs.
__device__ __forceinline__ void load_box(const CUtensorMap& map, FullBarrier& full, uint8_t* to,
                                         bool both, int k, int row, int expert) {
  auto* barrier = reinterpret_cast<uint64_t*>(&full);
  constexpr auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  if (both)
    cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&map, barrier, uint16_t{3}, hint, to, k, row, expert);
  else
    cute::SM90_TMA_LOAD_3D::copy(&map, barrier, hint, to, k, row, expert);
}

// Rows [row, row + Rows) of an operand: a whole box, or two halves of which a pair that shares the
// operand loads one each.
template <int Rows, int Cluster>
__device__ __forceinline__ void load_operand(const CUtensorMap& map, FullBarrier& full, uint8_t* to,
                                             bool shared, int rank, int k, int row, int expert) {
  if constexpr (Cluster == 1) {
    load_box(map, full, to, false, k, row, expert);
  } else {
    constexpr int kHalf = Rows / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (!shared || half == rank)
        load_box(map, full, to + half * kHalf * kBlockK, shared, k, row + half * kHalf, expert);
  }
}

template <Kind kKind, int TileN, int Cluster>
__device__ void produce(const Params& params, const Ring<kKind, TileN>& ring, int rank) {
  using S = Stage<kKind, TileN>;
  Schedule<kKind, TileN, Cluster> schedule(params, ring.first_unit());
  Position at;
  for (Tile tile; schedule.next(tile);) {
    for (int k = 0; k < tile.k_blocks; ++k, at.advance(ring.stages)) {
      ring.empty(at.stage).wait(at.phase ^ 1);
      FullBarrier& full = ring.full(at.stage);
      full.arrive_and_expect_tx(S::kLoadBytes);
      const int block = tile.k_first + k;
      load_operand<kTileM, Cluster>(params.a, full, ring.a(at.stage), tile.shared == Shared::a,
                                    rank, block * kBlockK, tile.row, 0);
      load_operand<TileN, Cluster>(params.b, full, ring.b(at.stage), tile.shared == Shared::b, rank,
                                   block * kBlockK, tile.column,
                                   kKind == Kind::rows ? tile.expert : 0);
      constexpr auto hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
      auto* barrier = reinterpret_cast<uint64_t*>(&full);
      if constexpr (S::kScaleABytes > 0)
        cute::SM90_TMA_LOAD_2D::copy(&params.scale_a, barrier, hint, ring.scale_a(at.stage),
                                     tile.row / 4 * 4, block);
      if constexpr (S::kScaleBBytes > 0)
        cute::SM90_TMA_LOAD_2D::copy(&params.scale_b, barrier, hint, ring.scale_b(at.stage),
                                     tile.column, block);
    }
  }
}

// A warp is done with a stage: tells its own producer and, as boxes may go to both, the peer's.
template <int Cluster>
__device__ __forceinline__ void release(const EmptyBarrier& empty) {
  const int lane = threadIdx.x % 32;
  if constexpr (Cluster == 1) {
    if (lane == 0) empty.arrive();
  } else {
    empty.arrive(lane, lane < Cluster);
  }
}

// Waits for the multiply of a stage, releases the stage and adds the part to the sums.
template <bool First, int Cluster, Kind kKind, int TileN>
__device__ __forceinline__ void promote(Promoter<kKind, TileN>& promoter,
                                        const Ring<kKind, TileN>& ring, Position& at,
                                        float (&part)[TileN / 2], float (&sum)[TileN / 2]) {
  constexpr bool kReadsStage = Promoter<kKind, TileN>::kReadsStage;
  promoter.load(ring.scale_a(at.stage));
  finish(part);
  if constexpr (!kReadsStage) release<Cluster>(ring.empty(at.stage));
  promoter.template add<First>(part, sum, ring.scale_b(at.stage));
  if constexpr (kReadsStage) release<Cluster>(ring.empty(at.stage));
  at.advance(ring.stages);
}

template <Kind kKind, DType A, DType B, int TileN, int Cluster>
__device__ void consume(const Params& params, const Ring<kKind, TileN>& ring) {
  const int half = static_cast<int>(threadIdx.x) / 128 - 1;  // which 64 rows of the tile
  Schedule<kKind, TileN, Cluster> schedule(params, ring.first_unit());
  Position at;
  float sum[TileN / 2];   // of the tile, scaled
  float part[TileN / 2];  // of one K-block
  Destination finished;   // where `sum` goes once the next tile's first multiply is under way
  bool pending = false;

  for (Tile tile; schedule.next(tile);) {
    const Destination to{
        .element = (kKind == Kind::rows ? int64_t{tile.row} + 64 * half
                                        : int64_t{tile.expert} * params.m + tile.row + 64 * half) *
                       params.n +
                   tile.column,
        .rows = min(64, tile.rows - 64 * half),
        .columns = min(TileN, params.n - tile.column)};
    if (to.rows <= 0 || to.columns <= 0) {
      for (int k = 0; k < tile.k_blocks; ++k, at.advance(ring.stages)) {
        ring.full(at.stage).wait(at.phase);
        release<Cluster>(ring.empty(at.stage));
      }
      continue;
    }
    if (kKind != Kind::rows && tile.k_blocks == 0) {
      if (params.output == Output::store_bf16 || params.output == Output::store_f32)
        store_zeros<TileN>(params, to);
      continue;
    }
    Promoter<kKind, TileN> promoter(params, tile, half);
    // The first K-block, apart: the epilogue of the tile before runs under its multiply.
    ring.full(at.stage).wait(at.phase);
    multiply<A, B, TileN>(ring.a(at.stage) + half * 64 * kBlockK, ring.b(at.stage), part);
    if (pending) store<kKind, TileN>(sum, params, finished);
    finished = to;
    pending = true;
    promote<true, Cluster>(promoter, ring, at, part, sum);
    for (int k = 1; k < tile.k_blocks; ++k) {
      ring.full(at.stage).wait(at.phase);
      multiply<A, B, TileN>(ring.a(at.stage) + half * 64 * kBlockK, ring.b(at.stage), part);
      promote<false, Cluster>(promoter, ring, at, part, sum);
    }
  }
  if (pending) store<kKind, TileN>(sum, params, finished);
}

template <Kind kKind, DType A, DType B, int TileN, int Cluster>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ Params params, int stages) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Ring<kKind, TileN> ring{shared, stages};
  const int rank = Cluster == 1 ? 0 : static_cast<int>(cute::block_rank_in_cluster());
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.a));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.b));
    for (int s = 0; s < stages; ++s) {
      ring.full(s).init(1);
      ring.empty(s).init(kConsumerWarps * Cluster);
    }
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (kKind == Kind::rows) scan_units<Cluster, TileN>(params, ring.first_unit());
  if constexpr (Cluster > 1)
    cute::cluster_sync();
  else
    __syncthreads();

  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x == 0) produce<kKind, TileN, Cluster>(params, ring, rank);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    consume<kKind, A, B, TileN, Cluster>(params, ring);
  }
  // The peer may still write here, or arrive on a barrier of this CTA.
  if constexpr (Cluster > 1) {
    __syncwarp();
    cute::cluster_sync();
  }
}

}  // namespace fp8moe::cuda::gemm
