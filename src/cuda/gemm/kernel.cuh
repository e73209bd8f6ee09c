// The grouped GEMM kernel: a thread plans tiles, a thread feeds a ring of stages, a warp the scales
// of blocks; two consumer warpgroups multiply 64 rows each and promote every K-block into fp32
// sums. docs/grouped-gemm.md explains it.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/params.h"
#include "cuda/gemm/promote.cuh"
#include "cuda/gemm/schedule.h"
#include "cuda/gemm/stage.h"
#include "cuda/gemm/wgmma.cuh"

namespace fp8moe::cuda::gemm {

inline constexpr int kThreads = 384;  // warpgroup 0 produces, 1 and 2 consume
// setmaxnreg; under 40 the producers would spill.
inline constexpr int kProducerRegisters = 40;
inline constexpr int kConsumerRegisters = 232;

// The ring of stages in shared memory; every stage has its parts at the same offsets. Beside it the
// smaller ring of runs.
template <Kind kKind, int TileN>
struct Ring {
  using S = Stage<kKind, TileN>;
  uint8_t* base;

  __device__ uint8_t* a(int s) const { return base + s * S::kTileBytes; }
  __device__ uint8_t* b(int s) const { return a(s) + S::kABytes; }
  __device__ uint8_t* slabs(int warp) const { return a(kStages) + warp * (kSlabs * kSlabBytes); }
  __device__ uint8_t* scales(int s) const { return slabs(kConsumerWarps) + s * S::kScaleBytes; }
  __device__ float* scale_a(int s) const { return reinterpret_cast<float*>(scales(s)); }
  __device__ float* scale_b(int s) const {
    return reinterpret_cast<float*>(scales(s) + S::kScaleBAt);
  }
  __device__ float4* run(int r) const {
    return reinterpret_cast<float4*>(scales(kStages) + r * kRunBytes);
  }
  __device__ Tile& tile(int s) const {  // whose first K-block the stage holds
    return reinterpret_cast<Tile*>(run(kRuns))[s];
  }
  __device__ Tile& planned(int i) const { return (&tile(kStages))[i]; }
  __device__ uint64_t* barrier(int i) const {
    return reinterpret_cast<uint64_t*>(&planned(kPlanned)) + i;
  }
  __device__ FullBarrier& full(int s) const { return *reinterpret_cast<FullBarrier*>(barrier(s)); }
  __device__ Barrier& empty(int s) const {
    return *reinterpret_cast<Barrier*>(barrier(kStages + s));
  }
  __device__ Barrier& run_full(int r) const {
    return *reinterpret_cast<Barrier*>(barrier(2 * kStages + r));
  }
  __device__ Barrier& run_empty(int r) const {
    return *reinterpret_cast<Barrier*>(barrier(2 * kStages + kRuns + r));
  }
  __device__ Barrier& planned_full(int i) const {
    return *reinterpret_cast<Barrier*>(barrier(2 * (kStages + kRuns) + i));
  }
  __device__ Barrier& planned_empty(int i) const {
    return *reinterpret_cast<Barrier*>(barrier(2 * (kStages + kRuns) + kPlanned + i));
  }
  __device__ FullBarrier* slabs_full(int warp) const {
    return reinterpret_cast<FullBarrier*>(barrier(2 * (kStages + kRuns + kPlanned))) +
           warp * kSlabs;
  }
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

// Plans tiles ahead of the two who read them. One thread.
template <Kind kKind, int TileN>
__device__ void plan(const Params& params, const Ring<kKind, TileN>& ring) {
  Schedule<kKind, TileN> schedule(params, ring.row_offsets(), static_cast<int>(blockIdx.x),
                                  static_cast<int>(gridDim.x));
  Cursor<kPlanned> planned;
  Tile tile;
  for (bool more = true; more; planned.advance()) {
    more = schedule.next(tile);
    if (!more) tile.k_blocks = kNoMore;
    await(ring.planned_empty(planned.at()), planned.phase() ^ 1);
    ring.planned(planned.at()) = tile;
    arrive(ring.planned_full(planned.at()));
  }
}

// The next planned tile; its reader gives the place back by `planned_empty`.
template <Kind kKind, int TileN>
__device__ Tile read_planned(const Ring<kKind, TileN>& ring, const Cursor<kPlanned>& planned) {
  await(ring.planned_full(planned.at()), planned.phase());
  return ring.planned(planned.at());
}

// What TMA brings. One thread, elected: ptxas then knows that a warp has one such thread, and puts
// no loop over threads around every TMA instruction. A tile without K-blocks, and the end, are told
// through a stage that holds nothing. Consumers wait for stages alone: so the first stage of a run
// is full once the run is.
template <Kind kKind, int TileN>
__device__ void produce(const Params& params, const Ring<kKind, TileN>& ring) {
  using S = Stage<kKind, TileN>;
  using Load = cute::SM90_TMA_LOAD_2D;
  constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  Cursor<kPlanned> planned;
  Cursor<kRuns> runs;
  int stage = 0;
  uint32_t phase = 1;
  for (bool more = true; more; planned.advance()) {
    const Tile tile = read_planned(ring, planned);
    arrive(ring.planned_empty(planned.at()));
    more = tile.k_blocks != kNoMore;
    const int row_b = (kKind == Kind::rows ? tile.expert * params.n : 0) + tile.column;
    const int boxes = tile.width / kBoxB;
    const int bytes = S::kABytes + boxes * kBoxB * kBlockK + S::kScaleLoadBytes;
    for (int k = 0; k < max(tile.k_blocks, 1); ++k) {
      await(ring.empty(stage), phase);
      FullBarrier& full = ring.full(stage);
      if (k == 0) ring.tile(stage) = tile;
      if (tile.k_blocks > 0) {
        full.expect_transaction(bytes);
        auto* barrier = reinterpret_cast<uint64_t*>(&full);
        const int block = tile.k_first + k, depth = block * kBlockK;
        Load::copy(&params.a, barrier, kHint, ring.a(stage), depth, tile.row);
#pragma unroll
        for (int i = 0; i < TileN / kBoxB; ++i)
          if (i < boxes)
            Load::copy(&params.b, barrier, kHint, ring.b(stage) + i * kBoxB * kBlockK, depth,
                       row_b + i * kBoxB);
        if constexpr (S::kScaleABytes > 0)
          Load::copy(&params.scale_a, barrier, kHint, ring.scale_a(stage), tile.row / 4 * 4, block);
        if constexpr (S::kScaleBBytes > 0)
          Load::copy(&params.scale_b, barrier, kHint, ring.scale_b(stage), tile.column, block);
        if (S::kBlockScales && k % kRunLength == 0) {
          ring.run_full(runs.at()).wait(runs.phase());
          runs.advance();
        }
      }
      arrive(full);
      stage = after(stage);
      phase ^= stage == 0;
    }
  }
}

// The scales of blocks, which lie too scattered for TMA. One warp, a run ahead with its loads:
// under the traffic of TMA they take as long as a short tile.
template <Kind kKind, int TileN>
__device__ void produce_scales(const Params& params, const Ring<kKind, TileN>& ring) {
  static_assert(kRunLength == 32);  // a lane loads the scales of one K-block
  const int lane = threadIdx.x % 32;
  Cursor<kPlanned> planned;
  Cursor<kRuns> runs;
  float4 loaded;
  bool pending = false;
  const auto store = [&] {
    if (!pending) return;
    ring.run_empty(runs.at()).wait(runs.phase() ^ 1);
    ring.run(runs.at())[lane] = loaded;
    __syncwarp();
    if (lane == 0) ring.run_full(runs.at()).arrive();
    runs.advance();
  };
  for (;; planned.advance()) {
    const Tile tile = read_planned(ring, planned);
    __syncwarp();
    if (lane == 0) ring.planned_empty(planned.at()).arrive();
    if (tile.k_blocks == kNoMore) break;
    const BlockScales<kKind, TileN> scales(params, tile);
    for (int k = lane; k - lane < tile.k_blocks; k += kRunLength) {
      const float4 next = k < tile.k_blocks ? scales(k) : float4{};
      store();
      loaded = next;
      pending = true;
    }
  }
  store();
}

// The sums of a warpgroup's 64 rows of a tile, and the rings they are fed from.
template <Kind kKind, DType A, DType B, int TileN>
struct Consumer {
  const Ring<kKind, TileN>& ring;
  uint32_t a, b;        // descriptors of stage 0
  int stage = 0;        // the next one, which is full, and so is its run
  uint32_t phases = 0;  // bit s: the phase of stage s
  Cursor<kRuns> runs;
  SumPair<kKind> sums[TileN / 4] = {};  // of the tile, scaled

  __device__ __forceinline__ void await(int s) { gemm::await(ring.full(s), phases >> s & 1); }

  // A warp is done with what a barrier guards.
  __device__ __forceinline__ void release(Barrier& empty) {
    __syncwarp();  // all lanes have read what it holds
    if (threadIdx.x % 32 == 0) empty.arrive();
  }

  __device__ __forceinline__ void close_run() {
    if constexpr (Stage<kKind, TileN>::kBlockScales) {
      release(ring.run_empty(runs.at()));
      runs.advance();
    }
  }

  // Leaves a tile of which this warpgroup multiplies nothing.
  __device__ __forceinline__ void pass(int k_blocks) {
    for (int k = 0; k < max(k_blocks, 1); ++k) {
      if (k < k_blocks && k % kRunLength == 0) close_run();
      release(ring.empty(stage));
      phases ^= 1u << stage;
      stage = after(stage);
      await(stage);
    }
  }

  // The K-block in stage s. Under its multiply runs `meanwhile`. Ends when the next stage is full,
  // too: there always is one, if only to tell the end. The wait comes before the release because
  // ptxas then starts it early among the multiply-adds and not behind them.
  template <bool First, int N, typename Meanwhile>
  __device__ __forceinline__ void step(int s, Promoter<kKind, TileN, N>& scales,
                                       const float4* of_blocks, Meanwhile meanwhile) {
    constexpr int kStride = Stage<kKind, TileN>::kTileBytes >> 4;
    float part[N / 2];  // of this K-block
    scales.load(ring.scale_a(s), of_blocks);
    multiply<A, B, N>(a + s * kStride, b + s * kStride, part);
    meanwhile();
    finish(part);
    phases ^= 1u << s;
    scales.template add<First>(part, sums, ring.scale_b(s));
    await(after(s));
    release(ring.empty(s));
  }

  // The K-blocks of a tile, of N columns. From stage 0 on the loop over a whole tile is unrolled
  // over the stages: addresses, descriptors and barriers are immediates, and no branch is taken but
  // the one back.
  template <int N, typename Meanwhile>
  __device__ __forceinline__ void steps(Promoter<kKind, TileN, N> scales, int k_blocks,
                                        Meanwhile meanwhile) {
    const auto nothing = [] {};
    const float4* of_blocks = ring.run(runs.at());
    step<true>(stage, scales, of_blocks++, meanwhile);
    stage = after(stage);
    for (int left = k_blocks - 1, in_run = kRunLength - 1;; in_run = kRunLength) {
      int now = min(left, in_run);
      left -= now;
      for (; now > 0 && (N < TileN || stage != 0); --now) {
        step<false>(stage, scales, of_blocks++, nothing);
        stage = after(stage);
      }
      while (N == TileN && now > 0) {
#pragma unroll
        for (int s = 0; s < kStages; ++s) {
          step<false>(s, scales, of_blocks + s, nothing);
          if (--now == 0) {
            stage = after(s);
            break;
          }
        }
        of_blocks += kStages;
      }
      close_run();
      if (left == 0) break;
      of_blocks = ring.run(runs.at());
    }
  }
};

template <Kind kKind, DType A, DType B, int TileN, Output kOutput>
__device__ void consume(const Params& params, uint8_t* shared) {
  // Through a shuffle the compiler knows these to be uniform in the warp, and so the descriptors;
  // and it does not compute the address of shared memory anew in every step.
  const int half = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0) - 1;
  const Ring<kKind, TileN> ring{static_cast<uint8_t*>(
      __cvta_shared_to_generic(__shfl_sync(0xffffffffu, cute::cast_smem_ptr_to_uint(shared), 0)))};
  Consumer<kKind, A, B, TileN> consumer{
      .ring = ring, .a = descriptor(ring.a(0) + half * 64 * kBlockK), .b = descriptor(ring.b(0))};
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  uint8_t* const slabs = ring.slabs(4 * half + warp);
  Destination finished;  // where the sums go once the next tile's first multiply is under way
  bool pending = false;
  const auto finish = [&] {
    if (pending)
      store<kKind, TileN, kOutput>(consumer.sums, params, finished, warp, slabs,
                                   ring.slabs_full(4 * half + warp));
  };

  consumer.await(0);
  for (;;) {
    const Tile tile = ring.tile(consumer.stage);
    if (tile.k_blocks == kNoMore) break;
    const Destination to{.row = tile.row + 64 * half,
                         .column = tile.column,
                         .expert = kKind == Kind::rows ? 0 : tile.expert,
                         .rows = min(64, tile.rows - 64 * half),
                         .columns = min(TileN, params.n - tile.column)};
    if (to.rows <= 0 || tile.k_blocks == 0) {
      if (to.rows > 0 && !params.add) store_zeros(params, to);
      consumer.pass(tile.k_blocks);
      continue;
    }
    const auto meanwhile = [&] {
      finish();
      finished = to;
      pending = true;
    };
    if (kKind == Kind::rows && TileN > 128 && tile.width == kNarrow)
      consumer.steps(Promoter<kKind, TileN, kNarrow>(tile, half), tile.k_blocks, meanwhile);
    else
      consumer.steps(Promoter<kKind, TileN, TileN>(tile, half), tile.k_blocks, meanwhile);
  }
  finish();
  cute::tma_store_wait<0>();  // shared memory goes with the CTA
}

template <Kind kKind, DType A, DType B, int TileN, Output kOutput>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Ring<kKind, TileN> ring{shared};
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.a));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.b));
    for (int s = 0; s < kStages; ++s) {
      ring.full(s).init(1);
      ring.empty(s).init(kConsumerWarps);
    }
    for (int r = 0; r < kRuns; ++r) {
      ring.run_full(r).init(1);
      ring.run_empty(r).init(kConsumerWarps);
    }
    for (int i = 0; i < kPlanned; ++i) {
      ring.planned_full(i).init(1);
      ring.planned_empty(i).init(Stage<kKind, TileN>::kBlockScales ? 2 : 1);  // its readers
    }
    for (int s = 0; s < Stage<kKind, TileN>::kSlabBarriers; ++s) ring.slabs_full(0)[s].init(1);
    cutlass::arch::fence_barrier_init();
  }
  if (kKind == Kind::rows)
    for (int e = threadIdx.x; e <= params.experts; e += kThreads)
      ring.row_offsets()[e] = params.row_offsets[e];
  __syncthreads();

  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (warp == 0 && cute::elect_one_sync()) produce<kKind, TileN>(params, ring);
    if (Stage<kKind, TileN>::kBlockScales && warp == 1) produce_scales<kKind, TileN>(params, ring);
    if (warp == 2 && cute::elect_one_sync()) plan<kKind, TileN>(params, ring);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    consume<kKind, A, B, TileN, kOutput>(params, shared);
  }
}

}  // namespace fp8moe::cuda::gemm
