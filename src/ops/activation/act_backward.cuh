// What the gradient's one-pass kernels take, and how the one with columns is launched.
#pragma once

#include "common/backends.h"
#include "ops/activation/act_rows.cuh"

namespace fp8moe::cuda {

constexpr const char* kBackward = "act_quantize_backward";

// Of both one-pass kernels, backward_rows and backward_tiles. Without a gate z and dz are [R, I]:
// what is said of the gate is then of them, and there is no up.
template <class Act>
struct ActBackward {
  static constexpr int kParts = Act::kGated ? 2 : 1;  // of a row of z, I each
  const uint16_t* z;                                  // [R, 2I] bf16
  const uint16_t* dh;                                 // [R, I] bf16
  const float* probs;                                 // [R] or nullptr: 1
  int rows, intermediate, tiles;  // tiles of h, the last one any part, or SideBySide's items
  PlanView plan;
  RowsOut dz;     // [R, 2I]
  float* dprobs;  // [R] or nullptr
  Pow2Scaling scaling;
  Act act;
  int rows_per_block = 0;           // of backward_rows
  unsigned* carry_ready = nullptr;  // of backward_tiles, with dprobs: a zero word per range
};

template <class Act>
ActBackward<Act> backward_of(const ActQuantizeBackward& p, int64_t tiles, const Act& act) {
  return {.z = p.z.as<uint16_t>(),
          .dh = p.dh.as<uint16_t>(),
          .probs = p.probs.as<float>(),
          .rows = static_cast<int>(p.dh.shape[0]),
          .intermediate = static_cast<int>(p.dh.shape[1]),
          .tiles = static_cast<int>(tiles),
          .plan = view_of(p.plan),
          .dz = rows_out(p.dz),
          .dprobs = p.dprobs.as<float>(),
          .scaling = {p.rule.eps},
          .act = act,
          .carry_ready = p.workspace.as<unsigned>()};
}

template <RowKernel kKernel>
int64_t items_of(int64_t inner) {
  return kKernel == RowKernel::side ? side_items(inner) : cdiv(inner, kTile);
}

// Columns of SideBySide whose dup may wait in backward_tiles.
constexpr int kMostWaiting = 80;

// backward_tiles, dz in format F, of a kind of act_rows.cuh: a source file each, which compile side
// by side.
template <typename F, RowKernel kKernel>
void launch_tiles(const ActQuantizeBackward& p, cudaStream_t stream);

}  // namespace fp8moe::cuda
