// permute_pad: one launch of equal warps. Each repeatedly brings a few tokens, or a piece of one,
// to shared memory once and sends them to all their rows, whole rows at a time: DRAM likes long
// writes. Meanwhile it writes probs and scales of eight neighbouring destination rows, so that a
// gemm-layout scale row gets whole sectors however the rows are gathered. Padding comes in runs of
// up to align - 1 rows: neighbouring rows are zeroed by different blocks, so that every SM gets its
// share of a run. What a warp runs before its first write is short: a cold launch waits for its
// instructions too.
//
// One block an SM, of as many warps as have room for their tokens in shared memory: all shares of
// the work, tokens and rows, are dealt out beforehand and equal but for one.
#include "common/backends.h"
#include "device/bulk.cuh"
#include "device/memory.cuh"
#include "device/plan.cuh"
#include "device/reduce.cuh"
#include "device/runtime.h"

namespace fp8moe::cuda {
namespace {

constexpr int kMaxWarps = 32;           // of a block
constexpr int64_t kTokensBytes = 8192;  // tokens of a warp, where rows are shorter
constexpr int64_t kPieceBytes = 32768;  // of a longer row
constexpr int kGroupRows = 8;           // whose scales are 32 bytes
constexpr int kBatch = 20;              // scales of a lane in flight

// Tile j of row r: data[r * row + j * tile].
struct Scales {
  float* data = nullptr;
  int64_t row = 0;
  int tile = 0;
  int tiles = 0;
};

Scales scales_of(const Fp8Tensor& t) {
  if (!t.scale_inv.defined()) return {};
  const bool row = t.layout == ScaleLayout::row;
  return {.data = t.scale_inv.as<float>(),
          .row = row ? t.scale_inv.stride() : 1,
          .tile = row ? 1 : static_cast<int>(t.scale_inv.shape[1]),
          .tiles = static_cast<int>(t.scale_inv.shape[row ? 1 : 0])};
}

struct Params {
  const char* x;   // [T, C], rows x_stride bytes apart
  char* y;         // [R, C]
  Scales x_scale;  // of FP8 data
  Scales y_scale;
  const float* probs;  // [T, S] or null
  float* row_probs;    // [R]
  PlanView plan;
  int64_t tokens;
  int slots;
  int row_bytes;
  int tokens_a_warp;        // more than one: whole rows, dense in x
  int pieces, piece_bytes;  // of a row
  int items;                // of tokens_a_warp tokens, or a piece of one
  int max_rows;             // R
  int groups;               // of kGroupRows destination rows with probs or scales
  bool zero_unweighted;     // rows of prob 0 are written as padding is
  int x_stride;
};

// Where assignment `i` sends its data; -1: nowhere.
__device__ __forceinline__ int row_with_data(const Params& p, int64_t i) {
  const int row = __ldg(p.plan.row_of + i);
  return p.zero_unweighted && __ldg(p.probs + i) == 0.0f ? -1 : row;
}

// kWide neighbouring scales of a row that a lane reads at once.
template <int kWide>
__device__ __forceinline__ void read_scales(const float* from, float* value) {
  if constexpr (kWide == 4) {
    const float4 v = __ldg(reinterpret_cast<const float4*>(from));
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
  } else {
    value[0] = __ldg(from);
  }
}

// A lane's row of a group: four lanes share it, each every fourth kWide of its scales.
struct Row {
  int at;
  int token;  // -1: data and scales are zero
  float prob;
  bool inside;  // below the last row of the last expert
};

// Reads run ahead of knowing how many rows there are: what lies past the last is not used.
__device__ __forceinline__ Row read_row(const Params& p, int at) {
  int token = -1, slot = 0;
  if (at < p.max_rows) {
    token = __ldg(p.plan.token_of_row + at);
    if (p.probs != nullptr) slot = __ldg(p.plan.slot_of_row + at);
  }
  const bool inside = at < __ldg(p.plan.row_offsets + p.plan.experts);
  float prob = 0.0f;
  if (p.probs != nullptr && inside && token >= 0)
    prob = __ldg(p.probs + token * int64_t{p.slots} + slot);
  if (p.zero_unweighted && prob == 0.0f) token = -1;
  return {.at = at, .token = token, .prob = prob, .inside = inside};
}

// The token whose data row `at` takes, negative: none. Past the last row: anything.
__device__ __forceinline__ int token_with_data(const Params& p, int64_t at) {
  if (at >= p.max_rows) return 0;
  const int token = __ldg(p.plan.token_of_row + at);
  if (!p.zero_unweighted || token < 0 || at >= __ldg(p.plan.row_offsets + p.plan.experts))
    return token;
  const int slot = __ldg(p.plan.slot_of_row + at);
  return __ldg(p.probs + token * int64_t{p.slots} + slot) == 0.0f ? -1 : token;
}

// What a warp moves at once: `bytes` from first_byte on of some tokens; of none past the last item.
struct Item {
  int64_t token;
  int tokens;
  int first_byte;
  int bytes;  // of each
};

__device__ __forceinline__ Item item_of(const Params& p, int index) {
  const int64_t token = int64_t{index / p.pieces} * p.tokens_a_warp;
  const int first_byte = index % p.pieces * p.piece_bytes;
  const int64_t left = max(int64_t{0}, p.tokens - token);
  return {.token = token,
          .tokens = static_cast<int>(min(int64_t{p.tokens_a_warp}, left)),
          .first_byte = first_byte,
          .bytes = min(p.piece_bytes, p.row_bytes - first_byte)};
}

// By one lane.
__device__ __forceinline__ void fetch(const Params& p, const Item& item, char* shared,
                                      uint64_t* arrived) {
  const int bytes = item.tokens * item.bytes;
  arrive_expecting(arrived, bytes);
  if (bytes > 0) bulk_load(shared, p.x + item.token * p.x_stride + item.first_byte, bytes, arrived);
}

// The row of the item's assignment `i`.
__device__ __forceinline__ int row_in(const Params& p, const Item& item, int i) {
  return i < item.tokens * p.slots ? row_with_data(p, item.token * p.slots + i) : -1;
}

// By a warp; to: row_in of its first 32 assignments, a lane each.
__device__ __forceinline__ void send(const Params& p, const Item& item, const char* shared,
                                     int to) {
  const int lane = threadIdx.x % 32;
  // Several tokens have at most 32 assignments.
  const char* from = shared + (item.tokens > 1 ? lane / p.slots * item.bytes : 0);
#pragma unroll 1
  for (int i = lane; i < item.tokens * p.slots; i += 32) {
    if (i >= 32) to = row_in(p, item, i);
    if (to >= 0 && item.bytes > 0)
      bulk_store(p.y + to * int64_t{p.row_bytes} + item.first_byte, from, item.bytes);
  }
}

// kWide: 0 without scales, 4 where those of a row lie together, else 1.
template <int kWide>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) permute(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char of_block[];  // tokens of each warp, barriers
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int share = warp * gridDim.x + blockIdx.x, shares = warps * gridDim.x;
  const int warp_bytes = p.tokens_a_warp * p.piece_bytes;
  char* shared = of_block + warp * warp_bytes;
  uint64_t& arrived = reinterpret_cast<uint64_t*>(of_block + warps * warp_bytes)[warp];
  Item item = item_of(p, share);
  if (lane == 0) {
    start_barrier(&arrived);
    fetch(p, item, shared, &arrived);
  }
  int to = row_in(p, item, lane);
  // Rows, to be zeroed if they are padding, and groups are dealt one by one; a lane takes a row.
  int token_there = token_with_data(p, share + int64_t{lane} * shares);

  // Lanes run along the contiguous dimension of the scales that are written.
  const bool by_row = kWide > 0 && p.y_scale.tile == 1;
  const int within = by_row ? lane / 4 : lane % kGroupRows;
  const int part = by_row ? lane % 4 : lane / kGroupRows;
  bool moved = false;
#pragma unroll 1
  for (int group = share; group < p.groups || !moved; group += shares) {
    const Row row = read_row(p, group * kGroupRows + within);
    int first = part * kWide;  // tile
#pragma unroll 1
    do {
      float value[kBatch] = {};
      if constexpr (kWide > 0) {
        const float* from =
            p.x_scale.data + max(row.token, 0) * p.x_scale.row + int64_t{first} * p.x_scale.tile;
        const int left = row.inside && row.token >= 0 ? p.x_scale.tiles - first : 0;
#pragma unroll
        for (int k = 0; k < kBatch; k += kWide)
          if (4 * k < left)
            read_scales<kWide>(from + (kWide == 4 ? 4 * k : int64_t{4 * k} * p.x_scale.tile),
                               value + k);
      }
      // Everything is read before the first write: under a stream of writes a read takes long.
      if (!moved) {
        moved = true;
        __syncwarp();
        wait_barrier(&arrived, 0);
        send(p, item, shared, to);
        __syncwarp();
      }
      if constexpr (kWide > 0) {
        float* to_scale = p.y_scale.data + row.at * p.y_scale.row + int64_t{first} * p.y_scale.tile;
        const int left = row.inside ? p.x_scale.tiles - first : 0;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int tile = k / kWide * 4 * kWide + k % kWide;
          if (tile < left) to_scale[int64_t{tile} * p.y_scale.tile] = value[k];
        }
      }
      first += 4 * kBatch;
    } while (kWide > 0 && first - part * kWide < p.x_scale.tiles);
    if (p.probs != nullptr && row.inside && part == 0) p.row_probs[row.at] = row.prob;
  }

  unsigned fetched = 0;
#pragma unroll 1
  for (int index = share + shares; index < p.items; index += shares) {
    item = item_of(p, index);
    to = row_in(p, item, lane);
    bulk_wait_read();
    __syncwarp();
    if (lane == 0) fetch(p, item, shared, &arrived);
    wait_barrier(&arrived, ++fetched);
    send(p, item, shared, to);
    __syncwarp();
  }

  bool zeroed = false;
#pragma unroll 1
  for (int64_t first = share; first < p.max_rows; first += 32 * int64_t{shares}) {
    const int64_t at = first + int64_t{lane} * shares;
    if (first != share) token_there = token_with_data(p, at);
    const bool zero = token_there < 0 && at < __ldg(p.plan.row_offsets + p.plan.experts);
    if (!__any_sync(kFullWarp, zero)) continue;
    // The tokens are on their way; their place in shared memory serves the zeros, whole rows too.
    if (!zeroed) {
      bulk_wait_read();
      __syncwarp();
#pragma unroll 1
      for (int i = lane * 16; i < p.piece_bytes; i += 32 * 16)
        *reinterpret_cast<uint4*>(shared + i) = uint4{0, 0, 0, 0};
      bulk_fence();
      __syncwarp();
      zeroed = true;
    }
    if (zero) {
#pragma unroll 1
      for (int i = 0; i < p.row_bytes; i += p.piece_bytes)
        bulk_store(p.y + at * p.row_bytes + i, shared, min(p.piece_bytes, p.row_bytes - i));
    }
  }
  bulk_wait_read();
}

}  // namespace

template <>
void run(const PermutePad& p, Stream stream) {
  const DeviceGuard guard(p.y.data.device);
  if (p.plan.tokens == 0) {  // what rows there are (of segments) are padding
    for (const Tensor& t : {p.y.data, p.y.scale_inv, p.row_probs}) write_zeros(t, stream);
    return;
  }
  const int64_t row_bytes = p.x.data.shape[1] * size_of(p.x.data.dtype);
  const int64_t x_stride = p.x.data.stride() * size_of(p.x.data.dtype);
  // Short rows: 8 KiB of them by one load, while a lane an assignment suffices.
  const int64_t tokens_a_warp =
      x_stride != row_bytes
          ? 1
          : std::max<int64_t>(
                1, std::min(kTokensBytes / std::max<int64_t>(row_bytes, 16), 32 / p.plan.slots));
  const int64_t pieces = std::max<int64_t>(1, cdiv(row_bytes, kPieceBytes));
  const int64_t piece_bytes = round_up(cdiv(row_bytes, pieces), 16);
  const int64_t items = cdiv(p.plan.tokens, tokens_a_warp) * pieces;
  const int64_t warp_bytes = tokens_a_warp * piece_bytes + int64_t{sizeof(uint64_t)};
  const DeviceInfo& device = device_info(p.y.data.device);
  const int64_t warps = std::min<int64_t>(
      {kMaxWarps, device.shared_per_block / warp_bytes, cdiv(items, device.sm_count)});
  const auto grid = static_cast<unsigned>(std::min<int64_t>(items, device.sm_count));
  const Params params{.x = p.x.data.as<const char>(),
                      .y = p.y.data.as<char>(),
                      .x_scale = scales_of(p.x),
                      .y_scale = scales_of(p.y),
                      .probs = p.probs.as<const float>(),
                      .row_probs = p.row_probs.as<float>(),
                      .plan = view_of(p.plan),
                      .tokens = p.plan.tokens,
                      .slots = static_cast<int>(p.plan.slots),
                      .row_bytes = static_cast<int>(row_bytes),
                      .tokens_a_warp = static_cast<int>(tokens_a_warp),
                      .pieces = static_cast<int>(pieces),
                      .piece_bytes = static_cast<int>(piece_bytes),
                      .items = static_cast<int>(items),
                      .max_rows = static_cast<int>(p.plan.rows()),
                      .groups = p.x.scale_inv.defined() || p.probs.defined()
                                    ? static_cast<int>(cdiv(p.plan.rows(), kGroupRows))
                                    : 0,
                      .zero_unweighted = p.zero_unweighted,
                      .x_stride = static_cast<int>(x_stride)};
  const auto run = [&](auto kernel) {
    launch("permute_pad", kernel, grid, static_cast<unsigned>(32 * warps),
           static_cast<size_t>(warps * warp_bytes), stream_of(stream), params);
  };
  const Scales& scales = params.x_scale;
  if (scales.data == nullptr)
    run(permute<0>);
  else if (scales.tile == 1 && scales.tiles % 4 == 0 && scales.row % 4 == 0 &&
           reinterpret_cast<uintptr_t>(scales.data) % 16 == 0)
    run(permute<4>);
  else
    run(permute<1>);
}

}  // namespace fp8moe::cuda
