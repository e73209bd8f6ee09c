// route: a counting sort of the flat assignments by expert, stable, in two launches.
//   rank:  each chunk's assignments per expert, to the workspace, and the rank of each among those
//          of its expert in the chunk, to row_of: the warps' own counts give every warp its first
//          rank of every expert, matching lanes the rank within a step of 32;
//   scan:  (past kTwoLaunchTokens) the counts become sums over the earlier chunks;
//   place: each block lays the experts out for itself and turns ranks of its chunk into rows.
//          Short, because all of it waits: for its launch, then for the counts of all chunks.
// Key: the expert, -1 for none, E for an id that names no expert.
#include "common/backends.h"
#include "common/check.h"
#include "device/early_launch.cuh"
#include "device/plan_layout.cuh"
#include "device/runtime.h"
#include "device/slots.cuh"

namespace fp8moe::cuda {
namespace {

constexpr int kThreads = kLayoutThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kBatch = 16;  // warps or chunks whose counts are read together
constexpr int64_t kTwoLaunchTokens = 65536;
constexpr int kFewChunks = 64;  // with room for two blocks each to place them

// Assignments are cut into at most 128 chunks (512 where a launch sums them), whole steps of a
// block.
struct Chunks {
  int count;
  int64_t size;
  bool scanned;

  explicit Chunks(const RoutingPlan& plan) : scanned(plan.tokens > kTwoLaunchTokens) {
    const int64_t n = plan.tokens * plan.slots;
    size = round_up(std::max<int64_t>(cdiv(n, scanned ? 512 : 128), 1), kThreads);
    count = static_cast<int>(std::max<int64_t>(1, cdiv(n, size)));
  }
};

enum class Source { ids32, ids64, map8, map32, map64 };

struct Params {
  const void* from;  // topk_idx [T, S] or routing_map [T, E]
  Source source;
  int64_t assignments;
  int64_t chunk;
  int chunks;
  bool scanned;
  int slots;
  int32_t* counts;  // [chunks + 1, E + 1]; after the scan the last row is the sum
  PlanOut plan;
};

__device__ __forceinline__ int key_of(const Params& p, int64_t i) {
  const int experts = p.plan.experts;
  if (i >= p.assignments) return -1;
  if (p.source == Source::ids64) {
    const int64_t id = __ldg(static_cast<const int64_t*>(p.from) + i);
    return id < -1 || id >= experts ? experts : static_cast<int>(id);
  }
  if (p.source == Source::ids32) {
    const int id = __ldg(static_cast<const int32_t*>(p.from) + i);
    return id < -1 || id >= experts ? experts : id;
  }
  const bool routed = p.source == Source::map8 ? __ldg(static_cast<const uint8_t*>(p.from) + i) != 0
                      : p.source == Source::map32
                          ? __ldg(static_cast<const int32_t*>(p.from) + i) != 0
                          : __ldg(static_cast<const int64_t*>(p.from) + i) != 0;
  return routed ? static_cast<int>(static_cast<unsigned>(i) % static_cast<unsigned>(experts)) : -1;
}

__global__ void __launch_bounds__(kThreads) rank_keys(const __grid_constant__ Params p) {
  extern __shared__ int next[];  // [warps][E + 1]: the next rank of an expert, for each warp
  let_next_start();
  const int experts = p.plan.experts, keys = experts + 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t steps = p.chunk / kThreads;
  const int64_t first = blockIdx.x * p.chunk + warp * steps * 32 + lane;
  const int first_key = key_of(p, first);
#pragma unroll 4
  for (int i = threadIdx.x; i < kWarps * keys; i += kThreads) next[i] = 0;
  __syncthreads();

  const unsigned first_same = __match_any_sync(kFullWarp, first_key);
  int* mine = next + warp * keys;
#pragma unroll 1
  for (int64_t step = 0; step < steps; ++step) {
    const int key = step == 0 ? first_key : key_of(p, first + step * 32);
    const unsigned same = step == 0 ? first_same : __match_any_sync(kFullWarp, key);
    if (key >= 0 && lanes_below(same) == 0) mine[key] += __popc(same);
    __syncwarp();
  }
  __syncthreads();

#pragma unroll 1
  for (int k = threadIdx.x; k < keys; k += kThreads) {
    int rank = 0;
#pragma unroll 1
    for (int first_warp = 0; first_warp < kWarps; first_warp += kBatch) {
      int here[kBatch];  // read together: each would wait for the last write otherwise
      int* counts = next + first_warp * keys + k;
#pragma unroll
      for (int w = 0; w < kBatch; ++w) here[w] = counts[w * keys];
#pragma unroll
      for (int w = 0; w < kBatch; ++w) {
        counts[w * keys] = rank;
        rank += here[w];
      }
    }
    p.counts[blockIdx.x * int64_t{keys} + k] = rank;
  }
  __syncthreads();

#pragma unroll 1
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t i = first + step * 32;
    const int key = step == 0 ? first_key : key_of(p, i);
    const unsigned same = step == 0 ? first_same : __match_any_sync(kFullWarp, key);
    const bool routed = key >= 0 && key < experts;
    if (routed) p.plan.row_of[i] = mine[key] + static_cast<int>(lanes_below(same));
    __syncwarp();
    if (routed && lanes_below(same) == 0) mine[key] += __popc(same);
    __syncwarp();
  }
}

// 32 keys a block, a lane each; a warp sums a slice of the chunks.
__global__ void __launch_bounds__(kThreads) scan_counts(int32_t* counts, int chunks, int keys) {
  __shared__ int sums[kWarps][32];
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int key = blockIdx.x * 32 + lane;
  const int slice = (chunks + kWarps - 1) / kWarps;
  const int begin = min(chunks, warp * slice), end = min(chunks, begin + slice);
  int sum = 0;
  if (key < keys)
    for (int c = begin; c < end; ++c) sum += counts[c * int64_t{keys} + key];
  sums[warp][lane] = sum;
  __syncthreads();
  if (key >= keys) return;
  int before = 0;
  for (int w = 0; w < warp; ++w) before += sums[w][lane];
  for (int c = begin; c < end; ++c) {
    const int here = counts[c * int64_t{keys} + key];
    counts[c * int64_t{keys} + key] = before;
    before += here;
  }
  if (warp == kWarps - 1) counts[chunks * int64_t{keys} + key] = before;
}

// before[k]: assignments of key k in earlier chunks; total[k]: in all; of the key of bad ids the
// first block has the total alone. Both are zero.
__device__ __forceinline__ void sum_chunks(const Params& p, int chunk, int* before, int* total) {
  const int experts = p.plan.experts, keys = experts + 1, threads = blockDim.x;
  if (p.scanned) {
#pragma unroll 1
    for (int k = threadIdx.x; k < keys; k += threads) {
      before[k] = p.counts[chunk * int64_t{keys} + k];
      total[k] = p.counts[p.chunks * int64_t{keys} + k];
    }
    return;
  }
  int bad = 0;
  if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < p.chunks)
    bad = p.counts[threadIdx.x * keys + experts];
  const int width = (experts + 31) / 32 * 32;
  const int groups = threads / width, group = threadIdx.x / width, k = threadIdx.x % width;
  if (group < groups && k < experts) {
    int earlier = 0, all = 0;
#pragma unroll 1
    for (int first = group; first < p.chunks; first += kBatch * groups) {
      int here[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int c = first + i * groups;
        here[i] = c < p.chunks ? p.counts[c * keys + k] : 0;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        all += here[i];
        earlier += first + i * groups < chunk ? here[i] : 0;
      }
    }
    atomicAdd(&before[k], earlier);
    atomicAdd(&total[k], all);
  }
  if (bad > 0) atomicAdd(&total[experts], bad);
}

// At least a thread an expert. The instructions of all warps of an SM add up here: half a chunk a
// block where that leaves no SM with two.
__global__ void __launch_bounds__(kThreads, 1) place_keys(const __grid_constant__ Params p) {
  extern __shared__ int before[];  // [E + 1]
  const int experts = p.plan.experts, keys = experts + 1;
  int* total = before + keys;            // [E + 1]
  int* tokens = total + keys;            // [E]
  int* first_row = tokens + keys;        // [E]
  int* first_column = first_row + keys;  // [E]
  const int threads = blockDim.x;        // kThreads, or that over the blocks of a chunk
  const int64_t steps = p.chunk / kThreads;
  const int64_t first = blockIdx.x * steps * threads + threadIdx.x;
  const int first_key = key_of(p, first);
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * keys; i += threads) before[i] = 0;
  __syncthreads();

  // Of what has no expert: anything.
  const auto rank_in_chunk = [&](int64_t i) { return i < p.assignments ? p.plan.row_of[i] : 0; };
  wait_for_previous();
  const int first_rank = rank_in_chunk(first);
  sum_chunks(p, blockIdx.x * threads / kThreads, before, total);
  __syncthreads();

  const int e = threadIdx.x;
  const ExpertPlace place = place_expert(p.plan, e < experts ? total[e] : 0, total[experts],
                                         p.assignments <= p.plan.capacity, blockIdx.x == 0);
  if (e < experts) {
    tokens[e] = place.tokens;
    first_row[e] = place.first_row;
    first_column[e] = place.first_column;
  }
  __syncthreads();

#pragma unroll 1
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t i = first + step * threads;
    const int within = step == 0 ? first_rank : rank_in_chunk(i);
    const int key = step == 0 ? first_key : key_of(p, i);
    const bool routed = key >= 0 && key < experts;
    const int rank = routed ? before[key] + within : 0;
    const int row = routed && rank < tokens[key] ? first_row[key] + rank : -1;
    if (i < p.assignments) p.plan.row_of[i] = row;
    if (row >= 0) {
      const auto flat = static_cast<unsigned>(i), slots = static_cast<unsigned>(p.slots);
      p.plan.token_of_row[row] = static_cast<int>(flat / slots);
      p.plan.slot_of_row[row] = static_cast<int>(flat % slots);
    }
  }
  mark_padding(p.plan, tokens, first_row);
  write_blocks(p.plan, 0, tokens, first_row, first_column);
}

Source source_of(const Tensor& topk_idx, const Tensor& routing_map) {
  if (topk_idx.defined()) return topk_idx.dtype == DType::i64 ? Source::ids64 : Source::ids32;
  return routing_map.dtype == DType::i64   ? Source::map64
         : routing_map.dtype == DType::i32 ? Source::map32
                                           : Source::map8;
}

}  // namespace

template <>
int64_t workspace_bytes(const Route& p) {
  return (Chunks(p.plan).count + 1) * (p.plan.experts + 1) * static_cast<int64_t>(sizeof(int32_t));
}

template <>
void run(const Route& p, Stream stream) {
  FP8MOE_CHECK(p.plan.experts <= kMaxExperts, "[route] on CUDA a plan has at most ", kMaxExperts,
               " experts; got ", p.plan.experts);
  const DeviceGuard guard(p.plan.buffer.device);
  const Chunks chunks(p.plan);
  const int keys = static_cast<int>(p.plan.experts) + 1;
  const Params params{.from = p.topk_idx.defined() ? p.topk_idx.data : p.routing_map.data,
                      .source = source_of(p.topk_idx, p.routing_map),
                      .assignments = p.plan.tokens * p.plan.slots,
                      .chunk = chunks.size,
                      .chunks = chunks.count,
                      .scanned = chunks.scanned,
                      .slots = static_cast<int>(p.plan.slots),
                      .counts = p.workspace.as<int32_t>(),
                      .plan = out_of(p.plan)};
  const auto grid = static_cast<unsigned>(chunks.count);
  const cudaStream_t on = stream_of(stream);
  launch("route", rank_keys, grid, kThreads, kWarps * keys * sizeof(int), on, params);
  if (chunks.scanned)
    launch_early(scan_counts, static_cast<unsigned>(cdiv(keys, 32)), kThreads, 0, on, params.counts,
                 chunks.count, keys);
  const unsigned halves = p.plan.experts <= kThreads / 2 && chunks.count <= kFewChunks ? 2 : 1;
  launch_early(place_keys, halves * grid, kThreads / halves, 5 * keys * sizeof(int), on, params);
}

}  // namespace fp8moe::cuda
