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
constexpr int kBatch = 14;              // scales of a lane in flight
constexpr int kBlocksPerSm = 28;        // 8 KiB each: registers must not be what bounds them

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
          .row = row ? t.scale_inv.stride() : 1,
          .tile = row ? 1 : t.scale_inv.shape[1],
          .tiles = static_cast<int>(t.scale_inv.shape[row ? 1 : 0])};
}

struct Params {
  const char* x;   // [T, C], rows x_stride bytes apart
  char* y;         // [R, C]
  Scales x_scale;  // of FP8 data
  Scales y_scale;
  const float* probs;     // [T, S] or null
  float* permuted_probs;  // [R]
  PlanView plan;
  int64_t tokens;
  int slots;
  int row_bytes;
  int tokens_a_block;  // more than one: whole rows, dense in x
  int pieces;          // of a row
  int piece_bytes;
  int64_t max_rows;      // R
  int rows_a_block;      // of the destination
  bool zero_unweighted;  // rows of prob 0 are written as padding is
  int x_stride;
};

// Where assignment `i` sends its data; -1: nowhere.
__device__ __forceinline__ int row_with_data(const Params& p, int64_t i) {
  const int row = __ldg(p.plan.row_of + i);
  return p.zero_unweighted && __ldg(p.probs + i) == 0.0f ? -1 : row;
}

// The share of the destination rows a warp writes, 32 of them at a time, lane r holding row first +
// r.
struct Rows {
  int64_t first;
  int count;  // none if not positive
  int token;  // -1: data and scales are zero
  float prob;
};

// Reads run ahead of knowing how many rows there are: what lies past the last is not used.
__device__ __forceinline__ Rows read_rows(const Params& p, int64_t first, int64_t last) {
  const int lane = threadIdx.x;
  const int64_t row = first + lane;
  const int rows = __ldg(p.plan.row_offsets + p.plan.experts);
  int token = 0, slot = 0;
  if (row < min(last, p.max_rows)) {
    token = __ldg(p.plan.token_of_row + row);
    if (p.probs != nullptr) slot = __ldg(p.plan.slot_of_row + row);
  }
  const int count = static_cast<int>(min(int64_t{32}, min(last, int64_t{rows}) - first));
  if (lane >= count) token = 0;
  float prob = 0.0f;
  if (p.probs != nullptr && lane < count && token >= 0)
    prob = __ldg(p.probs + token * int64_t{p.slots} + slot);
  if (p.zero_unweighted && lane < count && prob == 0.0f) token = -1;
  return {.first = first, .count = count, .token = token, .prob = prob};
}

// Scale `i` of rows.count x tiles: lanes run along the contiguous dimension of what is written.
struct ScaleAt {
  int row;
  int tile;
  bool inside;
};
__device__ __forceinline__ ScaleAt scale_at(const Params& p, const Rows& rows, int i) {
  const int tiles = p.x_scale.tiles;
  const bool by_row = p.y_scale.tile == 1;
  return {.row = by_row ? i / tiles : i % max(rows.count, 1),
          .tile = by_row ? i % tiles : i / max(rows.count, 1),
          .inside = i < rows.count * tiles};
}

// A batch of scales from index `base` on.
__device__ __forceinline__ void read_scales(const Params& p, const Rows& rows, int base,
                                            float (&value)[kBatch]) {
#pragma unroll
  for (int k = 0; k < kBatch; ++k) {
    const ScaleAt at = scale_at(p, rows, base + 32 * k + static_cast<int>(threadIdx.x));
    const int token = __shfl_sync(kFullWarp, rows.token, at.row & 31);
    value[k] = at.inside && token >= 0
                   ? __ldg(p.x_scale.data + token * p.x_scale.row + at.tile * p.x_scale.tile)
                   : 0.0f;
  }
}
__device__ __forceinline__ void write_scales(const Params& p, const Rows& rows, int base,
                                             const float (&value)[kBatch]) {
#pragma unroll
  for (int k = 0; k < kBatch; ++k) {
    const ScaleAt at = scale_at(p, rows, base + 32 * k + static_cast<int>(threadIdx.x));
    if (at.inside)
      p.y_scale.data[(rows.first + at.row) * p.y_scale.row + at.tile * p.y_scale.tile] = value[k];
  }
}

// Probs, scales (the first batch of which was read) and the zeros of padding.
__device__ __forceinline__ void write_rows(const Params& p, const Rows& rows,
                                           float (&value)[kBatch]) {
  const int lane = threadIdx.x;
  if (p.probs != nullptr && lane < rows.count) p.permuted_probs[rows.first + lane] = rows.prob;
  if (p.x_scale.data != nullptr) {
    write_scales(p, rows, 0, value);
    for (int base = 32 * kBatch; base < rows.count * p.x_scale.tiles; base += 32 * kBatch) {
      read_scales(p, rows, base, value);
      write_scales(p, rows, base, value);
    }
  }
  unsigned padding = __ballot_sync(kFullWarp, rows.token < 0);
  for (; padding != 0; padding &= padding - 1) {
    char* to = p.y + (rows.first + __ffs(padding) - 1) * p.row_bytes;
    for (int at = lane * 16; at < p.row_bytes; at += 32 * 16)
      store_streaming(to + at, uint4{0, 0, 0, 0});
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    permute(const __grid_constant__ Params p) {
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
      bulk_load(shared, p.x + token * p.x_stride + first_byte, tokens * bytes, &arrived);
  }
  // Everything is read before the first write: under a stream of writes a read takes long.
  const int assignments = tokens * p.slots;
  int row = lane < assignments ? row_with_data(p, token * p.slots + lane) : -1;
  const int64_t begin = int64_t{blockIdx.x} * p.rows_a_block, end = begin + p.rows_a_block;
  Rows rows = read_rows(p, begin, end);
  float value[kBatch];
  if (p.x_scale.data != nullptr) read_scales(p, rows, 0, value);
  __syncwarp();
  wait_barrier(&arrived);
  for (int i = lane; i < assignments; i += 32) {
    if (i >= 32) row = row_with_data(p, token * p.slots + i);
    if (row >= 0 && bytes > 0)
      bulk_store(p.y + row * int64_t{p.row_bytes} + first_byte, shared + i / p.slots * bytes,
                 bytes);
  }
  __syncwarp();
  write_rows(p, rows, value);
  for (int64_t first = begin + 32; first < end; first += 32) {
    rows = read_rows(p, first, end);
    if (p.x_scale.data != nullptr) read_scales(p, rows, 0, value);
    write_rows(p, rows, value);
  }
  bulk_wait_read();
}

}  // namespace

void permute_pad(const Fp8Tensor& x, const RoutingPlan& plan, const Tensor& probs,
                 const Fp8Tensor& y, const Tensor& permuted_probs, bool zero_unweighted,
                 Stream stream) {
  const DeviceGuard guard(y.data.device);
  if (plan.tokens == 0) {  // what rows there are (of segments) are padding
    for (const Tensor& t : {y.data, y.scale_inv, permuted_probs})
      if (t.defined() && t.numel() > 0)
        FP8MOE_CUDA_CHECK(
            cudaMemsetAsync(t.data, 0, t.numel() * size_of(t.dtype), stream_of(stream)));
    return;
  }
  const int64_t row_bytes = x.data.shape[1] * size_of(x.data.dtype);
  const int64_t x_stride = x.data.stride() * size_of(x.data.dtype);
  // Short rows: 8 KiB of them by one load, while a lane an assignment suffices.
  const int64_t tokens_a_block =
      x_stride != row_bytes
          ? 1
          : std::max<int64_t>(1, std::min(kTokensBytes / std::max<int64_t>(row_bytes, 16),
                                          kThreads / plan.slots));
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
      .max_rows = plan.rows(),
      .rows_a_block = static_cast<int>(round_up(cdiv(plan.rows(), blocks), kSectorRows)),
      .zero_unweighted = zero_unweighted,
      .x_stride = static_cast<int>(x_stride)};
  launch("permute_pad", permute, static_cast<unsigned>(blocks), kThreads,
         static_cast<size_t>(tokens_a_block * piece_bytes), stream_of(stream), params);
}

}  // namespace fp8moe::cuda
