// plan_from_counts and plan_from_row_id_map: plans of rows that others have grouped.
#include <algorithm>

#include "common/backends.h"
#include "common/check.h"
#include "device/plan_layout.cuh"
#include "device/runtime.h"

namespace fp8moe::cuda {

// ---- plan_from_counts ---------------------------------------------------------------------------
// plan_from_counts: every block lays the experts out, then finds the expert of its packed rows.

namespace {

template <typename T>
__global__ void __launch_bounds__(kLayoutThreads)
    from_counts(const T* counts, const __grid_constant__ PlanOut plan) {
  __shared__ int first_rank[kMaxExperts], tokens[kMaxExperts], first_row[kMaxExperts],
      first_column[kMaxExperts];
  const int e = threadIdx.x;
  const int64_t given = e < plan.experts ? static_cast<int64_t>(counts[e]) : 0;
  const int bad = __syncthreads_count(given < 0);
  constexpr int64_t kEnough = int64_t{1} << 40;  // over any capacity; sums stay exact
  const int64_t count = given < 0 ? 0 : given < kEnough ? given : kEnough;
  const ExpertPlace place = place_expert(plan, count, bad, false, blockIdx.x == 0);
  if (e < plan.experts) {
    first_rank[e] = static_cast<int>(min(place.first_rank, plan.capacity));
    tokens[e] = place.tokens;
    first_row[e] = place.first_row;
    first_column[e] = place.first_column;
  }
  __syncthreads();

  mark_padding(plan, tokens, first_row);
  write_blocks(plan, 0, tokens, first_row, first_column);
  const int64_t i = int64_t{blockIdx.x} * kLayoutThreads + threadIdx.x;
  if (i >= plan.capacity) return;
  int low = 0, high = plan.experts;  // the last expert whose first rank is not above i
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first_rank[middle] <= i ? low : high) = middle;
  }
  const int within = static_cast<int>(i) - first_rank[low];
  const int row = within < tokens[low] ? first_row[low] + within : -1;
  plan.row_of[i] = row;
  if (row >= 0) {
    plan.token_of_row[row] = static_cast<int>(i);
    plan.slot_of_row[row] = 0;
  }
}

}  // namespace

template <>
void run(const PlanFromCounts& p, Stream stream) {
  FP8MOE_CHECK(p.plan.experts <= kMaxExperts, "[plan_from_counts] on CUDA a plan has at most ",
               kMaxExperts, " experts; got ", p.plan.experts);
  const DeviceGuard guard(p.plan.buffer.device);
  const auto blocks =
      static_cast<unsigned>(std::max<int64_t>(1, cdiv(p.plan.capacity, kLayoutThreads)));
  const auto run = [&](auto kernel, auto* counts) {
    launch("plan_from_counts", kernel, blocks, kLayoutThreads, 0, stream_of(stream), counts,
           out_of(p.plan));
  };
  if (p.tokens_per_expert.dtype == DType::i64)
    run(from_counts<int64_t>, p.tokens_per_expert.as<const int64_t>());
  else
    run(from_counts<int32_t>, p.tokens_per_expert.as<const int32_t>());
}

// ---- plan_from_row_id_map -----------------------------------------------------------------------
// plan_from_row_id_map: a thread per cell of the map. Before it, two memsets say that there is no
// row, no token, and nothing in the status.

namespace {

constexpr int kThreads = 256;

struct Params {
  const int32_t* map;
  const int64_t* pad_offsets;  // or null
  PlanOut plan;
  int64_t tokens;
  int64_t cells;  // T * S
  int slots;
  int rows;
  bool mask;
};

__global__ void __launch_bounds__(kThreads) from_map(const __grid_constant__ Params p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < p.plan.blocks) p.plan.col_blocks[i] = int4{0, 0, 0, -1};
  if (i == 0) p.plan.tokens_per_expert[0] = p.plan.row_offsets[1] = p.rows;
  if (i >= p.cells) return;
  int64_t token, slot, row;
  if (p.mask) {
    token = i / p.slots;
    const int64_t at = i % p.slots;  // of the slots that the token has
    const int32_t* cells = p.map + token * (2 * int64_t{p.slots} + 1);
    const int used = cells[2 * p.slots];
    if (used < 0 || used > p.slots) {
      if (at == 0) atomicAdd(p.plan.status + kBadExpert, 1);
      return;
    }
    if (at >= used) return;
    slot = cells[p.slots + at];
    if (slot < 0 || slot >= p.slots) {
      atomicAdd(p.plan.status + kBadExpert, 1);
      return;
    }
    row = cells[at] + (p.pad_offsets == nullptr ? 0 : p.pad_offsets[slot]);
  } else {
    token = i % p.tokens;
    slot = i / p.tokens;
    row = p.map[i];
    if (row == -1) return;
  }
  if (row < 0 || row >= p.rows) {
    atomicAdd(p.plan.status + kOverflow, 1);
    return;
  }
  p.plan.row_of[token * p.slots + slot] = static_cast<int>(row);
  p.plan.token_of_row[row] = static_cast<int>(token);
  p.plan.slot_of_row[row] = static_cast<int>(slot);
}

}  // namespace

template <>
void run(const PlanFromRowIdMap& p, Stream stream) {
  const DeviceGuard guard(p.plan.buffer.device);
  const RoutingPlan& plan = p.plan;
  const auto fill = [&](int32_t* from, const int32_t* to, int byte) {
    FP8MOE_CUDA_CHECK(
        cudaMemsetAsync(from, byte, (to - from) * sizeof(int32_t), stream_of(stream)));
  };
  fill(plan.status(), plan.token_of_row(), 0);
  fill(plan.token_of_row(), plan.col_blocks(), 0xFF);  // -1
  const Params params{.map = p.row_id_map.as<const int32_t>(),
                      .pad_offsets = p.pad_offsets.as<const int64_t>(),
                      .plan = out_of(plan),
                      .tokens = plan.tokens,
                      .cells = plan.tokens * plan.slots,
                      .slots = static_cast<int>(plan.slots),
                      .rows = static_cast<int>(plan.rows()),
                      .mask = p.row_id_map.ndim == 2};
  const int64_t threads = std::max<int64_t>({1, params.cells, params.plan.blocks});
  launch("plan_from_row_id_map", from_map, static_cast<unsigned>(cdiv(threads, kThreads)), kThreads,
         0, stream_of(stream), params);
}

}  // namespace fp8moe::cuda
