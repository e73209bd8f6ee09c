// dispatch_plan, quantize_pack, unpack, share_words, copy_rows: what they take.
#include "common/backends.h"
#include "common/check.h"

namespace fp8moe {

namespace {

// slots and experts both stand for the ranks.
void check_ranks(const Checker& check, const RoutingPlan& plan) {
  FP8MOE_CHECK(plan.slots == plan.experts && plan.align == 1, "[", check.op(),
               "] plan must have slots == experts (the ranks) and align 1; got ", plan.slots, ", ",
               plan.experts, " and ", plan.align);
}

}  // namespace

int64_t workspace_bytes(const DispatchPlan& p) {
  const Checker check("dispatch_plan", p.plan.buffer.device);
  check.plan_sizes(p.plan);
  check_ranks(check, p.plan);
  return dispatch_workspace(p, p.plan.buffer.device);
}

void outputs(DispatchPlan& p) {
  constexpr int64_t kMaxInt = 0x7FFFFFFF;
  const Checker check("dispatch_plan", p.topk_idx.device);
  check.ndim(p.topk_idx, "topk_idx", 2);
  if (p.plan.buffer.is_wanted()) {
    p.plan.tokens = p.topk_idx.shape[0];
    if (p.plan.capacity < 0)
      p.plan.capacity = p.plan.tokens * std::min(p.topk_idx.shape[1], p.plan.experts);
  }
  check.output(p.plan);
  check_ranks(check, p.plan);
  check.tensor(p.topk_idx, "topk_idx", {p.plan.tokens, p.topk_idx.shape[1]},
               {DType::i32, DType::i64});
  FP8MOE_CHECK(p.topk_idx.numel() <= kMaxInt,
               "[dispatch_plan] topk_idx must have less than 2^31 entries; got ",
               p.topk_idx.numel());
  FP8MOE_CHECK(
      p.num_experts >= 1 && p.num_experts <= kMaxInt && p.num_experts % p.plan.experts == 0,
      "[dispatch_plan] num_experts must be a positive multiple of the ranks (", p.plan.experts,
      "); got ", p.num_experts);
  FP8MOE_CHECK(p.segment == 0 || (p.segment > 0 && p.plan.capacity % p.plan.experts == 0 &&
                                  p.segment <= p.plan.capacity / p.plan.experts),
               "[dispatch_plan] segment must be 0 or at most plan.capacity / ranks (",
               p.plan.capacity, " / ", p.plan.experts, ", a whole number); got ", p.segment);
  check.output(p.counts, "counts", {p.plan.experts, 2}, {DType::i32});
  if (p.dropped.defined() || p.dropped.is_wanted()) {
    check.tensor(p.dropped, "dropped", {3}, {DType::i64});
  }
}

void dispatch_plan(const DispatchPlan& given, Stream stream) {
  const DispatchPlan p = checked(given);
  const Checker check("dispatch_plan", p.topk_idx.device);
  check.workspace(p.workspace, workspace_bytes(p));
  check.disjoint({{p.plan.buffer, "plan"},
                  {p.counts, "counts"},
                  {p.dropped, "dropped"},
                  {p.workspace, "workspace"}},
                 {{p.topk_idx, "topk_idx"}});
  dispatch(p, p.plan.buffer.device, stream);
}

void outputs(QuantizePack& p) {
  constexpr int64_t kMaxInt = 0x7FFFFFFF;
  const Checker check("quantize_pack", p.x.device);
  check.plan(p.plan);
  FP8MOE_CHECK(p.plan.slots == p.plan.experts,
               "[quantize_pack] plan must be dispatch_plan's, slots == experts (the ranks); got ",
               p.plan.slots, " and ", p.plan.experts);
  const int64_t hidden = check.values(p.x, "x", p.plan.tokens);
  FP8MOE_CHECK(is_fp8(p.fp8_dtype),
               "[quantize_pack] fp8_dtype must be float8_e4m3fn or float8_e5m2; got ",
               name_of(p.fp8_dtype));
  FP8MOE_CHECK(p.topk_idx.defined() == p.probs.defined(),
               "[quantize_pack] topk_idx and probs are given together; got only ",
               p.topk_idx.defined() ? "topk_idx" : "probs");
  int64_t slots = 0;
  if (p.topk_idx.defined()) {
    check.ndim(p.topk_idx, "topk_idx", 2);
    slots = p.topk_idx.shape[1];
    check.tensor(p.topk_idx, "topk_idx", {p.plan.tokens, slots}, {DType::i32, DType::i64});
    check.tensor(p.probs, "probs", {p.plan.tokens, slots}, {DType::f32});
    FP8MOE_CHECK(
        p.num_experts >= 1 && p.num_experts <= kMaxInt && p.num_experts % p.plan.experts == 0,
        "[quantize_pack] num_experts must be a positive multiple of the ranks (", p.plan.experts,
        "); got ", p.num_experts);
  }
  const int64_t bytes = packed_row_bytes(hidden, slots);
  int64_t rows = p.plan.rows();
  if (p.peers.defined()) {
    check.tensor(p.peers, "peers", {p.plan.experts}, {DType::i64});
    FP8MOE_CHECK(!p.packed.is_wanted(),
                 "[quantize_pack] peers need packed, what this rank's points at; got none");
    check.ndim(p.packed, "packed", 2);
    rows = p.packed.shape[0];
  }
  FP8MOE_CHECK(p.peers.defined() || !p.first.defined(),
               "[quantize_pack] first needs peers; got none");
  if (p.first.defined()) check_first(p.op, p.first, p.plan.slots);
  check.output(p.packed, "packed", {rows, bytes}, {DType::u8}, true);
  check.rule(p.rule);
}

void quantize_pack(const QuantizePack& given, Stream stream) {
  const QuantizePack p = checked(given);
  const Checker check("quantize_pack", p.x.device);
  check.disjoint({{p.packed, "packed"}}, {{p.x, "x"},
                                          {p.topk_idx, "topk_idx"},
                                          {p.probs, "probs"},
                                          {p.plan.buffer, "plan"},
                                          {p.peers, "peers"},
                                          {p.first, "first"}});
  if (p.packed.numel() == 0) return;
  dispatch(p, p.x.device, stream);
}

void outputs(Unpack& p) {
  constexpr int64_t kMaxInt = 0x7FFFFFFF;
  const Checker check("unpack", p.packed.device);
  check.ndim(p.packed, "packed", 2);
  const int64_t rows = p.packed.shape[0];
  const int64_t slots = p.slots;
  FP8MOE_CHECK(p.hidden >= 0 && p.hidden <= kMaxInt,
               "[unpack] hidden must not be negative or over 2^31 - 1; got ", p.hidden);
  check.multiple(p.hidden, "hidden", 16);
  check.tensor(p.packed, "packed", {rows, packed_row_bytes(p.hidden, slots)}, {DType::u8});
  check.aligned(p.packed, "packed");
  check.output(p.topk_idx, "topk_idx", {rows, slots}, {DType::i32});
  check.output(p.probs, "probs", {rows, slots}, {DType::f32});
}

void unpack(const Unpack& given, Stream stream) {
  const Unpack p = checked(given);
  const Checker check("unpack", p.packed.device);
  check.disjoint({{p.topk_idx, "topk_idx"}, {p.probs, "probs"}}, {{p.packed, "packed"}});
  if (p.topk_idx.numel() == 0) return;
  dispatch(p, p.packed.device, stream);
}

void outputs(ShareWords& p) {
  const Checker check("share_words", p.words.device);
  check.ndim(p.words, "words", 1);
  check.dtype(p.words, "words", {DType::i32});
  check.ndim(p.peers, "peers", 1);
  const int64_t ranks = p.peers.numel();
  check.tensor(p.words, "words", {p.words.numel()});
  if (p.more.defined()) {
    check.ndim(p.more, "more", 2);
    check.tensor(p.more, "more", {p.more.shape[0], p.more.shape[1]}, {DType::i32});
  }
  const int64_t words = p.count();
  check.tensor(p.peers, "peers", {ranks}, {DType::i64});
  check.ndim(p.mailbox, "mailbox", 3);
  check.tensor(p.mailbox, "mailbox", {2, ranks, p.mailbox.shape[2]}, {DType::i32});
  FP8MOE_CHECK(p.mailbox.shape[2] > words,
               "[share_words] mailbox must have room for more than the ", words, " words; got ",
               p.mailbox.shape[2]);
  check.tensor(p.calls, "calls", {1}, {DType::i32});
  check.tensor(p.ended, "ended", {1}, {DType::i32});
  const auto either = [&](const Tensor& t) {  // on the device or on the host
    const bool on_host = !t.is_wanted() && t.device.type == DeviceType::cpu;
    return Checker("share_words", on_host ? t.device : p.words.device);
  };
  either(p.late).tensor(p.late, "late", {ranks}, {DType::i32});
  FP8MOE_CHECK(p.rank >= 0 && p.rank < ranks, "[share_words] rank must lie in [0, ", ranks,
               "); got ", p.rank);
  FP8MOE_CHECK(p.timeout_ms >= 0 && p.timeout_ms <= 1'000'000'000,
               "[share_words] timeout_ms must lie in [0, 10^9]; got ", p.timeout_ms);
  either(p.told).output(p.told, "told", {ranks, words}, {DType::i32});
}

void share_words(const ShareWords& given, Stream stream) {
  const ShareWords p = checked(given);
  const Checker check("share_words", p.words.device);
  check.disjoint({{p.told, "told"},
                  {p.mailbox, "mailbox"},
                  {p.calls, "calls"},
                  {p.ended, "ended"},
                  {p.late, "late"}},
                 {{p.words, "words"}, {p.more, "more"}, {p.peers, "peers"}});
  dispatch(p, p.words.device, stream);
}

void outputs(CopyRows& p) {
  const Checker check("copy_rows", p.out.device);
  check.ndim(p.out, "out", 2);
  check.tensor(p.out, "out", {p.out.shape[0], p.out.shape[1]},
               {DType::f32, DType::f16, DType::bf16, DType::i32, DType::u8});
  const Checker host("copy_rows", Device{DeviceType::cpu, 0});
  host.ndim(p.places, "places", 2);
  host.tensor(p.places, "places", {p.places.shape[0], 3}, {DType::i64});
}

void copy_rows(const CopyRows& given, Stream stream) {
  const CopyRows p = checked(given);
  const Checker check("copy_rows", p.out.device);
  check.disjoint({{p.out, "out"}}, {{p.places, "places"}});
  const int64_t rows = p.out.shape[0];
  int64_t sum = 0;
  for (int64_t i = 0; i < p.places.shape[0]; ++i) {
    const auto* place = p.places.as<const int64_t>() + 3 * i;
    FP8MOE_CHECK(place[1] >= 0 && place[2] >= 0 && place[1] <= rows - place[2],
                 "[copy_rows] places must lie within the ", rows, " rows of out; got ", place[1],
                 " from row ", place[2], " on in place ", i);
    sum += place[1];
  }
  FP8MOE_CHECK(sum == rows, "[copy_rows] places must have the ", rows, " rows of out; got ", sum);
  if (p.out.numel() == 0) return;
  dispatch(p, p.out.device, stream);
}

}  // namespace fp8moe
