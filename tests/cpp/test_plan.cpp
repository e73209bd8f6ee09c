// route and plan_from_counts against a list of rows built expert by expert.
#include <algorithm>

#include "check.h"

using namespace fp8moe;
using namespace fp8moe::test;

namespace {

// Compares every section of the buffer; returns nothing but a passed test.
void expect_plan(const OwnedPlan& p, const std::vector<int>& topk) {
  const RoutingPlan& plan = p;
  std::vector<int> token_of_row(plan.rows(), -1), slot_of_row(plan.rows(), -1);
  std::vector<int> row_of(topk.size(), -1);
  int64_t row = 0, column = 0, rank = 0, dropped = 0;
  for (int64_t e = 0; e < plan.experts; ++e) {
    CHECK(plan.row_offsets()[e] == row && plan.col_offsets()[e] == column);
    int64_t count = 0;
    for (int64_t i = 0; i < static_cast<int64_t>(topk.size()); ++i) {
      if (topk[i] != e) continue;
      if (rank++ >= plan.capacity) {
        ++dropped;
        continue;
      }
      row_of[i] = static_cast<int>(row + count);
      token_of_row[row + count] = static_cast<int>(i / plan.slots);
      slot_of_row[row + count] = static_cast<int>(i % plan.slots);
      ++count;
    }
    CHECK(plan.tokens_per_expert()[e] == count);
    row += round_up(count, plan.align);
    column += round_up(count, kTile);
  }
  CHECK(row <= plan.rows() && column <= plan.columns());
  CHECK(plan.row_offsets()[plan.experts] == row && plan.col_offsets()[plan.experts] == column);
  CHECK(plan.status()[kOverflow] == dropped);
  for (int i = 1; i < RoutingPlan::kStatusWords; ++i) CHECK(plan.status()[i] == 0);
  CHECK(std::equal(row_of.begin(), row_of.end(), plan.row_of()));
  CHECK(std::equal(token_of_row.begin(), token_of_row.begin() + row, plan.token_of_row()));
  CHECK(std::equal(slot_of_row.begin(), slot_of_row.begin() + row, plan.slot_of_row()));
}

void topk_plans() {
  Random random(3);
  for (int64_t align : {1, 16, 32, 128}) {
    const std::vector<int> topk = random_topk(70 * 3, 5, random);
    expect_plan(routed(70, 3, 5, align, topk), topk);
    expect_plan(routed(70, 3, 5, align, topk, 100), topk);  // overflow
    expect_plan(routed(0, 2, 4, align, {}), {});
    expect_plan(routed(3, 1, 4, align, {2, 2, 2}), {2, 2, 2});
    expect_plan(routed(2, 2, 1, align, {0, 0, -1, 0}), {0, 0, -1, 0});  // an expert named twice
  }
}

// Who allocates by a plan's sizes alone asks before there is memory.
void workspaces_of_sizes() {
  const RoutingPlan plan{{}, 70, 3, 5, 1, 210}, travel{{}, 70, 3, 3, 1, 210};
  CHECK(workspace_bytes(Route{.plan = plan}) == 0);  // on the CPU
  CHECK(workspace_bytes(DispatchPlan{.plan = travel}) == 0);
  CHECK_INVALID("[route] plan needs", workspace_bytes(Route{.plan = {{}, 70, 0, 5, 1, 210}}));
  CHECK_INVALID("[dispatch_plan] plan must have slots",
                workspace_bytes(DispatchPlan{.plan = plan}));
}

void routing_maps() {
  const int64_t tokens = 9, experts = 4;
  Random random(4);
  Owned map(DType::boolean, {tokens, experts});
  std::vector<int> topk(tokens * experts);  // slot e is expert e
  int64_t assignments = 0;
  for (size_t i = 0; i < topk.size(); ++i) {
    const bool named = random() % 2 != 0 && i % experts != 1;
    map.as<uint8_t>()[i] = named;
    topk[i] = named ? static_cast<int>(i % experts) : -1;
    assignments += named;
  }
  const OwnedPlan plan = empty_plan(tokens, experts, experts, 16, assignments);
  run_route(plan, {}, map);
  expect_plan(plan, topk);
}

void counted_plans() {
  // Row i of the packed groups is token i, slot 0.
  const std::vector<int> counts = {3, 0, 130, 1};
  std::vector<int> topk(140, -1);
  size_t i = 0;
  for (int e = 0; e < 4; ++e)
    for (int c = 0; c < counts[e]; ++c) topk[i++] = e;
  for (int64_t align : {1, 128}) expect_plan(from_counts(counts, 140, align), topk);
  expect_plan(from_counts({0}, 0, 1), {});
}

void row_id_maps() {
  // Token 0 has experts 1 and 0, token 1 none, token 2 expert 1; expert 1's rows lie two further
  // on.
  const Owned map = int32s({3, 5}, {1, 0, 1, 0, 2, 9, 9, 9, 9, 0, 2, 9, 1, 9, 1});
  const Owned pads(DType::i64, {2});
  pads.as<int64_t>()[0] = 0;
  pads.as<int64_t>()[1] = 2;
  const OwnedPlan plan = empty_plan(3, 2, 1, 1, 6);
  plan_from_row_id_map({.row_id_map = map, .pad_offsets = pads, .plan = plan});
  const std::vector<int> token = {0, -1, -1, 0, 2, -1}, slot = {0, -1, -1, 1, 1, -1};
  CHECK(std::equal(token.begin(), token.end(), plan->token_of_row()));
  CHECK(std::equal(slot.begin(), slot.end(), plan->slot_of_row()));
  const std::vector<int> rows = {0, 3, -1, -1, -1, 4};
  CHECK(std::equal(rows.begin(), rows.end(), plan->row_of()));
  plan_from_row_id_map({.row_id_map = int32s({6}, {0, -1, -1, 3, -1, 4}), .plan = plan});
  CHECK(std::equal(token.begin(), token.end(), plan->token_of_row()));
  CHECK_INVALID(
      "must name a row once",
      plan_from_row_id_map({.row_id_map = int32s({6}, {0, 0, 1, 2, 3, 4}), .plan = plan}));
  CHECK(std::equal(token.begin(), token.end(), plan->token_of_row()));
}

void bad_arguments() {
  const OwnedPlan plan = empty_plan(2, 2, 3, 1, 4);
  const std::vector<uint8_t> before = plan.buffer.copy();
  const Owned good = int32s({2, 2}, {0, 1, 2, -1});
  CHECK_INVALID("[route]", run_route(plan, int32s({2, 2}, {0, -2, 1, 0}), {}));
  CHECK_INVALID("[route]", run_route(plan, {}, {}));
  CHECK(plan.buffer.copy() == before);
  for (int64_t align : {0, 2, 64}) {
    RoutingPlan odd = plan;
    odd.align = align;
    const Owned workspace(DType::u8, {4096});
    CHECK_INVALID("align must be 1, 16, 32 or 128",
                  route({.topk_idx = good, .plan = odd, .workspace = workspace}));
  }
  const OwnedPlan counted = empty_plan(4, 1, 3, 1, 4);
  CHECK_INVALID("[plan_from_counts]",
                plan_from_counts({.tokens_per_expert = int32s({3}, {1, -1, 2}), .plan = counted}));
}

}  // namespace

int main() {
  topk_plans();
  workspaces_of_sizes();
  routing_maps();
  counted_plans();
  row_id_maps();
  bad_arguments();
}
