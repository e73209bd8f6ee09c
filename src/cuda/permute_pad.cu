// permute_pad: one launch of equal warps. Each brings a few tokens, or a piece of one, to shared
// memory once and sends them to all their rows, whole rows at a time: DRAM likes long writes.
// Meanwhile it writes probs, scales and the zeros of padding for its share of the destination rows,
// 8 or more in a row, so that a gemm-layout scale row gets whole sectors however the rows are
// gathered.
#include "core/backends.h"
#include "cuda/device/bulk.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/device/plan.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {
namespace {

constexpr int64_t kThreads = 32;
constexpr int64_t kTokensBytes = 8192;  // tokens of a block, where rows are shorter
constexpr int64_t kPieceBytes = 32768;  // of a longer row
constexpr int64_t kSectorRows = 8;      // whose scales are 32 bytes
constexpr int kBatch = 8;               // scales of a lane in flight

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
  int row_bytes;
  int tokens_a_block;  // more than one: whole rows
  int pieces;          // of a row
  int piece_bytes;
  int rows_a_block;      // of the destination
  bool zero_unweighted;  // rows of prob 0 are written as padding is
};

// Where assignment `i` sends its data; -1: nowhere.
__device__ __forceinline__ int row_with_data(const Params& p, int64_t i) {
  const int row = __ldg(p.plan.row_of + i);
  return p.zero_unweighted && __ldg(p.probs + i) == 0.0f ? -1 : row;
}

// Scales of rows first + r, r < n, whose tokens the lanes hold (-1: zero). Neighbouring lanes write
// neighbouring floats.
__device__ __forceinline__ void move_scales(const Params& p, int64_t first, int n, int token) {
  const int lane = threadIdx.x;
  const int tiles = p.x_scale.tiles;
  const bool by_row = p.y_scale.tile == 1;
  for (int base = lane; base - lane < n * tiles; base += 32 * kBatch) {
    float value[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int i = base + 32 * k;
      const int r = by_row ? i / tiles : i % n, j = by_row ? i % tiles : i / n;
      const int from = __shfl_sync(kFullWarp, token, r & 31);
      value[k] = 0.0f;
      if (i < n * tiles && from >= 0)
        value[k] = __ldg(p.x_scale.data + from * p.x_scale.row + j * p.x_scale.tile);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int i = base + 32 * k;
      const int r = by_row ? i / tiles : i % n, j = by_row ? i % tiles : i / n;
      if (i < n * tiles)
        p.y_scale.data[(first + r) * p.y_scale.row + j * p.y_scale.tile] = value[k];
    }
  }
}

// What goes with the data of rows [begin, begin + rows_a_block), and the data of those that are
// padding.
__device__ __forceinline__ void finish_rows(const Params& p, int64_t begin) {
  const int lane = threadIdx.x;
  const int64_t end = min(begin + p.rows_a_block, int64_t{p.plan.row_offsets[p.plan.experts]});
  for (int64_t first = begin; first < end; first += 32) {
    const int n = static_cast<int>(min(int64_t{32}, end - first));
    const int64_t row = first + lane;
    int token = lane < n ? p.plan.token_of_row[row] : 0;
    if (p.probs != nullptr && lane < n) {
      const float prob =
          token < 0 ? 0.0f : p.probs[token * int64_t{p.slots} + p.plan.slot_of_row[row]];
      p.permuted_probs[row] = prob;
      if (p.zero_unweighted && prob == 0.0f) token = -1;
    }
    if (p.x_scale.data != nullptr) move_scales(p, first, n, token);
    unsigned padding = __ballot_sync(kFullWarp, token < 0);
    for (; padding != 0; padding &= padding - 1) {
      char* to = p.y + (first + __ffs(padding) - 1) * p.row_bytes;
      for (int at = lane * 16; at < p.row_bytes; at += 32 * 16)
        store_streaming(to + at, uint4{0, 0, 0, 0});
    }
  }
}

__global__ void __launch_bounds__(kThreads) permute(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ alignas(8) uint64_t arrived;
  const int lane = threadIdx.x;
  const int64_t token = int64_t{blockIdx.x} / p.pieces * p.tokens_a_block;
  const int first_byte = static_cast<int>(blockIdx.x % p.pieces) * p.piece_bytes;
  const int tokens = static_cast<int>(min(int64_t{p.tokens_a_block}, p.tokens - token));
  const int bytes = tokens > 1 ? p.row_bytes : min(p.piece_bytes, p.row_bytes - first_byte);
  if (lane == 0) {
    start_barrier(&arrived);
    arrive_expecting(&arrived, tokens * bytes);
    if (bytes > 0)
      bulk_load(shared, p.x + token * p.row_bytes + first_byte, tokens * bytes, &arrived);
  }
  const int assignments = tokens * p.slots;
  int row = lane < assignments ? row_with_data(p, token * p.slots + lane) : -1;
  __syncwarp();
  wait_barrier(&arrived);
  for (int i = lane; i < assignments; i += 32) {
    if (i >= 32) row = row_with_data(p, token * p.slots + i);
    if (row >= 0 && bytes > 0)
      bulk_store(p.y + row * int64_t{p.row_bytes} + first_byte, shared + i / p.slots * bytes,
                 bytes);
  }
  __syncwarp();
  finish_rows(p, int64_t{blockIdx.x} * p.rows_a_block);
  bulk_wait_read();
}

}  // namespace

void permute_pad(const Fp8Tensor& x, const RoutingPlan& plan, const Tensor& probs,
                 const Fp8Tensor& y, const Tensor& permuted_probs, bool zero_unweighted,
                 Stream stream) {
  if (plan.tokens == 0) return;
  const DeviceGuard guard(y.data.device);
  const int64_t row_bytes = x.data.shape[1] * size_of(x.data.dtype);
  // Short rows: 8 KiB of them, while a lane an assignment suffices.
  const int64_t tokens_a_block = std::max<int64_t>(
      1, std::min(kTokensBytes / std::max<int64_t>(row_bytes, 16), kThreads / plan.slots));
  const int64_t pieces = std::max<int64_t>(1, cdiv(row_bytes, kPieceBytes));
  const int64_t piece_bytes = round_up(cdiv(row_bytes, pieces), 16);
  const int64_t blocks = cdiv(plan.tokens, tokens_a_block) * pieces;
  const Params params{
      .x = x.data.as<const char>(),
      .y = y.data.as<char>(),
      .x_scale = scales_of(x),
      .y_scale = scales_of(y),
      .probs = probs.as<const float>(),
      .permuted_probs = permuted_probs.as<float>(),
      .plan = view_of(plan),
      .tokens = plan.tokens,
      .slots = static_cast<int>(plan.slots),
      .row_bytes = static_cast<int>(row_bytes),
      .tokens_a_block = static_cast<int>(tokens_a_block),
      .pieces = static_cast<int>(pieces),
      .piece_bytes = static_cast<int>(piece_bytes),
      .rows_a_block = static_cast<int>(round_up(cdiv(plan.rows(), blocks), kSectorRows)),
      .zero_unweighted = zero_unweighted};
  launch("permute_pad", permute, static_cast<unsigned>(blocks), kThreads,
         static_cast<size_t>(tokens_a_block * piece_bytes), stream_of(stream), params);
}

}  // namespace fp8moe::cuda
