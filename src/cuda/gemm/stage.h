// The shared-memory plan: what one stage of the ring holds, and what lies beside the stages.
#pragma once

#include "cuda/gemm/config.h"

namespace fp8moe::cuda::gemm {

inline constexpr int kSharedBytes = 227 * 1024;  // what a block of compute capability 9.0 can have
inline constexpr int kStages = 4;

inline constexpr int kOutputBoxBytes = 128;  // of a row of D: what TMA swizzles at most

// D on its way out: a slab is 16 rows of 128 bytes, or as many bytes of 8 rows, and a consumer warp
// has Stage::kSlabs of them.
inline constexpr int kSlabRows = 16;
inline constexpr int kSlabBytes = kSlabRows * kOutputBoxBytes;
// A box of TMA is half a slab of f32 of tokens_*, else a slab (epilogue.cuh).
inline constexpr int kHalfSlabRows = 8;
inline constexpr int kHalfSlabBytes = kHalfSlabRows * kOutputBoxBytes;
constexpr int output_box_rows(Kind kind, bool bf16) {
  return kind == Kind::rows || bf16 ? kSlabRows : kHalfSlabRows;
}
// By one instruction TMA takes all of a warp's bf16, and a slab of f32 of tokens_*.
constexpr int strip_boxes(int tile_n, bool bf16) { return bf16 ? tile_n / 64 : 2; }

inline constexpr int kScaleStride = (kScaleBox + 31) / 32 * 32;

// Tiles are planned this far ahead.
inline constexpr int kPlanned = 4;

// The scales of blocks come in runs of K-blocks, a tile's first K-blocks being a new run.
inline constexpr int kRunLength = 32;
inline constexpr int kRuns = 8;
inline constexpr int kRunBytes = 16 * kRunLength;

// 128x192: 16 KB of A, 24 KB of B, 1.5 KB for scales; four stages and D take 215 of the 227 KB.
// 192x128 the same the other way round.
template <Kind kKind, int TileM, int TileN>
struct Stage {
  // Whether there are low tiles, too, and beside 192 columns flank ones.
  static constexpr bool kEdges = kKind == Kind::rows && has_low(TileM, TileN);
  static constexpr int kBoxesA = TileM / kBox;
  static constexpr int kBoxes = kBoxesA + TileN / kBox;
  static constexpr int kMaxBoxesA = kEdges ? kFlankBoxes : kBoxesA;
  static constexpr int kBoxBytes = kBox * kBlockK;
  static constexpr int kTileBytes = kBoxes * kBoxBytes;
  static constexpr bool kBlockScales = kKind != Kind::tokens_column;
  static constexpr bool kRowScales = kKind != Kind::tokens_block;
  static constexpr int kScaleBBytes = kKind == Kind::tokens_column ? 4 * TileN : 0;
  // Scales of a box of rows take kScaleStride floats, as TMA writes to multiples of 128 bytes.
  // Behind those of rows come those of columns.
  static constexpr int kScaleBAt = kRowScales ? kMaxBoxesA * 4 * kScaleStride : 0;
  static constexpr int kScaleBytes = kScaleBAt + kScaleBBytes;
  static constexpr int kTileStructBytes = 32;
  static_assert(kBoxBytes % 1024 == 0, "swizzled boxes start at 1024 bytes");

  static constexpr int kConsumerWarps = 4 * kBoxesA;
  static constexpr int kSlabs = TileM == kTileM ? 3 : 2;
  static constexpr int kOutBytes = kConsumerWarps * kSlabs * kSlabBytes;
  static constexpr int kSlabBarriers = kKind == Kind::rows ? 0 : kConsumerWarps * kSlabs;
  static constexpr int kBarriers = 2 * (kStages + kRuns + kPlanned) + kSlabBarriers;
  static constexpr int kRowOffsetsBytes = kKind == Kind::rows ? 4 * (kMaxExperts + 2) : 0;
  static constexpr int kBytes = kStages * (kTileBytes + kScaleBytes) +
                                (kStages + kPlanned) * kTileStructBytes + kOutBytes +
                                kRuns * kRunBytes + 8 * kBarriers + kRowOffsetsBytes;
  static_assert(kBytes <= kSharedBytes);
};

}  // namespace fp8moe::cuda::gemm
