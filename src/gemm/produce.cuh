// Warpgroup 0: a thread plans tiles, a thread brings operands by TMA, a warp the scales of blocks.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/params.h"
#include "gemm/promote.cuh"
#include "gemm/ring.cuh"

namespace fp8moe::cuda::gemm {

// The next tile nobody has. The queue is how many tiles behind the CTAs' first ones have been
// taken, zero between launches: each CTA claims one after each tile, so the last to claim knows it,
// and leaves the queue at zero.
__device__ __forceinline__ int claim_next_tile(unsigned& queue, int tiles) {
  const unsigned taken = atomicAdd(&queue, 1u);
  if (taken + 1 == static_cast<unsigned>(tiles)) queue = 0;
  return static_cast<int>(gridDim.x + taken);
}

// Plans tiles ahead of the two who read them. One thread.
template <Kind kKind, int TileM, int TileN>
__device__ void schedule_tiles(const Params& params, const Ring<kKind, TileM, TileN>& ring) {
  Schedule<kKind, TileM, TileN> schedule(params, ring.row_offsets(), static_cast<int>(blockIdx.x),
                                         static_cast<int>(gridDim.x));
  Cursor<kPlanned> planned;
  Tile tile;
  for (bool more = true; more; planned.advance()) {
    more = schedule.next(tile);
    if (!more) tile.k_blocks = kNoMore;
    tile.whole_k_blocks = Stage<kKind, TileM, TileN>::kTails && tile.tail ? 0 : tile.k_blocks;
    await(ring.planned_empty(planned.at()), planned.phase() ^ 1);
    ring.planned(planned.at()) = tile;
    arrive(ring.planned_full(planned.at()));
    if constexpr (kKind != Kind::fprop) {
      if (more && params.queue != nullptr)
        schedule.jump_to(claim_next_tile(*params.queue, schedule.count()));
    }
  }
}

// The next planned tile; its reader gives the place back by `planned_empty`.
template <Kind kKind, int TileM, int TileN>
__device__ Tile read_planned(const Ring<kKind, TileM, TileN>& ring,
                             const Cursor<kPlanned>& planned) {
  await(ring.planned_full(planned.at()), planned.phase());
  return ring.planned(planned.at());
}

// What TMA brings. One thread, elected: ptxas then knows that a warp has one such thread, and puts
// no loop over threads around every TMA instruction. A tile without K-blocks, and the end, are told
// through a stage that holds nothing. Consumers wait for stages alone: so the first stage of a
// batch is full once the batch is.
template <Kind kKind, int TileM, int TileN>
__device__ void produce(const Params& params, const Ring<kKind, TileM, TileN>& ring) {
  using S = Stage<kKind, TileM, TileN>;
  using Load = cute::SM90_TMA_LOAD_2D;
  constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  Cursor<kPlanned> planned;
  Cursor<kScaleBatches> batches;
  int stage = 0;
  uint32_t phase = 1;
  for (bool more = true; more; planned.advance()) {
    const Tile tile = read_planned(ring, planned);
    arrive(ring.planned_empty(planned.at()));
    more = tile.k_blocks != kNoMore;
    const bool tail = S::kTails && tile.tail;
    const int row_b = (kKind == Kind::fprop ? tile.expert * params.n : 0) + tile.column;
    const int boxes_a = tail ? 1 : S::kBoxesA;
    const int bytes =
        S::kTileBytes + (S::kRowScales ? boxes_a * 4 * kScaleBox : 0) + S::kScaleBBytes;
    // The tile's K-block k, which is block `block` of these operands.
    const auto bring = [&](const OperandMaps& maps, int k,
                           int block) __attribute__((always_inline)) {
      await(ring.empty(stage), phase);
      FullBarrier& full = ring.full(stage);
      if (k == 0) ring.tile(stage) = tile;
      if (tile.k_blocks > 0) {
        full.expect_transaction(bytes);
        auto* barrier = reinterpret_cast<uint64_t*>(&full);
        const int depth = block * kBlockK;
        const auto scales_of_rows = [&](int i) {
          if constexpr (S::kRowScales)
            Load::copy(&maps.scale_a, barrier, kHint, ring.scale_a(stage) + i * kScaleStride,
                       tile.row / 4 * 4 + i * kBox, block);
        };
        if (!tail) {
          Load::copy(&maps.a, barrier, kHint, ring.box(stage, 0), depth, tile.row);
          Load::copy(&maps.b, barrier, kHint, ring.box(stage, S::kBoxesA), depth, row_b);
#pragma unroll
          for (int i = 0; i < S::kBoxesA; ++i) scales_of_rows(i);
        } else {
          Load::copy(&maps.a_tail, barrier, kHint, ring.box(stage, 0), depth, tile.row);
          Load::copy(&maps.b_tail, barrier, kHint, ring.box(stage, 1), depth, row_b);
          scales_of_rows(0);
        }
        if constexpr (S::kScaleBBytes > 0)
          Load::copy(&params.scale_b, barrier, kHint, ring.scale_b(stage), tile.column, block);
        if (S::kBlockScales && k % kScaleBatch == 0) {
          await(ring.batch_full(batches.at()), batches.phase());
          batches.advance();
        }
      }
      arrive(full);
      stage = after(stage);
      phase ^= stage == 0;
    };
    const int first =
        kKind == Kind::fprop ? min(tile.k_blocks, params.first_k_blocks) : tile.k_blocks;
#pragma unroll 2  // as it was measured; left alone, the compiler takes four for wgrad
    for (int k = 0; k < max(first, 1); ++k) bring(params.pair[0], k, tile.k_first + k);
    if (kKind == Kind::fprop && first < tile.k_blocks) bring(params.pair[1], first, 0);
  }
}

// The scales of blocks, which lie too scattered for TMA. One warp, a batch ahead with its loads:
// under the traffic of TMA they take as long as a short tile.
template <Kind kKind, int TileM, int TileN>
__device__ void produce_scales(const Params& params, const Ring<kKind, TileM, TileN>& ring) {
  static_assert(kScaleBatch == 32);  // a lane loads the scales of one K-block
  const int lane = threadIdx.x % 32;
  Cursor<kPlanned> planned;
  Cursor<kScaleBatches> batches;
  float4 loaded;
  bool pending = false;
  const auto store = [&] {
    if (!pending) return;
    await(ring.batch_empty(batches.at()), batches.phase() ^ 1);
    ring.scale_batch(batches.at())[lane] = loaded;
    __syncwarp();
    if (lane == 0) ring.batch_full(batches.at()).arrive();
    batches.advance();
    pending = false;
  };
  for (;; planned.advance()) {
    const Tile tile = read_planned(ring, planned);
    __syncwarp();
    if (lane == 0) ring.planned_empty(planned.at()).arrive();
    if (tile.k_blocks == kNoMore) break;
    // TMA reads no further tile before it has the batch, and few are planned beyond it.
    if (tile.k_blocks == 0) store();
    const BlockScales<kKind, TileM, TileN> scales(params, tile);
    const int blocks = kKind == Kind::fprop ? params.first_k_blocks : tile.k_blocks;
    for (int k = lane; k - lane < tile.k_blocks; k += kScaleBatch) {
      float4 next = k < blocks ? scales(k) : float4{};
      if (kKind == Kind::fprop && k >= blocks && k < tile.k_blocks)
        next = BlockScales<kKind, TileM, TileN>::second(params, tile);
      store();
      loaded = next;
      pending = true;
    }
  }
  store();
}

}  // namespace fp8moe::cuda::gemm
