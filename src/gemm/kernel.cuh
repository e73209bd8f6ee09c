// The grouped GEMM kernel: a thread plans tiles, a thread feeds a ring of stages, a warp the scales
// of blocks; two or three consumer warpgroups multiply 64 rows each and promote every K-block into
// fp32 sums. docs/notes/grouped-gemm-kernel.md explains it.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/epilogue.cuh"
#include "gemm/params.h"
#include "gemm/produce.cuh"
#include "gemm/promote.cuh"
#include "gemm/ring.cuh"
#include "gemm/wgmma.cuh"

namespace fp8moe::cuda::gemm {

// Where the loop over a tile's K-blocks begins: of a K that is a multiple of 512 tiles begin at
// stage 0, and their second K-block enters it.
inline constexpr int kUnrolledFrom = 1;

// The first multiply of a whole tile depends on its stage alone: scales and where the sums go are
// found out under it, and a warpgroup below the last row multiplies what it does not store: one
// that left the tile out would part the CTAs (docs/notes). Not with scales of columns, where it
// gains nothing.
template <Kind kKind>
inline constexpr bool kBeginsAtOnce = kKind != Kind::wgrad_1x128;

// Descriptors, in stage 0, of what a warpgroup multiplies: 64 rows by all columns of a whole tile;
// all rows by 128 columns of a tail tile.
struct Operands {
  uint32_t a, b;
};

template <Kind kKind, int TileM, int TileN>
__device__ __forceinline__ Operands operands(const Ring<kKind, TileM, TileN>& ring, Shape shape,
                                             int consumer_index) {
  const auto box = [&](int i) { return descriptor(ring.box(0, i)); };
  if (shape == Shape::tail) return {.a = box(0), .b = box(1 + 2 * consumer_index)};
  return {.a = box(consumer_index), .b = box(TileM / kBox)};
}

// Where its sums go.
template <Kind kKind, int TileM, int TileN>
__device__ __forceinline__ Destination destination(const Params& params, const Tile& tile,
                                                   int consumer_index) {
  const bool tail = Stage<kKind, TileM, TileN>::kTails && tile.tail;
  const int row = tail ? 0 : kBox * consumer_index, column = tail ? 2 * kBox * consumer_index : 0;
  const bool idle = TileTraits<TileM, TileN>::kConsumers > 2 && tail && consumer_index == 2;
  return {.row = tile.row + row,
          .column = tile.column + column,
          .expert = kKind == Kind::fprop ? 0 : tile.expert,
          .rows = idle ? 0 : tile.rows - row,
          .columns = min(tail ? 2 * kBox : TileN, params.n - tile.column - column),
          .whole = !tail};
}

// The sums of a warpgroup's 64 rows of a tile, and the rings they are fed from.
template <Kind kKind, DType A, int TileM, int TileN>
struct Consumer {
  const Ring<kKind, TileM, TileN>& ring;
  int consumer_index;   // which of the consumers
  Operands whole;       // of whole tiles
  int stage = 0;        // the next one, which is full, and so is its batch
  uint32_t phases = 0;  // bit s: the phase of stage s
  Cursor<kScaleBatches> batches;
  SumPair<kKind> sums[TileN / 4] = {};  // of the tile, scaled

  __device__ __forceinline__ void await(int s) { gemm::await(ring.full(s), phases >> s & 1); }

  // A warp is done with what a barrier guards.
  __device__ __forceinline__ void release(Barrier& empty) {
    __syncwarp();  // all lanes have read what it holds
    if (threadIdx.x % 32 == 0) empty.arrive();
  }

  __device__ __forceinline__ void close_batch() {
    if constexpr (Stage<kKind, TileM, TileN>::kBlockScales) {
      release(ring.batch_empty(batches.at()));
      batches.advance();
    }
  }

  // Leaves a tile of which this warpgroup multiplies nothing.
  __device__ __forceinline__ void skip_tile(int k_blocks) {
    for (int k = 0; k < max(k_blocks, 1); ++k) {
      if (k < k_blocks && k % kScaleBatch == 0) close_batch();
      release(ring.empty(stage));
      phases ^= 1u << stage;
      stage = after(stage);
      await(stage);
    }
  }

  // A thread's part of one K-block, of a warpgroup's 64 rows.
  template <Shape kShape>
  using Part = float[part_columns<TileN>(kShape) / 2];

  // Multiplies the K-block in stage s. Meanwhile run `meanwhile` and, but for a tile's first one,
  // `prepare`. Where whole tiles begin at once, any tile's first scales are read under the
  // multiply.
  template <bool First, Shape kShape, typename Meanwhile>
  __device__ __forceinline__ void begin_step(int s, const Operands& at,
                                             Promoter<kKind, TileM, TileN, kShape>& scales,
                                             const float4* of_blocks, Part<kShape>& part,
                                             Meanwhile meanwhile) {
    constexpr int kStride = Stage<kKind, TileM, TileN>::kTileBytes >> 4;
    constexpr bool kAtOnce = First && kBeginsAtOnce<kKind>;
    if constexpr (!kAtOnce) scales.load(ring.scale_a(s), of_blocks);
    begin_multiply(part);
    multiply<A, part_columns<TileN>(kShape)>(at.a + s * kStride, at.b + s * kStride, part);
    cute::warpgroup_commit_batch();
    if constexpr (kAtOnce) scales.load(ring.scale_a(s), of_blocks);
    meanwhile();
    if constexpr (kKind == Kind::wgrad_1x128 && !First) scales.prepare(ring.scale_b(s));
    finish(part);
  }

  // Promotes its parts. Ends when the next stage is full, too: there always is one, if only to tell
  // the end. The wait comes before the release because ptxas then starts it early among the
  // multiply-adds and not behind them.
  template <bool First, Shape kShape>
  __device__ __forceinline__ void end_step(int s,
                                           const Promoter<kKind, TileM, TileN, kShape>& scales,
                                           const Part<kShape>& part) {
    phases ^= 1u << s;
    scales.template add<First>(part, sums, ring.scale_b(s));
    await(after(s));
    release(ring.empty(s));
  }

  // Both, in `stage`.
  template <bool First, Shape kShape, typename Meanwhile>
  __device__ __forceinline__ void step(const Operands& at,
                                       Promoter<kKind, TileM, TileN, kShape>& scales,
                                       const float4* of_blocks, Meanwhile meanwhile) {
    Part<kShape> part;
    begin_step<First>(stage, at, scales, of_blocks, part, meanwhile);
    end_step<First>(stage, scales, part);
    stage = after(stage);
  }

  // `now` K-blocks from stage kUnrolledFrom on, but for the last one's end; returns its stage.
  // Unrolled over the stages: addresses, descriptors and barriers are immediates, and no branch is
  // taken but the one back. Whether a K-block is the last is asked before its parts are promoted:
  // the answer is there long before the multiply is done, and nothing waits for it behind the
  // promotion, where the next multiply should begin.
  __device__ __forceinline__ int unrolled_steps(int now, const Operands& at,
                                                Promoter<kKind, TileM, TileN, Shape::whole>& scales,
                                                const float4* of_blocks, Part<Shape::whole>& part) {
    for (;; now -= kStages, of_blocks += kStages) {
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        const int s = (kUnrolledFrom + i) % kStages;
        begin_step<false>(s, at, scales, of_blocks + i, part, [] {});
        if (now == i + 1) return s;
        end_step<false>(s, scales, part);
      }
    }
  }

  // The K-blocks of a tile; under the first one's multiply runs `meanwhile`, after it `then`.
  template <Shape kShape, typename Meanwhile, typename Then>
  __device__ __forceinline__ void steps(const Tile& tile, Meanwhile meanwhile, Then then) {
    constexpr bool kWhole = kShape == Shape::whole;
    Promoter<kKind, TileM, TileN, kShape> scales(tile, consumer_index);
    const Operands at = kWhole ? whole : operands(ring, kShape, consumer_index);
    const auto nothing = [] {};
    const float4* of_blocks = ring.scale_batch(batches.at());
    step<true, kShape>(at, scales, of_blocks++, meanwhile);
    then();
    for (int left = tile.k_blocks - 1, in_batch = kScaleBatch - 1;; in_batch = kScaleBatch) {
      int now = min(left, in_batch);
      left -= now;
      const bool few = now < kStages;
      for (; now > 0 && (!kWhole || few || stage != kUnrolledFrom); --now)
        step<false, kShape>(at, scales, of_blocks++, nothing);
      if constexpr (kWhole) {
        if (now > 0) {
          Part<kShape> part;
          stage = unrolled_steps(now, at, scales, of_blocks, part);
          end_step<false>(stage, scales, part);
          stage = after(stage);
        }
      }
      close_batch();
      if (left == 0) break;
      of_blocks = ring.scale_batch(batches.at());
    }
  }
};

template <Kind kKind, DType A, int TileM, int TileN, Output kOutput>
__device__ void consume(const Params& params, uint8_t* shared) {
  // Through a shuffle the compiler knows these to be uniform in the warp, and so the descriptors;
  // and it does not compute the address of shared memory anew in every step.
  const int consumer_index = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0) - 1;
  const Ring<kKind, TileM, TileN> ring{static_cast<uint8_t*>(
      __cvta_shared_to_generic(__shfl_sync(0xffffffffu, cute::cast_smem_ptr_to_uint(shared), 0)))};
  Consumer<kKind, A, TileM, TileN> consumer{.ring = ring,
                                            .consumer_index = consumer_index,
                                            .whole = operands(ring, Shape::whole, consumer_index)};
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  uint8_t* const staging = ring.staging(4 * consumer_index + warp);
  Destination finished;  // where the sums go once the next tile's first multiply is under way
  bool pending = false;
  const auto finish = [&] {
    if (pending)
      store<kKind, Stage<kKind, TileM, TileN>::kStagingBuffers, TileN, kOutput>(
          consumer.sums, params, finished, warp, staging,
          ring.staging_full(4 * consumer_index + warp));
  };
  const auto load_d = [&] {
    if constexpr (kKind != Kind::fprop && kOutput != Output::bf16) {
      if (params.load_d)
        load_d_first<kKind, TileN>(params, finished, warp, staging,
                                   ring.staging_full(4 * consumer_index + warp));
    }
  };

  consumer.await(0);
  for (;;) {
    const Tile tile = ring.tile(consumer.stage);
    const auto meanwhile = [&] {
      finish();
      finished = destination<kKind, TileM, TileN>(params, tile, consumer_index);
      pending = true;
    };
    // Which is asked first, by the shorter loop that ptxas makes of it.
    constexpr bool kEndFirst = !kBeginsAtOnce<kKind>;
    if (kEndFirst && tile.k_blocks == kNoMore) break;
    if constexpr (kBeginsAtOnce<kKind>) {
      if (tile.whole_k_blocks > 0) {
        consumer.template steps<Shape::whole>(tile, meanwhile, load_d);
        continue;
      }
    }
    if (!kEndFirst && tile.k_blocks == kNoMore) break;
    const Destination to = destination<kKind, TileM, TileN>(params, tile, consumer_index);
    if (to.rows <= 0 || to.columns <= 0 || tile.k_blocks == 0) {
      if (to.rows > 0 && !params.add) store_zeros(params, to);
      consumer.skip_tile(tile.k_blocks);
      continue;
    }
    if constexpr (Stage<kKind, TileM, TileN>::kTails)
      consumer.template steps<Shape::tail>(tile, meanwhile, load_d);
    else if constexpr (!kBeginsAtOnce<kKind>)
      consumer.template steps<Shape::whole>(tile, meanwhile, load_d);
  }
  finish();
  cute::tma_store_wait<0>();  // shared memory goes with the CTA
}

template <Kind kKind, DType A, int TileM, int TileN, Output kOutput>
__global__ void __launch_bounds__(TileTraits<TileM, TileN>::kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using S = Stage<kKind, TileM, TileN>;
  const Ring<kKind, TileM, TileN> ring{shared};
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.pair[0].a));
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&params.pair[0].b));
    for (int s = 0; s < kStages; ++s) {
      ring.full(s).init(1);
      ring.empty(s).init(S::kConsumerWarps);
    }
    for (int r = 0; r < kScaleBatches; ++r) {
      ring.batch_full(r).init(1);
      ring.batch_empty(r).init(S::kConsumerWarps);
    }
    for (int i = 0; i < kPlanned; ++i) {
      ring.planned_full(i).init(1);
      ring.planned_empty(i).init(S::kBlockScales ? 2 : 1);  // its readers
    }
    for (int s = 0; s < S::kStagingBarriers; ++s) ring.staging_full(0)[s].init(1);
    cutlass::arch::fence_barrier_init();
  }
  if (kKind == Kind::fprop) {
    for (int e = threadIdx.x; e <= params.experts; e += TileTraits<TileM, TileN>::kThreads)
      ring.row_offsets()[e] = params.row_offsets[e];
  }
  __syncthreads();

  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<TileTraits<TileM, TileN>::kShape.producer_registers>();
    if (warp == 0 && cute::elect_one_sync()) produce<kKind, TileM, TileN>(params, ring);
    if (S::kBlockScales && warp == 1) produce_scales<kKind, TileM, TileN>(params, ring);
    if (warp == 2 && cute::elect_one_sync()) schedule_tiles(params, ring);
  } else {
    cutlass::arch::warpgroup_reg_alloc<TileTraits<TileM, TileN>::kShape.consumer_registers>();
    consume<kKind, A, TileM, TileN, kOutput>(params, shared);
  }
}

}  // namespace fp8moe::cuda::gemm
