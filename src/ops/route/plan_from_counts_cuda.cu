// plan_from_counts: every block lays the experts out, then finds the expert of its packed rows.
#include "common/check.h"
#include "device/plan_layout.cuh"
#include "device/runtime.h"
#include "ops/backends.h"

namespace fp8moe::cuda {
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

}  // namespace fp8moe::cuda
