// plan_from_row_id_map: a thread per cell of the map. Before it, two memsets say that there is no
// row, no token, and nothing in the status.
#include <algorithm>

#include "common/check.h"
#include "device/plan_layout.cuh"
#include "device/runtime.h"
#include "ops/backends.h"

namespace fp8moe::cuda {
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
