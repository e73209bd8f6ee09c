// The shared-memory plan: what one stage of the ring holds, and what lies beside the stages.
#pragma once

#include "gemm/tile.h"

namespace fp8moe::cuda::gemm {

inline constexpr int kSharedBytes = 227 * 1024;  // what a block of compute capability 9.0 can have
inline constexpr int kStages = 4;

inline constexpr int kOutputBoxBytes = 128;  // of a row of D: what TMA swizzles at most

// D on its way out: a staging buffer is 16 rows of 128 bytes, or as many bytes of 8 rows, and a
// consumer warp has Stage::kStagingBuffers of them.
inline constexpr int kStagingRows = 16;
inline constexpr int kStagingBytes = kStagingRows * kOutputBoxBytes;
// A box of TMA is half a staging buffer of f32 of wgrad, else a staging buffer (epilogue.cuh).
inline constexpr int kHalfStagingRows = 8;
inline constexpr int kHalfStagingBytes = kHalfStagingRows * kOutputBoxBytes;
constexpr int output_box_rows(Kind kind, bool bf16) {
  return kind == Kind::fprop || bf16 ? kStagingRows : kHalfStagingRows;
}
// By one instruction TMA takes all of a warp's bf16, and a staging buffer of f32 of wgrad.
constexpr int strip_boxes(int tile_n, bool bf16) { return bf16 ? tile_n / 64 : 2; }

inline constexpr int kScaleStride = (kScaleBox + 31) / 32 * 32;

// Tiles are planned this far ahead.
inline constexpr int kPlanned = 4;

// The scales of blocks come in batches of K-blocks, a tile's first K-blocks being a new batch.
inline constexpr int kScaleBatch = 32;
inline constexpr int kScaleBatches = 8;
inline constexpr int kScaleBatchBytes = 16 * kScaleBatch;

// 128x192: 16 KB of A, 24 KB of B, 1.5 KB for scales; four stages and D take 215 of the 227 KB.
// 192x128 the same the other way round.
template <Kind kKind, int TileM, int TileN>
struct Stage {
  using Traits = TileTraits<TileM, TileN>;
  static constexpr bool kTails = kKind == Kind::fprop && Traits::kShape.tail;
  static constexpr int kBoxesA = Traits::kBoxesA;
  static constexpr int kBoxes = Traits::kBoxes;
  static constexpr int kBoxBytes = kBox * kBlockK;
  static constexpr int kTileBytes = kBoxes * kBoxBytes;
  static constexpr bool kBlockScales = kKind != Kind::wgrad_1x128;
  static constexpr bool kRowScales = kKind != Kind::wgrad_128x128;
  static constexpr int kScaleBBytes = kKind == Kind::wgrad_1x128 ? 4 * TileN : 0;
  // Scales of a box of rows take kScaleStride floats, as TMA writes to multiples of 128 bytes.
  // Behind those of rows come those of columns.
  static constexpr int kScaleBAt = kRowScales ? kBoxesA * 4 * kScaleStride : 0;
  static constexpr int kScaleBytes = kScaleBAt + kScaleBBytes;
  static constexpr int kTileStructBytes = 32;
  static_assert(kBoxBytes % 1024 == 0, "swizzled boxes start at 1024 bytes");

  static constexpr int kConsumerWarps = 4 * Traits::kConsumers;
  static constexpr int kStagingBuffers = Traits::kShape.staging_buffers;
  static constexpr int kOutBytes = kConsumerWarps * kStagingBuffers * kStagingBytes;
  static constexpr int kStagingBarriers =
      kKind == Kind::fprop ? 0 : kConsumerWarps * kStagingBuffers;
  static constexpr int kBarriers = 2 * (kStages + kScaleBatches + kPlanned) + kStagingBarriers;
  static constexpr int kRowOffsetsBytes = kKind == Kind::fprop ? 4 * (kMaxExperts + 1) : 0;
  static constexpr int kBytes = kStages * (kTileBytes + kScaleBytes) +
                                (kStages + kPlanned) * kTileStructBytes + kOutBytes +
                                kScaleBatches * kScaleBatchBytes + 8 * kBarriers + kRowOffsetsBytes;
  static_assert(kBytes <= kSharedBytes);
};

}  // namespace fp8moe::cuda::gemm
