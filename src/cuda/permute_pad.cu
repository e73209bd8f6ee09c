// permute_pad: one launch of warps, each doing one of three things.
//   data:    a few tokens, or a piece of one, come to shared memory once and leave for all their
//   rows,
//            whole rows at a time: DRAM likes long writes;
//   scales:  scales and probs of 32 destination rows, so that a gemm-layout scale row gets 128
//   bytes at
//            a time however the rows are gathered;
//   padding: zeroes up to 16 padding rows of an expert.
#include "core/backends.h"
#include "cuda/device/bulk.cuh"
#include "cuda/device/plan.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/zero_padding.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {
namespace {

constexpr int64_t kThreads = 32;
constexpr int64_t kTokensBytes = 8192;  // tokens of a block, where rows are shorter
constexpr int64_t kPieceBytes = 32768;  // of a longer row
constexpr int kScaleTile = 32;          // rows, and scales of a row, that are turned at once
constexpr int kScaleTileBytes = kScaleTile * (kScaleTile + 1) * 4;

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
  bool zero_unweighted;   // rows of prob 0 are padding
  PlanView plan;
  int64_t tokens;
  int slots;
  int row_bytes;
  int tokens_a_block;  // more than one: whole rows
  int pieces;          // of a row
  int piece_bytes;
  unsigned zero_blocks;
  unsigned zero_blocks_an_expert;
  unsigned scale_blocks;
  unsigned side_stride;  // of zero and scale blocks among all blocks
};

// The prob of row `row`; returns the token of its scales, -1 for zeros and past the last row.
__device__ __forceinline__ int move_prob(const Params& p, int row, int rows) {
  if (row >= rows) return -1;
  const int token = p.plan.token_of_row[row];
  if (p.probs == nullptr) return token;
  const float prob = token < 0 ? 0.0f : p.probs[token * int64_t{p.slots} + p.plan.slot_of_row[row]];
  p.permuted_probs[row] = prob;
  return p.zero_unweighted && prob == 0.0f ? -1 : token;
}

// Probs and scales of 32 rows. Lanes run along the contiguous dimension of either side.
__device__ __forceinline__ void move_scales(const Params& p, int block, char* shared) {
  auto& tile = *reinterpret_cast<float (*)[kScaleTile][kScaleTile + 1]>(shared);
  const int rows = p.plan.row_offsets[p.plan.experts];
  const int lane = threadIdx.x;
  const int first = block * kScaleTile;
  if (first >= rows) return;
  const int token = move_prob(p, first + lane, rows);
  if (p.x_scale.data == nullptr) return;

  const bool by_row_in = p.x_scale.tile == 1, by_row_out = p.y_scale.tile == 1;
  for (int base = 0; base < p.x_scale.tiles; base += kScaleTile) {
    const int tiles = min(kScaleTile, p.x_scale.tiles - base);
#pragma unroll 16
    for (int i = 0; i < kScaleTile; ++i) {
      const int r = by_row_in ? i : lane, j = by_row_in ? lane : i;
      const int from = __shfl_sync(kFullWarp, token, r);
      if (j < tiles)
        tile[j][r] =
            from < 0 ? 0.0f
                     : __ldg(p.x_scale.data + from * p.x_scale.row + (base + j) * p.x_scale.tile);
    }
    __syncwarp();
#pragma unroll 8
    for (int i = 0; i < kScaleTile; ++i) {
      const int r = by_row_out ? i : lane, j = by_row_out ? lane : i;
      if (j < tiles && first + r < rows)
        p.y_scale.data[(first + r) * p.y_scale.row + (base + j) * p.y_scale.tile] = tile[j][r];
    }
    __syncwarp();
  }
}

__device__ __forceinline__ void fill_zeros(char* shared, int bytes) {
  for (int i = threadIdx.x * 16; i < bytes; i += 32 * 16)
    *reinterpret_cast<uint4*>(shared + i) = uint4{0, 0, 0, 0};
  bulk_fence();
  __syncwarp();
}

__device__ __forceinline__ void move_data(const Params& p, int64_t block, char* shared) {
  __shared__ alignas(8) uint64_t arrived;
  const int lane = threadIdx.x;
  const int64_t token = block / p.pieces * p.tokens_a_block;
  const int first_byte = static_cast<int>(block % p.pieces) * p.piece_bytes;
  const int tokens = static_cast<int>(min(int64_t{p.tokens_a_block}, p.tokens - token));
  const int bytes = tokens > 1 ? p.row_bytes : min(p.piece_bytes, p.row_bytes - first_byte);
  if (lane == 0) {
    start_barrier(&arrived);
    arrive_expecting(&arrived, tokens * bytes);
    bulk_load(shared, p.x + token * p.row_bytes + first_byte, tokens * bytes, &arrived);
  }
  const int32_t* row_of = p.plan.row_of + token * p.slots;
  const int assignments = tokens * p.slots;
  int row = lane < assignments ? __ldg(row_of + lane) : -1;
  __syncwarp();
  wait_barrier(&arrived);
  const float* probs = p.zero_unweighted ? p.probs + token * p.slots : nullptr;
  bool any_unweighted = false;
  for (int i = lane; i < assignments; i += 32) {
    if (i >= 32) row = __ldg(row_of + i);
    if (row < 0) continue;
    const bool unweighted = probs != nullptr && __ldg(probs + i) == 0.0f;
    any_unweighted |= unweighted;
    if (!unweighted)
      bulk_store(p.y + row * int64_t{p.row_bytes} + first_byte, shared + i / p.slots * bytes,
                 bytes);
  }
  bulk_wait_read();
  if (!__any_sync(kFullWarp, any_unweighted)) return;
  fill_zeros(shared, bytes);
  for (int i = lane; i < assignments; i += 32) {
    row = __ldg(row_of + i);
    if (row >= 0 && __ldg(probs + i) == 0.0f)
      bulk_store(p.y + row * int64_t{p.row_bytes} + first_byte, shared, bytes);
  }
  bulk_wait_read();
}

// Padding rows [16 n, 16 n + 16) of an expert, a row a lane.
__device__ __forceinline__ void zero_rows(const Params& p, unsigned block, char* shared) {
  const PaddingRows rows = padding_rows(p.plan, block, p.zero_blocks_an_expert);
  if (rows.count <= 0) return;
  const int bytes = min(p.piece_bytes, p.row_bytes);
  fill_zeros(shared, bytes);
  if (threadIdx.x < rows.count)
    for (int at = 0; at < p.row_bytes; at += bytes)
      bulk_store(p.y + (rows.first + static_cast<int>(threadIdx.x)) * int64_t{p.row_bytes} + at,
                 shared, min(bytes, p.row_bytes - at));
  bulk_wait_read();
}

__global__ void __launch_bounds__(kThreads) permute(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char shared[];
  // What moves little is spread among what moves data: each hides the other's latency.
  const unsigned side = p.zero_blocks + p.scale_blocks;
  const unsigned turn = blockIdx.x / p.side_stride;
  if (blockIdx.x % p.side_stride == 0 && turn < side) {
    if (turn < p.zero_blocks)
      zero_rows(p, turn, shared);
    else
      move_scales(p, static_cast<int>(turn - p.zero_blocks), shared);
    return;
  }
  move_data(p, blockIdx.x - min(side, (blockIdx.x + p.side_stride - 1) / p.side_stride), shared);
}

}  // namespace

void permute_pad(const Fp8Tensor& x, const RoutingPlan& plan, const Tensor& probs,
                 const Fp8Tensor& y, const Tensor& permuted_probs, bool zero_unweighted,
                 Stream stream) {
  const int64_t row_bytes = x.data.shape[1] * size_of(x.data.dtype);
  if (plan.tokens == 0) return;
  const DeviceGuard guard(y.data.device);
  // Short rows: 8 KiB of them, while a lane an assignment suffices.
  const int64_t tokens_a_block = std::max<int64_t>(
      1, std::min(kTokensBytes / std::max<int64_t>(row_bytes, 16), kThreads / plan.slots));
  const int64_t pieces = std::max<int64_t>(1, cdiv(row_bytes, kPieceBytes));
  const int64_t piece_bytes = round_up(cdiv(row_bytes, pieces), 16);
  const unsigned zero_blocks_an_expert = zero_padding_blocks_an_expert(plan);
  Params params{.x = x.data.as<const char>(),
                .y = y.data.as<char>(),
                .x_scale = scales_of(x),
                .y_scale = scales_of(y),
                .probs = probs.as<const float>(),
                .permuted_probs = permuted_probs.as<float>(),
                .zero_unweighted = zero_unweighted,
                .plan = view_of(plan),
                .tokens = plan.tokens,
                .slots = static_cast<int>(plan.slots),
                .row_bytes = static_cast<int>(row_bytes),
                .tokens_a_block = static_cast<int>(tokens_a_block),
                .pieces = static_cast<int>(pieces),
                .piece_bytes = static_cast<int>(piece_bytes),
                .zero_blocks = zero_blocks_an_expert * static_cast<unsigned>(plan.experts),
                .zero_blocks_an_expert = zero_blocks_an_expert};
  if (x.scale_inv.defined() || probs.defined())
    params.scale_blocks = static_cast<unsigned>(cdiv(plan.rows(), kScaleTile));
  const unsigned side = params.zero_blocks + params.scale_blocks;
  const int64_t data_blocks = row_bytes == 0 ? 0 : cdiv(plan.tokens, tokens_a_block) * pieces;
  const unsigned blocks = side + static_cast<unsigned>(data_blocks);
  if (blocks == 0) return;
  params.side_stride = blocks / std::max(1u, side);
  const int64_t shared = std::max<int64_t>(tokens_a_block * piece_bytes, kScaleTileBytes);
  launch("permute_pad", permute, blocks, kThreads, static_cast<size_t>(shared), stream_of(stream),
         params);
}

}  // namespace fp8moe::cuda
