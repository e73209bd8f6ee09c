// The shared-memory plan: what one stage of the ring holds, and how many stages fit.
#pragma once

#include "cuda/gemm/config.h"

namespace fp8moe::cuda::gemm {

inline constexpr int kSharedBytes = 227 * 1024;  // what a block of compute capability 9.0 can have

// 128x192: 16 KB of A, 24 KB of B, 512 bytes of scales; five stages take 202.5 of the 227 KB.
template <Kind kKind, int TileN>
struct Stage {
  static constexpr int kABytes = kTileM * kBlockK;
  static constexpr int kBBytes = TileN * kBlockK;
  static constexpr int kTileBytes = kABytes + kBBytes;
  static constexpr int kScaleABytes = kKind == Kind::tokens_block ? 0 : 4 * kScaleBoxA;
  static constexpr int kScaleBBytes = kKind == Kind::tokens_column ? 4 * TileN : 0;
  static constexpr int kLoadBytes = kTileBytes + kScaleABytes + kScaleBBytes;
  static constexpr int kScaleBAt = (kScaleABytes + 127) / 128 * 128;  // TMA writes at 128 bytes
  static constexpr int kScaleBytes = kScaleBAt + kScaleBBytes;
  static constexpr int kBarrierBytes = 16 + 32;  // full, empty, and the Tile
  static_assert(kABytes % 1024 == 0 && kBBytes % 2048 == 0, "swizzled tiles start at 1024 bytes");

  // Behind the stages: the prefix sums of Kind::rows.
  static constexpr int kFixedBytes = kKind == Kind::rows ? 4 * (kMaxExperts + 1) : 0;
  static constexpr int kStages =
      (kSharedBytes - kFixedBytes) / (kTileBytes + kScaleBytes + kBarrierBytes);
  static constexpr int kBytes = kStages * (kTileBytes + kScaleBytes + kBarrierBytes) + kFixedBytes;
};

}  // namespace fp8moe::cuda::gemm
