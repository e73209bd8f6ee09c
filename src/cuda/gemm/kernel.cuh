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
  static constexpr int kStages = S::kStages;
  uint8_t* base;

  __device__ uint8_t* a(int s) const { return base + s * S::kTileBytes; }
  __device__ uint8_t* b(int s) const { return a(s) + S::kABytes; }
  __device__ float* scale_a(int s) const {
    return reinterpret_cast<float*>(base + kStages * S::kTileBytes + s * S::kScaleBytes);
  }
  __device__ float* scale_b(int s) const { return scale_a(s) + S::kScaleBAt / sizeof(float); }
  __device__ uint64_t* barriers() const {
    return reinterpret_cast<uint64_t*>(base + kStages * (S::kTileBytes + S::kScaleBytes));
  }
  __device__ FullBarrier& full(int s) const {
    return *reinterpret_cast<FullBarrier*>(barriers() + s);
  }
  __device__ EmptyBarrier& empty(int s) const {
    return *reinterpret_cast<EmptyBarrier*>(barriers() + kStages + s);
  }
  __device__ Tile& tile(int s) const {  // whose first K-block the stage holds
    return reinterpret_cast<Tile*>(barriers() + 2 * kStages)[s];
  }
  __device__ int* first_unit() const { return reinterpret_cast<int*>(&tile(kStages)); }
};

template <int Stages>
struct Position {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
constexpr uint16_t kBothCtas = 3;

// One box of A or B; `both` writes it to the same place in the shared memory of both CTAs.
__device__ __forceinline__ void load_box_a(const Params& params, FullBarrier& full, uint8_t* to,
                                           bool both, int k, int row) {
  auto* barrier = reinterpret_cast<uint64_t*>(&full);
  if (both)
    cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&params.a, barrier, kBothCtas, kHint, to, k, row);
  else
    cute::SM90_TMA_LOAD_2D::copy(&params.a, barrier, kHint, to, k, row);
}

__device__ __forceinline__ void load_box_b(const Params& params, FullBarrier& full, uint8_t* to,
                                           bool both, int k, int row) {
  auto* barrier = reinterpret_cast<uint64_t*>(&full);
  if (both)
    cute::SM90_TMA_LOAD_MULTICAST_5D::copy(&params.b, barrier, kBothCtas, kHint, to, k, 0, 0, 0,
                                           row / params.column_group);
  else
    cute::SM90_TMA_LOAD_5D::copy(&params.b, barrier, kHint, to, k, 0, 0, 0,
                                 row / params.column_group);
}

// An operand of `Rows` rows: a whole box, or two halves of which a pair that shares it loads one
// each.
template <int Rows, int Cluster, typename LoadBox>
__device__ __forceinline__ void load_operand(uint8_t* to, bool shared, int rank, int row,
                                             LoadBox load_box) {
  if constexpr (Cluster == 1) {
    load_box(to, false, row);
  } else {
    constexpr int kHalf = Rows / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (!shared || half == rank)
        load_box(to + half * kHalf * kBlockK, shared, row + half * kHalf);
  }
}

template <Kind kKind, int TileN, int Cluster>
__device__ void produce(const Params& params, const Ring<kKind, TileN>& ring, int rank) {
  using S = Stage<kKind, TileN>;
  Schedule<kKind, TileN, Cluster> schedule(params, ring.first_unit());
  Position<S::kStages> at;
  for (bool more = true; more;) {
    Tile tile;
    more = schedule.next(tile);
    if (!more) tile.k_blocks = kNoMore;
    const int first_row_b = kKind == Kind::rows ? tile.expert * params.n : 0;
    // A tile without K-blocks, and the end, are told through a stage that holds nothing.
    for (int k = 0; k < max(tile.k_blocks, 1); ++k, at.advance()) {
      ring.empty(at.stage).wait(at.phase ^ 1);
      FullBarrier& full = ring.full(at.stage);
      if (k == 0) ring.tile(at.stage) = tile;
      if (tile.k_blocks <= 0) {
        full.arrive();
        continue;
      }
      full.arrive_and_expect_tx(S::kLoadBytes);
      const int block = tile.k_first + k;
      const int depth = block * kBlockK;
      load_operand<kTileM, Cluster>(
          ring.a(at.stage), tile.shared == Shared::a, rank, tile.row,
          [&](uint8_t* to, bool both, int row) { load_box_a(params, full, to, both, depth, row); });
      load_operand<TileN, Cluster>(
          ring.b(at.stage), tile.shared == Shared::b, rank, first_row_b + tile.column,
          [&](uint8_t* to, bool both, int row) { load_box_b(params, full, to, both, depth, row); });
      auto* barrier = reinterpret_cast<uint64_t*>(&full);
      if constexpr (S::kScaleABytes > 0)
        cute::SM90_TMA_LOAD_2D::copy(&params.scale_a, barrier, kHint, ring.scale_a(at.stage),
                                     tile.row / 4 * 4, block);
      if constexpr (S::kScaleBBytes > 0)
        cute::SM90_TMA_LOAD_2D::copy(&params.scale_b, barrier, kHint, ring.scale_b(at.stage),
                                     tile.column, block);
    }
  }
}

// The barrier at `local`, seen from this CTA, of the CTA that a lane tells about a released stage:
// lane 0 its own producer and, as boxes may go to both CTAs, lanes up to Cluster the peer's.
template <int Cluster>
__device__ uint32_t barrier_of_lane(const EmptyBarrier& local) {
  uint32_t address = cute::cast_smem_ptr_to_uint(&local);
  if constexpr (Cluster > 1) {
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address)
                 : "r"(address), "r"(threadIdx.x % Cluster));
  }
  return address;
}

template <int Cluster>
__device__ __forceinline__ void arrive(uint32_t barrier, bool mine) {
  if (mine) {
    if constexpr (Cluster > 1)
      asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
    else
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  }
}

// The sums of a warpgroup's 64 rows of a tile, and the ring they are fed from.
template <Kind kKind, DType A, DType B, int TileN, int Cluster>
struct Consumer {
  using Scales = Promoter<kKind, TileN>;

  const Params& params;
  const Ring<kKind, TileN>& ring;
  int half;        // which 64 rows of the tile
  uint32_t a, b;   // descriptors of stage 0
  uint32_t empty;  // barrier_of_lane of stage 0
  Position<Ring<kKind, TileN>::kStages> at;
  bool ready = false;     // the stage at `at` is known to be full
  float sum[TileN / 2];   // of the tile, scaled
  float part[TileN / 2];  // of one K-block

  // A warp is done with a stage.
  __device__ __forceinline__ void release(int stage) const {
    arrive<Cluster>(empty + stage * sizeof(EmptyBarrier), threadIdx.x % 32 < Cluster);
  }

  __device__ __forceinline__ void await() {
    if (!ready) ring.full(at.stage).wait(at.phase);
    ready = true;
  }

  // Leaves a stage of which nothing is multiplied.
  __device__ __forceinline__ void pass() {
    await();
    release(at.stage);
    at.advance();
    ready = false;
  }

  // One K-block: under its multiply runs `meanwhile`.
  template <bool First, typename Meanwhile>
  __device__ __forceinline__ void step(Scales& scales, int k, Meanwhile meanwhile) {
    constexpr int kStride = Stage<kKind, TileN>::kTileBytes >> 4;
    await();
    const int stage = at.stage;
    scales.load(ring.scale_a(stage), k);
    multiply<A, B, TileN>(a + stage * kStride, b + stage * kStride, part);
    at.advance();
    meanwhile();
    finish(part);
    if constexpr (!Scales::kReadsStage) release(stage);
    ready = ring.full(at.stage).test_wait(at.phase);  // its latency passes under the promotion
    scales.template add<First>(part, sum, ring.scale_b(stage));
    if constexpr (Scales::kReadsStage) release(stage);
  }
};

template <Kind kKind, DType A, DType B, int TileN, int Cluster>
__device__ void consume(const Params& params, const Ring<kKind, TileN>& ring) {
  // Through a shuffle the compiler knows it to be uniform in the warp, and so the descriptors.
  const int half = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0) - 1;
  Consumer<kKind, A, B, TileN, Cluster> consumer{.params = params,
                                                 .ring = ring,
                                                 .half = half,
                                                 .a = descriptor(ring.a(0) + half * 64 * kBlockK),
                                                 .b = descriptor(ring.b(0)),
                                                 .empty = barrier_of_lane<Cluster>(ring.empty(0))};
  Destination finished;  // where the sums go once the next tile's first multiply is under way
  bool pending = false;

  for (;;) {
    consumer.await();
    const Tile tile = ring.tile(consumer.at.stage);
    if (tile.k_blocks == kNoMore) break;
    const Destination to{
        .element = (kKind == Kind::rows ? int64_t{tile.row} + 64 * half
                                        : int64_t{tile.expert} * params.m + tile.row + 64 * half) *
                       params.n +
                   tile.column,
        .rows = min(64, tile.rows - 64 * half),
        .columns = min(TileN, params.n - tile.column)};
    if (to.rows <= 0 || to.columns <= 0) {
      for (int k = 0; k < max(tile.k_blocks, 1); ++k) consumer.pass();
      continue;
    }
    if (kKind != Kind::rows && tile.k_blocks == 0) {
      consumer.pass();
      if (params.output == Output::store_bf16 || params.output == Output::store_f32)
        store_zeros<TileN>(params, to);
      continue;
    }
    Promoter<kKind, TileN> scales(params, tile, half);
    consumer.template step<true>(scales, 0, [&] {
      if (pending) store<kKind, TileN>(consumer.sum, params, finished);
      finished = to;
      pending = true;
    });
    for (int k = 1; k < tile.k_blocks; ++k) consumer.template step<false>(scales, k, [] {});
  }
  if (pending) store<kKind, TileN>(consumer.sum, params, finished);
}

template <Kind kKind, DType A, DType B, int TileN, int Cluster>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Ring<kKind, TileN> ring{shared};
  const int rank = Cluster == 1 ? 0 : static_cast<int>(cute::block_rank_in_cluster());
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.a));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.b));
    for (int s = 0; s < ring.kStages; ++s) {
      ring.full(s).init(1);
      ring.empty(s).init(kConsumerWarps * Cluster);
    }
    cutlass::arch::fence_barrier_init();
  }
  if (kKind == Kind::rows && threadIdx.x < 32)
    scan_units<Cluster, TileN>(params, ring.first_unit());
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
