// dispatch_plan: which tokens travel to which rank, in two launches over chunks of tokens.
//   count: the tokens of each rank in each chunk, to the workspace;
//   place: every block lays the ranks out for itself, then gives the tokens of its chunk their
//   rows.
// Both take 128 tokens at a time as a bit a token and rank: a token that names a rank twice sets
// one bit, and the bits below a token's are the tokens of the rank that come before it.
#include "common/backends.h"
#include "common/check.h"
#include "device/plan_layout.cuh"
#include "device/runtime.h"

namespace fp8moe::cuda {
namespace {

constexpr int kThreads = kLayoutThreads;
constexpr int kMaxRanks = kMaxExperts;
constexpr int kStep = 128;  // tokens
constexpr int kWords = kStep / 32;
constexpr int kMaxChunks = 128;

// Whole steps of tokens; few enough that a block sums the counts of all.
struct Chunks {
  int count;
  int64_t size;

  explicit Chunks(int64_t tokens)
      : size(round_up(std::max<int64_t>(cdiv(tokens, kMaxChunks), 1), kStep)) {
    count = static_cast<int>(std::max<int64_t>(1, cdiv(tokens, size)));
  }
};

struct Params {
  const void* ids;  // [T, S]
  bool wide;        // 64-bit ids
  int64_t tokens;
  int64_t chunk;  // tokens
  int chunks;
  int slots;
  int num_experts;
  int experts_a_rank;
  int segment;            // tokens that a rank may get; 0: rank after rank
  int stride;             // with segments: the rows of a rank
  bool fits;              // whatever is routed, there is a row for it
  int32_t* chunk_counts;  // [chunks, ranks + 1]: tokens of each rank, ids of no expert
  int32_t* counts;        // [ranks, 2]
  int64_t* dropped;       // [3] or null
  PlanOut plan;           // its experts are the ranks
};

// The rank of flat entry i of topk_idx, -1 for none, `ranks` for an id that names no expert.
__device__ __forceinline__ int rank_of(const Params& p, int64_t i) {
  const int64_t id = p.wide ? __ldg(static_cast<const int64_t*>(p.ids) + i)
                            : int64_t{__ldg(static_cast<const int32_t*>(p.ids) + i)};
  if (id < -1 || id >= p.num_experts) return p.plan.experts;
  return id < 0 ? -1 : static_cast<int>(id) / p.experts_a_rank;
}

// The tokens of one step: bit t % 32 of mask[r kWords + t / 32] says that token t travels to rank
// r. `bad` (may be null) counts the ids of no expert. Starts and ends with a barrier.
__device__ __forceinline__ void mark_tokens(const Params& p, int64_t first, int tokens,
                                            unsigned* mask, int* bad) {
  const int ranks = p.plan.experts;
  __syncthreads();
  for (int i = threadIdx.x; i < ranks * kWords; i += kThreads) mask[i] = 0;
  __syncthreads();
  const auto slots = static_cast<unsigned>(p.slots);
  for (unsigned i = threadIdx.x; i < tokens * slots; i += kThreads) {
    const int rank = rank_of(p, first * slots + i);
    if (rank == ranks && bad != nullptr) atomicAdd(bad, 1);
    if (rank < 0 || rank == ranks) continue;
    const unsigned token = i / slots;
    atomicOr(&mask[rank * kWords + token / 32], 1u << (token % 32));
  }
  __syncthreads();
}

__device__ __forceinline__ int tokens_of(const unsigned* mask, int rank) {
  int count = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) count += __popc(mask[rank * kWords + w]);
  return count;
}

// How many of the step's tokens before `token` travel to `rank`.
__device__ __forceinline__ int tokens_before(const unsigned* mask, int rank, int token) {
  int count = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const unsigned word = mask[rank * kWords + w];
    const unsigned below = (1u << (token % 32)) - 1u;
    count += w < token / 32 ? __popc(word) : w == token / 32 ? __popc(word & below) : 0;
  }
  return count;
}

__global__ void __launch_bounds__(kThreads) count_tokens(const __grid_constant__ Params p) {
  extern __shared__ unsigned shared[];
  const int ranks = p.plan.experts;
  unsigned* mask = shared;                                     // [ranks][kWords]
  int* count = reinterpret_cast<int*>(mask + ranks * kWords);  // [ranks + 1]
  for (int r = threadIdx.x; r <= ranks; r += kThreads) count[r] = 0;
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i < 2 * ranks; i += kThreads) p.counts[i] = 0;

  const int64_t begin = blockIdx.x * p.chunk, end = min(begin + p.chunk, p.tokens);
  for (int64_t first = begin; first < end; first += kStep) {
    const int tokens = static_cast<int>(min(int64_t{kStep}, end - first));
    mark_tokens(p, first, tokens, mask, &count[ranks]);
    for (int r = threadIdx.x; r < ranks; r += kThreads) count[r] += tokens_of(mask, r);
  }
  __syncthreads();
  for (int r = threadIdx.x; r <= ranks; r += kThreads)
    p.chunk_counts[blockIdx.x * int64_t{ranks + 1} + r] = count[r];
}

// The place of rank threadIdx.x in a plan of segments, as place_expert has it in one without.
__device__ __forceinline__ ExpertPlace place_segment(const PlanOut& plan, int64_t count,
                                                     int64_t bad, int segment, int stride,
                                                     bool write) {
  constexpr int64_t kMaxInt = 0x7FFFFFFF;
  const int r = threadIdx.x;
  const int tokens = static_cast<int>(count < segment ? count : segment);
  int64_t columns, dropped;
  const int64_t column = exclusive_sum((tokens + 127) / 128 * 128, &columns);
  exclusive_sum(count - tokens, &dropped);
  if (write && r < plan.experts) {
    plan.tokens_per_expert[r] = tokens;
    plan.row_offsets[r] = r * stride;
    plan.col_offsets[r] = static_cast<int>(column);
  }
  if (write && r == 0) {
    plan.row_offsets[plan.experts] = plan.experts * stride;
    plan.col_offsets[plan.experts] = static_cast<int>(columns);
  }
  if (write && r < RoutingPlan::kStatusWords) {
    const int64_t word = r == kOverflow ? dropped : r == kBadExpert ? bad : 0;
    plan.status[r] = static_cast<int32_t>(word < kMaxInt ? word : kMaxInt);
  }
  return {.first_rank = 0,
          .tokens = tokens,
          .first_row = r < plan.experts ? r * stride : 0,
          .first_column = static_cast<int>(column)};
}

// next[r]: tokens of rank r in earlier chunks; total[r]: in all. Both are zero before.
__device__ __forceinline__ void sum_chunks(const Params& p, int* next, int* total) {
  const int keys = p.plan.experts + 1;
  for (int i = threadIdx.x; i < p.chunks * keys; i += kThreads) {
    const int here = p.chunk_counts[i], chunk = i / keys, key = i % keys;
    if (here == 0) continue;
    atomicAdd(&total[key], here);  // integers: any order gives the same sum
    if (chunk < static_cast<int>(blockIdx.x)) atomicAdd(&next[key], here);
  }
}

__global__ void __launch_bounds__(kThreads) place_tokens(const __grid_constant__ Params p) {
  extern __shared__ unsigned shared[];
  const int ranks = p.plan.experts, keys = ranks + 1;
  unsigned* mask = shared;                                    // [ranks][kWords]
  int* next = reinterpret_cast<int*>(mask + ranks * kWords);  // [ranks + 1]: of the next token
  int* total = next + keys;                                   // [ranks + 1]
  int* entries = total + keys;          // [ranks]: of topk_idx, on rows of this chunk
  int* tokens_a_rank = entries + keys;  // [ranks]
  int* first_row = tokens_a_rank + keys;
  int* first_column = first_row + keys;
  for (int i = threadIdx.x; i < 3 * keys; i += kThreads) next[i] = 0;
  __syncthreads();
  sum_chunks(p, next, total);
  __syncthreads();

  const int r = threadIdx.x;
  const int64_t count = r < ranks ? total[r] : 0;
  const bool write = blockIdx.x == 0;
  const ExpertPlace place =
      p.segment > 0 ? place_segment(p.plan, count, total[ranks], p.segment, p.stride, write)
                    : place_expert(p.plan, count, total[ranks], p.fits, write);
  if (r < ranks) {
    tokens_a_rank[r] = place.tokens;
    first_row[r] = place.first_row;
    first_column[r] = place.first_column;
    if (write) p.counts[2 * r] = place.tokens;
  }
  __syncthreads();
  if (write && p.dropped != nullptr && r < 3) p.dropped[r] += p.plan.status[r];
  write_blocks(p.plan, p.stride, tokens_a_rank, first_row, first_column);

  // The rows of a segment that no token has.
  const int64_t padded = int64_t{p.stride} * ranks, all_threads = int64_t{gridDim.x} * kThreads;
  for (int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x; row < padded;
       row += all_threads) {
    const int rank = static_cast<int>(row / p.stride);
    if (row - int64_t{rank} * p.stride < tokens_a_rank[rank]) continue;
    p.plan.token_of_row[row] = -1;
    p.plan.slot_of_row[row] = -1;
  }

  const auto slots = static_cast<unsigned>(p.slots);
  const int64_t begin = blockIdx.x * p.chunk, end = min(begin + p.chunk, p.tokens);
  for (int64_t first = begin; first < end; first += kStep) {
    const int tokens = static_cast<int>(min(int64_t{kStep}, end - first));
    mark_tokens(p, first, tokens, mask, nullptr);
    for (int i = threadIdx.x; i < tokens * ranks; i += kThreads) {
      const int token = i / ranks, rank = i % ranks;
      const bool travels = mask[rank * kWords + token / 32] >> (token % 32) & 1u;
      const int within = next[rank] + tokens_before(mask, rank, token);
      const int row = travels && within < tokens_a_rank[rank] ? first_row[rank] + within : -1;
      p.plan.row_of[first * ranks + i] = row;
      if (row < 0) continue;
      p.plan.token_of_row[row] = static_cast<int>(first + token);
      p.plan.slot_of_row[row] = rank;
    }
    for (unsigned i = threadIdx.x; i < tokens * slots; i += kThreads) {
      const int rank = rank_of(p, first * slots + i);
      if (rank < 0 || rank == ranks) continue;
      const int within = next[rank] + tokens_before(mask, rank, static_cast<int>(i / slots));
      if (within < tokens_a_rank[rank]) atomicAdd(&entries[rank], 1);
    }
    __syncthreads();
    for (int rank = threadIdx.x; rank < ranks; rank += kThreads)
      next[rank] += tokens_of(mask, rank);
  }
  __syncthreads();
  for (int rank = threadIdx.x; rank < ranks; rank += kThreads)
    if (entries[rank] != 0) atomicAdd(&p.counts[2 * rank + 1], entries[rank]);
}

}  // namespace

template <>
int64_t workspace_bytes(const DispatchPlan& p) {
  return Chunks(p.plan.tokens).count * (p.plan.experts + 1) * static_cast<int64_t>(sizeof(int32_t));
}

template <>
void run(const DispatchPlan& p, Stream stream) {
  FP8MOE_CHECK(p.plan.experts <= kMaxRanks, "[dispatch_plan] on CUDA there are at most ", kMaxRanks,
               " ranks; got ", p.plan.experts);
  const DeviceGuard guard(p.plan.buffer.device);
  const Chunks chunks(p.plan.tokens);
  const int64_t ranks = p.plan.experts, slots = p.topk_idx.shape[1];
  const Params params{.ids = p.topk_idx.data,
                      .wide = p.topk_idx.dtype == DType::i64,
                      .tokens = p.plan.tokens,
                      .chunk = chunks.size,
                      .chunks = chunks.count,
                      .slots = static_cast<int>(slots),
                      .num_experts = static_cast<int>(p.num_experts),
                      .experts_a_rank = static_cast<int>(p.num_experts / ranks),
                      .segment = static_cast<int>(p.segment),
                      .stride = static_cast<int>(p.segment > 0 ? p.plan.capacity / ranks : 0),
                      .fits = p.plan.tokens * std::min(slots, ranks) <= p.plan.capacity,
                      .chunk_counts = p.workspace.as<int32_t>(),
                      .counts = p.counts.as<int32_t>(),
                      .dropped = p.dropped.as<int64_t>(),
                      .plan = out_of(p.plan)};
  const auto shared = [&](int64_t arrays) {
    return static_cast<size_t>(4 * (ranks * kWords + arrays * (ranks + 1)));
  };
  const auto grid = static_cast<unsigned>(chunks.count);
  const cudaStream_t on = stream_of(stream);
  launch("dispatch_plan", count_tokens, grid, kThreads, shared(1), on, params);
  launch("dispatch_plan", place_tokens, grid, kThreads, shared(6), on, params);
}

}  // namespace fp8moe::cuda
