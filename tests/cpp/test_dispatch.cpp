// dispatch_plan, quantize_pack and unpack against loops over the tokens; the rows of the wire read
// in place by permute_pad and permute_transpose_fp8; rows stored at and read from ranks, and their
// meetings.
#include <thread>

#include "check.h"

using namespace fp8moe;
using namespace fp8moe::test;

namespace {

struct Problem {
  int64_t tokens, slots, ranks, each, segment;
  std::vector<int> topk;  // [T, S]

  int64_t experts() const { return ranks * each; }
  int64_t capacity() const {
    return segment > 0 ? segment * ranks : tokens * std::min(slots, ranks);
  }
  bool travels(int64_t t, int64_t r) const {
    for (int64_t s = 0; s < slots; ++s) {
      const int id = topk[t * slots + s];
      if (id >= 0 && id / each == r) return true;
    }
    return false;
  }
};

struct Dispatched {
  OwnedPlan plan;
  Owned counts;
};

Dispatched dispatched(const Problem& p, bool wide) {
  Dispatched d{empty_plan(p.tokens, p.ranks, p.ranks, 1, p.capacity()),
               Owned(DType::i32, {p.ranks, 2})};
  Owned workspace(DType::u8, {workspace_bytes(DispatchPlan{.plan = d.plan})});
  Owned ids(wide ? DType::i64 : DType::i32, {p.tokens, p.slots});
  for (size_t i = 0; i < p.topk.size(); ++i)
    wide ? void(ids.as<int64_t>()[i] = p.topk[i]) : void(ids.as<int32_t>()[i] = p.topk[i]);
  dispatch_plan({.topk_idx = ids,
                 .num_experts = p.experts(),
                 .segment = p.segment,
                 .plan = d.plan,
                 .counts = d.counts,
                 .workspace = workspace});
  return d;
}

// Every row of every rank, in order.
void expect_plan(const Problem& p, const Dispatched& d) {
  const RoutingPlan& plan = d.plan;
  int64_t end = 0, dropped = 0;
  for (int64_t r = 0; r < p.ranks; ++r) {
    const int64_t first = p.segment > 0 ? r * p.segment : end;
    int64_t row = first, entries = 0;
    CHECK(plan.row_offsets()[r] == first);
    for (int64_t t = 0; t < p.tokens; ++t) {
      const int at = plan.row_of()[t * p.ranks + r];
      if (!p.travels(t, r)) {
        CHECK(at == -1);
      } else if (p.segment > 0 && row == first + p.segment) {
        CHECK(at == -1);
        ++dropped;
      } else {
        CHECK(at == row && plan.token_of_row()[row] == t && plan.slot_of_row()[row] == r);
        for (int64_t s = 0; s < p.slots; ++s)
          entries += p.topk[t * p.slots + s] >= 0 && p.topk[t * p.slots + s] / p.each == r;
        ++row;
      }
    }
    CHECK(plan.tokens_per_expert()[r] == row - first);
    CHECK(d.counts.as<int32_t>()[2 * r] == row - first);
    CHECK(d.counts.as<int32_t>()[2 * r + 1] == entries);
    for (; p.segment > 0 && row < first + p.segment; ++row)
      CHECK(plan.token_of_row()[row] == -1 && plan.slot_of_row()[row] == -1);
    end = row;
  }
  CHECK(plan.row_offsets()[p.ranks] == end);
  CHECK(plan.status()[kOverflow] == dropped);
  for (int i = 1; i < RoutingPlan::kStatusWords; ++i) CHECK(plan.status()[i] == 0);
}

// A row of the wire, from the parts: codes and scales of `q`, ids of the rank, probs, zeros.
std::vector<uint8_t> wire_row(const Problem& p, const OwnedFp8& q, const Owned* probs, int64_t t,
                              int64_t r) {
  std::vector<uint8_t> row;
  const auto append = [&](const void* from, size_t bytes) {
    const auto* byte = static_cast<const uint8_t*>(from);
    row.insert(row.end(), byte, byte + bytes);
  };
  const auto width = static_cast<size_t>(q.depth());
  const auto tiles = static_cast<size_t>(q.scale.view.shape[1]);
  append(q.data.as<uint8_t>() + t * q.depth(), width);
  append(q.scale.as<float>() + t * q.scale.view.shape[1], tiles * 4);
  for (int part = 0; probs != nullptr && part < 2; ++part)
    for (int64_t s = 0; s < p.slots; ++s) {
      const int id = p.topk[t * p.slots + s];
      const bool here = id >= 0 && id / p.each == r;
      const int local = here ? static_cast<int>(id - r * p.each) : -1;
      const float prob = here ? probs->as<float>()[t * p.slots + s] : 0.0f;
      append(part == 0 ? static_cast<const void*>(&local) : &prob, 4);
    }
  row.resize(static_cast<size_t>(round_up(static_cast<int64_t>(row.size()), 16)), 0);
  return row;
}

void expect_wire(const Problem& p, const Dispatched& d, int64_t hidden, DType dtype, DType fp8,
                 Random& random) {
  Owned x(dtype, {p.tokens, hidden}), probs(DType::f32, {p.tokens, p.slots});
  fill_normal(x, random);
  fill_normal(probs, random);
  const OwnedFp8 q(fp8, p.tokens, hidden, ScaleLayout::row);
  quantize({.x = x, .q = q});
  const RoutingPlan& plan = d.plan;
  for (const bool ids : {true, false}) {
    const int64_t bytes = packed_row_bytes(hidden, ids ? p.slots : 0);
    Owned packed(DType::u8, {plan.rows(), bytes});
    quantize_pack({.x = x,
                   .topk_idx = ids ? Tensor(int32s({p.tokens, p.slots}, p.topk)) : Tensor(),
                   .probs = ids ? Tensor(probs) : Tensor(),
                   .num_experts = p.experts(),
                   .plan = plan,
                   .packed = packed,
                   .fp8_dtype = fp8});
    for (int64_t t = 0; t < p.tokens; ++t)
      for (int64_t r = 0; r < p.ranks; ++r) {
        const int64_t row = plan.row_of()[t * p.ranks + r];
        if (row < 0) continue;
        const std::vector<uint8_t> want = wire_row(p, q, ids ? &probs : nullptr, t, r);
        CHECK(static_cast<int64_t>(want.size()) == bytes);
        CHECK(std::memcmp(packed.as<uint8_t>() + row * bytes, want.data(), want.size()) == 0);
      }
    if (!ids) continue;
    Owned local(DType::i32, {plan.rows(), p.slots}), weights(DType::f32, {plan.rows(), p.slots});
    unpack({.packed = packed,
            .hidden = hidden,
            .slots = p.slots,
            .topk_idx = local,
            .probs = weights});
    for (int64_t row = 0; row < plan.row_offsets()[p.ranks]; ++row)
      for (int64_t s = 0; plan.token_of_row()[row] < 0 && s < p.slots; ++s)
        CHECK(local.as<int32_t>()[row * p.slots + s] == -1 && weights.at(row * p.slots + s) == 0.0);
  }
}

void problems() {
  Random random(8);
  for (int64_t ranks : {1, 2, 3, 8})
    for (int64_t segment : {0, 1, 7, 100})
      for (int64_t tokens : {0, 1, 23}) {
        Problem p{tokens, 3, ranks, 2, segment, random_topk(tokens * 3, ranks * 2, random)};
        if (tokens > 1) p.topk[5] = p.topk[4] = p.topk[3];  // an expert named thrice
        const Dispatched d = dispatched(p, ranks % 2 == 0);
        expect_plan(p, d);
        for (int64_t hidden : {16, 272})
          expect_wire(p, d, hidden, ranks == 2 ? DType::bf16 : DType::f32,
                      segment == 7 ? DType::e5m2 : DType::e4m3, random);
      }
  Problem none{5, 2, 3, 4, 0, std::vector<int>(10, -1)};
  expect_plan(none, dispatched(none, false));
  Problem one{5, 2, 3, 4, 2, std::vector<int>(10, 11)};
  expect_plan(one, dispatched(one, true));
}

// Rows stored at each rank are those packed for it, and a sum over them where they lie is that over
// the packed rows.
void rows_at_ranks() {
  Random random(10);
  const int64_t tokens = 23, hidden = 48, bytes = packed_row_bytes(hidden, 0);
  for (const int64_t segment : {0, 9}) {
    const Problem p{tokens, 3, 4, 2, segment, random_topk(tokens * 3, 8, random)};
    const Dispatched d = dispatched(p, false);
    const RoutingPlan& plan = d.plan;
    Owned x(DType::f32, {tokens, hidden}), packed(DType::u8, {plan.rows(), bytes});
    fill_normal(x, random);
    quantize_pack({.x = x, .plan = plan, .packed = packed});
    for (const int64_t most : {tokens, int64_t{3}}) {
      std::vector<Owned> there;
      Owned peers(DType::i64, {p.ranks});
      for (int64_t r = 0; r < p.ranks; ++r) {
        there.emplace_back(DType::u8, std::initializer_list<int64_t>{most, bytes});
        peers.as<int64_t>()[r] = reinterpret_cast<int64_t>(there[r].as<uint8_t>());
      }
      quantize_pack({.x = x, .plan = plan, .peers = peers, .packed = there[2]});
      for (int64_t r = 0; r < p.ranks; ++r)
        for (int64_t i = 0; i < std::min<int64_t>(most, plan.tokens_per_expert()[r]); ++i)
          CHECK(std::memcmp(there[r].as<uint8_t>() + i * bytes,
                            packed.as<uint8_t>() + (plan.row_offsets()[r] + i) * bytes,
                            static_cast<size_t>(bytes)) == 0);
    }
    Owned rows(DType::f32, {plan.rows(), hidden}), want(DType::f32, {tokens, hidden});
    Owned got(DType::f32, {tokens, hidden}), peers(DType::i64, {p.ranks});
    Owned first(DType::i32, {p.ranks});
    fill_normal(rows, random);
    unpermute_unpad({.y = rows, .plan = plan, .out = want});
    for (int64_t r = 0; r < p.ranks; ++r) {  // all of them lie here
      peers.as<int64_t>()[r] = reinterpret_cast<int64_t>(rows.as<float>());
      first.as<int32_t>()[r] = plan.row_offsets()[r];
    }
    unpermute_unpad({.y = rows, .plan = plan, .peers = peers, .first = first, .out = got});
    CHECK(std::memcmp(got.as<float>(), want.as<float>(),
                      static_cast<size_t>(tokens * hidden * 4)) == 0);
  }
}

void meetings() {
  constexpr int64_t kRanks = 3, kWords = 2;
  std::vector<Owned> mailboxes;
  Owned peers(DType::i64, {kRanks});
  for (int64_t r = 0; r < kRanks; ++r) {
    mailboxes.emplace_back(DType::i32, std::initializer_list<int64_t>{2, kRanks, 4});
    std::memset(mailboxes[r].as<int32_t>(), 0, 2 * kRanks * 4 * sizeof(int32_t));
    peers.as<int64_t>()[r] = reinterpret_cast<int64_t>(mailboxes[r].as<int32_t>());
  }
  const auto rank = [&](int64_t r, int64_t calls_to_make) {
    Owned calls = int32s({1}, {0}), ended = int32s({1}, {0}), late = int32s({kRanks}, {0, 0, 0});
    for (int i = 0; i <= calls_to_make; ++i) {
      const bool last = i == calls_to_make;  // to which rank 1 does not come
      if (last && r == 1) return;
      const Owned words = int32s({kWords}, {static_cast<int>(r), i});
      Owned told(DType::i32, {kRanks, kWords});
      share_words({.words = words,
                   .peers = peers,
                   .mailbox = mailboxes[r],
                   .calls = calls,
                   .ended = ended,
                   .late = late,
                   .rank = r,
                   .timeout_ms = last ? 100 : 60000,
                   .told = told});
      for (int64_t s = 0; s < kRanks; ++s) {
        const bool came = !last || s != 1;
        CHECK(told.as<int32_t>()[2 * s] == (came ? s : 0));
        CHECK(told.as<int32_t>()[2 * s + 1] == (came ? i : 0));
        CHECK(late.as<int32_t>()[s] == (came ? 0 : 1));
      }
      CHECK(ended.as<int32_t>()[0] == (last ? 1 : 0));
    }
  };
  std::vector<std::thread> threads;
  for (int64_t r = 0; r < kRanks; ++r) threads.emplace_back(rank, r, 40);
  for (std::thread& t : threads) t.join();
}

// Ranks may meet without a word to say: then words and told have no memory.
void a_meeting_without_words() {
  const Owned mailbox = int32s({2, 1, 4}, {0, 0, 0, 0, 0, 0, 0, 0});
  Owned peers(DType::i64, {1});
  peers.as<int64_t>()[0] = reinterpret_cast<int64_t>(mailbox.as<int32_t>());
  Owned calls = int32s({1}, {0}), ended = int32s({1}, {0}), late = int32s({1}, {0});
  share_words({.words = Tensor(nullptr, DType::i32, {0}),
               .peers = peers,
               .mailbox = mailbox,
               .calls = calls,
               .ended = ended,
               .late = late,
               .told = Tensor(nullptr, DType::i32, {1, 0})});
  CHECK(calls.as<int32_t>()[0] == 1);
  CHECK(ended.as<int32_t>()[0] == 0);
}

// Rows that lie apart give what dense rows give. The memory ends with the last row.
void strided_rows() {
  Random random(9);
  const int64_t tokens = 37, width = 144, tiles = 2;
  const OwnedFp8 q(DType::e4m3, tokens, width, ScaleLayout::row);
  fill_random(q, random);
  const int64_t stride = width + 16;
  Owned memory(DType::u8, {tokens * stride - 8});
  for (int64_t t = 0; t < tokens; ++t) {
    std::memcpy(memory.as<uint8_t>() + t * stride, q.data.as<uint8_t>() + t * width, width);
    std::memcpy(memory.as<uint8_t>() + t * stride + width, q.scale.as<float>() + t * tiles, 8);
  }
  Fp8Tensor apart{Tensor(memory.as<uint8_t>(), DType::e4m3, {tokens, width}),
                  Tensor(memory.as<uint8_t>() + width, DType::f32, {tokens, tiles}),
                  ScaleLayout::row};
  apart.data.row_stride = stride;
  apart.scale_inv.row_stride = stride / 4;

  const OwnedPlan plan = routed(tokens, 2, 3, 16, random_topk(tokens * 2, 3, random));
  for (const ScaleLayout layout : {ScaleLayout::row, ScaleLayout::gemm}) {
    const OwnedFp8 want(DType::e4m3, plan->rows(), width, layout);
    const OwnedFp8 got(DType::e4m3, plan->rows(), width, layout);
    permute_pad({.x = q, .plan = plan, .y = want});
    permute_pad({.x = apart, .plan = plan, .y = got});
    CHECK(got.data.same(want.data) && got.scale.same(want.scale));
  }
  for (const ScaleLayout layout : {ScaleLayout::block, ScaleLayout::gemm}) {
    const OwnedFp8 want(DType::e4m3, width, plan->columns(), layout);
    const OwnedFp8 got(DType::e4m3, width, plan->columns(), layout);
    permute_transpose_fp8({.q = q, .plan = plan, .columns = want});
    permute_transpose_fp8({.q = apart, .plan = plan, .columns = got});
    CHECK(got.data.same(want.data) && got.scale.same(want.scale));
  }

  const OwnedFp8 y(DType::e4m3, plan->rows(), width, ScaleLayout::row);
  Owned values(DType::f32, {tokens, width});
  CHECK_INVALID("[dequantize] q must be contiguous", dequantize({.q = apart, .x = values}));
  Fp8Tensor wrong = apart;
  wrong.data.row_stride = width - 16;
  CHECK_INVALID("x must have rows 144 to 2^31 - 1 elements apart, a multiple of 16; got 128",
                permute_pad({.x = wrong, .plan = plan, .y = y}));
  wrong.data.row_stride = width + 8;
  CHECK_INVALID("a multiple of 16; got 152",
                permute_transpose_fp8({.q = wrong, .plan = plan, .columns = y}));
  wrong = apart;
  wrong.scale_inv.row_stride = 1;
  CHECK_INVALID("x.scale_inv must have rows 2 to", permute_pad({.x = wrong, .plan = plan, .y = y}));
  const Owned room(DType::u8, {tokens * stride + plan->rows() * width});
  Fp8Tensor last = y;  // an output that begins where the last row does
  apart.data.data = room.as<uint8_t>();
  apart.scale_inv.data = room.as<uint8_t>() + width;
  last.data.data = room.as<uint8_t>() + (tokens - 1) * stride;
  CHECK_INVALID("y and x must not share memory",
                permute_pad({.x = apart, .plan = plan, .y = last}));
}

void refusals() {
  const Problem p{4, 2, 2, 3, 0, {0, 5, -1, 2, 3, 3, 1, 4}};
  const Dispatched d = dispatched(p, false);
  const RoutingPlan& plan = d.plan;
  const std::vector<uint8_t> buffer = d.plan.buffer.copy();
  const Tensor none;
  for (const int bad : {6, -2, 0x7FFFFFFF})
    CHECK_INVALID("topk_idx must lie in [-1, 6)",
                  dispatch_plan({.topk_idx = int32s({4, 2}, {0, 5, -1, 2, 3, bad, 1, 4}),
                                 .num_experts = 6,
                                 .segment = 0,
                                 .plan = plan,
                                 .counts = d.counts,
                                 .workspace = none}));
  const Owned ids = int32s({4, 2}, p.topk);
  CHECK_INVALID("counts must be", dispatch_plan({.topk_idx = ids,
                                                 .num_experts = 6,
                                                 .segment = 0,
                                                 .plan = plan,
                                                 .counts = ids,
                                                 .workspace = none}));
  CHECK_INVALID("slots == experts", dispatch_plan({.topk_idx = ids,
                                                   .num_experts = 6,
                                                   .segment = 0,
                                                   .plan = empty_plan(4, 1, 2, 1, 8),
                                                   .counts = d.counts,
                                                   .workspace = none}));
  CHECK(d.plan.buffer.copy() == buffer);

  const Owned x(DType::f32, {4, 32}), probs(DType::f32, {4, 2});
  const Owned packed(DType::u8, {8, packed_row_bytes(32, 2)});
  CHECK_INVALID("given together", quantize_pack({.x = x,
                                                 .topk_idx = ids,
                                                 .num_experts = 6,
                                                 .plan = plan,
                                                 .packed = packed,
                                                 .fp8_dtype = DType::e4m3}));
  const OwnedPlan unfilled = empty_plan(4, 2, 2, 1, 8);
  CHECK_INVALID("plan must be filled", quantize_pack({.x = x,
                                                      .topk_idx = ids,
                                                      .probs = probs,
                                                      .num_experts = 6,
                                                      .plan = unfilled,
                                                      .packed = packed,
                                                      .fp8_dtype = DType::e4m3}));
  for (size_t i = 0; i < packed.size(); ++i) CHECK(packed.as<uint8_t>()[i] == 0xA5);
  CHECK_INVALID("[unpack]", unpack({.packed = packed,
                                    .hidden = 48,
                                    .slots = 2,
                                    .topk_idx = Owned(DType::i32, {8, 2}),
                                    .probs = probs}));
}

}  // namespace

int main() {
  problems();
  rows_at_ranks();
  meetings();
  a_meeting_without_words();
  strided_rows();
  refusals();
}
