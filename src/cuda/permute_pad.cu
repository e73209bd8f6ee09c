// permute_pad: one launch, three kinds of blocks.
//   padding: zeroes the data of kZeroRows padding rows of an expert;
//   scales:  scales and probs of 32 destination rows, so that a gemm-layout scale row gets 128
//   bytes at a
//            time however the rows are gathered;
//   data:    a warp reads a piece of a token's row once and stores it to all its rows.
#include "core/backends.h"
#include "cuda/device/memory.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/zero_padding.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPiece = 2;       // vectors a lane: a warp moves 1 KiB at a time
constexpr int kScaleRows = 32;  // destination rows of a scales block
constexpr int kScaleTiles = 64;

// Tile j of row r: data[r * row + j * tile].
struct Scales {
  float* data = nullptr;
  int64_t row = 0;
  int64_t tile = 0;
  int tiles = 0;
};

Scales scales_of(const Fp8Tensor& t) {
  if (!t.scale_inv.defined()) return {};
  const bool row = t.layout == ScaleLayout::row;
  return {.data = t.scale_inv.as<float>(),
          .row = row ? t.scale_inv.shape[1] : 1,
          .tile = row ? 1 : t.scale_inv.shape[1],
          .tiles = static_cast<int>(t.scale_inv.shape[row ? 1 : 0])};
}

struct Params {
  const char* x;   // [T, C]
  char* y;         // [R, C]
  Scales x_scale;  // of FP8 data
  Scales y_scale;
  const float* probs;     // [T, S] or null
  float* permuted_probs;  // [R]
  PlanView plan;
  int64_t tokens;
  int slots;
  int vectors;  // 16 bytes each, in a row
  unsigned zero_blocks;
  unsigned zero_blocks_an_expert;
  unsigned scale_blocks;
};

// Probs and scales of rows [32 block, 32 block + 32).
__device__ void move_scales(const Params& p, unsigned block) {
  __shared__ float tile[kScaleTiles][kScaleRows + 1];
  __shared__ int token_of[kScaleRows];
  const int rows = p.plan.row_offsets[p.plan.experts];
  const int first = static_cast<int>(block) * kScaleRows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (first >= rows) return;
  if (warp == 0) {
    const int row = first + lane;
    const int token = row < rows ? p.plan.token_of_row[row] : -1;
    token_of[lane] = token;
    if (p.probs != nullptr && row < rows)
      p.permuted_probs[row] =
          token < 0 ? 0.0f : p.probs[token * int64_t{p.slots} + p.plan.slot_of_row[row]];
  }
  __syncthreads();
  if (p.x_scale.data == nullptr) return;

  const bool by_row_in = p.x_scale.tile == 1, by_row_out = p.y_scale.tile == 1;
  for (int base = 0; base < p.x_scale.tiles; base += kScaleTiles) {
    const int tiles = min(kScaleTiles, p.x_scale.tiles - base);
    // Lanes run along the contiguous dimension of either side; the tile turns one into the other.
    for (int i = threadIdx.x; i < kScaleTiles * kScaleRows; i += kThreads) {
      const int r = by_row_in ? i / kScaleTiles : i % kScaleRows;
      const int j = by_row_in ? i % kScaleTiles : i / kScaleRows;
      if (j >= tiles) continue;
      const int token = token_of[r];
      tile[j][r] =
          token < 0 ? 0.0f
                    : __ldg(p.x_scale.data + token * p.x_scale.row + (base + j) * p.x_scale.tile);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kScaleTiles * kScaleRows; i += kThreads) {
      const int r = by_row_out ? i / kScaleTiles : i % kScaleRows;
      const int j = by_row_out ? i % kScaleTiles : i / kScaleRows;
      if (j < tiles && first + r < rows)
        p.y_scale.data[(first + r) * p.y_scale.row + (base + j) * p.y_scale.tile] = tile[j][r];
    }
    __syncthreads();
  }
}

// Piece `item` of the tokens' rows.
__device__ void move_data(const Params& p, int64_t item) {
  const int lane = threadIdx.x % 32;
  const int pieces = (p.vectors + 32 * kPiece - 1) / (32 * kPiece);
  const int64_t token = item / pieces;
  if (token >= p.tokens) return;
  const int first = static_cast<int>(item % pieces) * 32 * kPiece + lane;
  uint4 words[kPiece];
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    if (first + 32 * i < p.vectors)
      words[i] = load_once<uint4>(p.x + (token * p.vectors + first + 32 * i) * 16);
  for (int group = 0; group < p.slots; group += 32) {
    const int slot = group + lane;
    const int row_of = slot < p.slots ? __ldg(p.plan.row_of + token * p.slots + slot) : -1;
    unsigned left = __ballot_sync(kFullWarp, row_of >= 0);
    while (left != 0) {
      const int64_t row = __shfl_sync(kFullWarp, row_of, __ffs(left) - 1);
      left &= left - 1;
#pragma unroll
      for (int i = 0; i < kPiece; ++i)
        if (first + 32 * i < p.vectors)
          store_streaming(p.y + (row * p.vectors + first + 32 * i) * 16, words[i]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) permute(const __grid_constant__ Params p) {
  unsigned block = blockIdx.x;
  if (block < p.zero_blocks)
    return zero_padding(p.plan, block, p.zero_blocks_an_expert, p.y, p.vectors);
  block -= p.zero_blocks;
  if (block < p.scale_blocks) return move_scales(p, block);
  block -= p.scale_blocks;
  move_data(p, int64_t{block} * kWarps + threadIdx.x / 32);
}

}  // namespace

void permute_pad(const Fp8Tensor& x, const RoutingPlan& plan, const Tensor& probs,
                 const Fp8Tensor& y, const Tensor& permuted_probs, Stream stream) {
  if (plan.tokens == 0 || plan.rows() == 0) return;
  const DeviceGuard guard(y.data.device);
  const int64_t vectors = x.data.shape[1] * size_of(x.data.dtype) / 16;
  const bool has_scales = x.scale_inv.defined();
  const auto zero_blocks_an_expert = zero_padding_blocks_an_expert(plan);
  const Params params{.x = x.data.as<const char>(),
                      .y = y.data.as<char>(),
                      .x_scale = scales_of(x),
                      .y_scale = scales_of(y),
                      .probs = probs.as<const float>(),
                      .permuted_probs = permuted_probs.as<float>(),
                      .plan = view_of(plan),
                      .tokens = plan.tokens,
                      .slots = static_cast<int>(plan.slots),
                      .vectors = static_cast<int>(vectors),
                      .zero_blocks = zero_blocks_an_expert * static_cast<unsigned>(plan.experts),
                      .zero_blocks_an_expert = zero_blocks_an_expert,
                      .scale_blocks = has_scales || probs.defined()
                                          ? static_cast<unsigned>(cdiv(plan.rows(), kScaleRows))
                                          : 0};
  const int64_t pieces = plan.tokens * cdiv(vectors, 32 * kPiece);
  const auto data_blocks = static_cast<unsigned>(cdiv(pieces, kWarps));
  launch("permute_pad", permute, params.zero_blocks + params.scale_blocks + data_blocks, kThreads,
         0, stream_of(stream), params);
}

}  // namespace fp8moe::cuda
