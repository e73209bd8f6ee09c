// plan_from_row_id_map: each cell of the map that names a row gives it its token and slot. All
// cells are checked before anything is written.
#include <algorithm>
#include <vector>

#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe::cpu {
namespace {

constexpr const char* kOp = "plan_from_row_id_map";

// fn(token, slot, row) of each cell that names a row.
template <typename Fn>
void each_cell(const PlanFromRowIdMap& p, Fn fn) {
  const int64_t tokens = p.plan.tokens, slots = p.plan.slots;
  const auto* map = p.row_id_map.as<const int32_t>();
  if (p.row_id_map.ndim == 1) {
    for (int64_t slot = 0; slot < slots; ++slot)
      for (int64_t token = 0; token < tokens; ++token, ++map)
        if (*map != -1) fn(token, slot, int64_t{*map});
    return;
  }
  for (int64_t token = 0; token < tokens; ++token, map += 2 * slots + 1) {
    const int64_t used = map[2 * slots];
    FP8MOE_CHECK(used >= 0 && used <= slots, "[", kOp, "] row_id_map must have 0 to ", slots,
                 " experts per token in its last column; got ", used, " for token ", token);
    for (int64_t i = 0; i < used; ++i) {
      const int64_t slot = map[slots + i];
      FP8MOE_CHECK(slot >= 0 && slot < slots, "[", kOp, "] row_id_map must name experts in [0, ",
                   slots, "); got ", slot, " for token ", token);
      const int64_t pad = p.pad_offsets.defined() ? p.pad_offsets.as<const int64_t>()[slot] : 0;
      fn(token, slot, map[i] + pad);
    }
  }
}

}  // namespace

template <>
void run(const PlanFromRowIdMap& p, Stream) {
  const RoutingPlan& plan = p.plan;
  std::vector<int64_t> owner(plan.rows(), -1);
  each_cell(p, [&](int64_t token, int64_t slot, int64_t row) {
    FP8MOE_CHECK(row >= 0 && row < plan.rows(), "[", kOp, "] row_id_map must name rows in [0, ",
                 plan.rows(), "); got ", row, " for token ", token, ", slot ", slot);
    FP8MOE_CHECK(owner[row] < 0, "[", kOp, "] row_id_map must name a row once; got ", row,
                 " for tokens ", owner[row], " and ", token);
    owner[row] = token;
  });

  int32_t* const end = plan.buffer.as<int32_t>() + plan.buffer_size();
  std::fill(plan.status(), plan.token_of_row(), 0);
  std::fill(plan.token_of_row(), plan.col_blocks(), -1);
  std::fill(plan.col_blocks(), end, 0);
  for (int32_t* block = plan.col_blocks(); block < end; block += 4) block[3] = -1;
  plan.tokens_per_expert()[0] = plan.row_offsets()[1] = static_cast<int32_t>(plan.rows());
  each_cell(p, [&](int64_t token, int64_t slot, int64_t row) {
    plan.token_of_row()[row] = static_cast<int32_t>(token);
    plan.slot_of_row()[row] = static_cast<int32_t>(slot);
    plan.row_of()[token * plan.slots + slot] = static_cast<int32_t>(row);
  });
}

}  // namespace fp8moe::cpu
