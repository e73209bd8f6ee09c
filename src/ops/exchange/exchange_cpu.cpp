// dispatch_plan, quantize_pack, unpack, share_words, copy_rows on the CPU: their definition.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "common/backends.h"
#include "common/check.h"
#include "common/dispatch.h"
#include "cpu/multiversion.h"
#include "cpu/plan_check.h"
#include "cpu/plan_layout.h"
#include "cpu/tile.h"
#include "ops/exchange/wire.h"

namespace fp8moe::cpu {

// ---- dispatch_plan ------------------------------------------------------------------------------
// dispatch_plan: the tokens of each rank, in order. Chunks of tokens are counted in parallel, laid
// out, then placed in parallel; the result does not depend on how the tokens were cut.

namespace {

constexpr int64_t kChunk = 1024;  // tokens

template <typename Id>
void plan_ranks(const Tensor& topk_idx, int64_t num_experts, int64_t segment,
                const RoutingPlan& plan, const Tensor& counts_out) {
  const Id* ids = topk_idx.as<const Id>();
  const int64_t slots = topk_idx.shape[1];
  const int64_t ranks = plan.experts;
  const int64_t experts_a_rank = num_experts / ranks;
  const int64_t chunks = cdiv(plan.tokens, kChunk);
  const auto last = [&](int64_t chunk) { return std::min((chunk + 1) * kChunk, plan.tokens); };
  const auto zeros = std::vector<int64_t>(static_cast<size_t>(ranks), 0);

  std::vector<std::vector<int64_t>> counts(chunks);  // tokens of each rank
  std::vector<int64_t> first_bad(chunks, -1);
#pragma omp parallel for schedule(static)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    std::vector<int64_t> count = zeros;
    std::vector<int64_t> seen(ranks, -1);  // the last token counted for a rank
    for (int64_t t = chunk * kChunk; t < last(chunk); ++t)
      for (int64_t s = 0; s < slots; ++s) {
        const int64_t id = ids[t * slots + s];
        if ((id < -1 || id >= num_experts) && first_bad[chunk] < 0)
          first_bad[chunk] = t * slots + s;
        if (id < 0 || id >= num_experts) continue;
        const int64_t rank = id / experts_a_rank;
        if (seen[rank] == t) continue;
        seen[rank] = t;
        ++count[rank];
      }
    counts[chunk] = std::move(count);
  }
  for (int64_t bad : first_bad)
    FP8MOE_CHECK(bad < 0, "[dispatch_plan] topk_idx must lie in [-1, ", num_experts, "); got ",
                 ids[bad], " at token ", bad / slots, ", slot ", bad % slots);

  // counts[chunk][r] becomes how many of r's tokens lie in earlier chunks.
  std::vector<int64_t> total = zeros;
  for (auto& count : counts)
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t here = count[r];
      count[r] = total[r];
      total[r] += here;
    }
  if (segment > 0) {
    lay_out_segments(total, segment, plan);
  } else {
    lay_out(total, plan);
  }

  std::vector<std::vector<int64_t>> entries(chunks);  // of topk_idx, on kept rows
#pragma omp parallel for schedule(static)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    std::vector<int64_t>& next = counts[chunk];
    std::vector<int64_t> entry = zeros;
    std::vector<int64_t> seen(ranks, -1);
    for (int64_t t = chunk * kChunk; t < last(chunk); ++t) {
      int32_t* row_of = plan.row_of() + t * ranks;
      std::fill_n(row_of, ranks, -1);
      for (int64_t s = 0; s < slots; ++s) {
        const int64_t id = ids[t * slots + s];
        if (id < 0) continue;
        const int64_t rank = id / experts_a_rank;
        if (seen[rank] != t) {
          seen[rank] = t;
          if (next[rank] < plan.tokens_per_expert()[rank]) {
            const int32_t row = plan.row_offsets()[rank] + static_cast<int32_t>(next[rank]);
            plan.token_of_row()[row] = static_cast<int32_t>(t);
            plan.slot_of_row()[row] = static_cast<int32_t>(rank);
            row_of[rank] = row;
          }
          ++next[rank];
        }
        entry[rank] += row_of[rank] >= 0;
      }
    }
    entries[chunk] = std::move(entry);
  }
  for (int64_t r = 0; r < ranks; ++r) {
    int64_t sum = 0;
    for (const auto& entry : entries) sum += entry[r];
    counts_out.as<int32_t>()[2 * r] = plan.tokens_per_expert()[r];
    counts_out.as<int32_t>()[2 * r + 1] = static_cast<int32_t>(sum);
  }
}

}  // namespace

template <>
int64_t workspace_bytes(const DispatchPlan&) {
  return 0;
}

template <>
void run(const DispatchPlan& p, Stream) {
  p.topk_idx.dtype == DType::i64
      ? plan_ranks<int64_t>(p.topk_idx, p.num_experts, p.segment, p.plan, p.counts)
      : plan_ranks<int32_t>(p.topk_idx, p.num_experts, p.segment, p.plan, p.counts);
  if (p.dropped.defined())
    for (int i = 0; i < 3; ++i) p.dropped.as<int64_t>()[i] += p.plan.status()[i];
}

// ---- quantize_pack ------------------------------------------------------------------------------
// quantize_pack: a token is quantized into its first packed row and copied to the others; what
// differs between them is which experts are local.

namespace {

template <typename F, typename T>
FP8MOE_CLONES void quantize_row(const T* x, int64_t hidden, ScaleRule rule, uint8_t* codes,
                                float* scale_inv) {
  quantize_tiles<F>(x, hidden, rule, codes, scale_inv, 1);
}

template <typename Id>
void write_ids(const Wire& wire, const Id* ids, const float* probs, int64_t first, int64_t experts,
               uint8_t* row) {
  for (int64_t s = 0; s < wire.slots; ++s) {
    const int64_t local = static_cast<int64_t>(ids[s]) - first;
    const bool here = local >= 0 && local < experts;
    const int32_t id = here ? static_cast<int32_t>(local) : -1;
    const float prob = here ? probs[s] : 0.0f;
    std::memcpy(row + wire.ids() + 4 * s, &id, 4);
    std::memcpy(row + wire.probs() + 4 * s, &prob, 4);
  }
}

// Where row `at` of the plan, which rank r gets, is stored; null: nowhere.
uint8_t* place(const QuantizePack& p, int64_t r, int64_t at) {
  const int64_t bytes = p.packed.shape[1];
  if (!p.peers.defined()) return p.packed.as<uint8_t>() + at * bytes;
  const int64_t before = p.first.defined() ? p.first.as<const int32_t>()[r] : 0;
  const int64_t within = before + at - p.plan.row_offsets()[r];
  if (within < 0 || within >= p.packed.shape[0]) return nullptr;
  return reinterpret_cast<uint8_t*>(p.peers.as<const int64_t>()[r]) + within * bytes;
}

template <typename F, typename T, typename Id>
void pack(const QuantizePack& p) {
  const Tensor &x = p.x, &topk_idx = p.topk_idx, &probs = p.probs;
  const RoutingPlan& plan = p.plan;
  const int64_t ranks = plan.experts;
  const int64_t experts = p.num_experts / ranks;  // of a rank
  const Wire wire{x.shape[1], topk_idx.defined() ? topk_idx.shape[1] : 0};

#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < plan.tokens; ++t) {
    const uint8_t* done = nullptr;
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t at = plan.row_of()[t * ranks + r];
      uint8_t* row = at < 0 ? nullptr : place(p, r, at);
      if (row == nullptr) continue;
      if (done == nullptr) {
        quantize_row<F>(x.as<const T>() + t * wire.hidden, wire.hidden, p.rule, row,
                        reinterpret_cast<float*>(row + wire.scales()));
        done = row;
      } else {
        std::memcpy(row, done, static_cast<size_t>(wire.ids()));
      }
      write_ids(wire, topk_idx.as<const Id>() + t * wire.slots,
                probs.as<const float>() + t * wire.slots, r * experts, experts, row);
      std::memset(row + wire.end(), 0, static_cast<size_t>(wire.bytes() - wire.end()));
    }
  }
  if (wire.slots == 0) return;
  for (int64_t r = 0; r < ranks; ++r)  // rows of a segment that have no token
    for (int64_t at = plan.row_offsets()[r] + plan.tokens_per_expert()[r];
         at < plan.row_offsets()[r + 1]; ++at) {
      uint8_t* row = place(p, r, at);
      if (row == nullptr) break;
      std::memset(row + wire.ids(), 0xFF, static_cast<size_t>(4 * wire.slots));  // -1
      std::memset(row + wire.probs(), 0, static_cast<size_t>(4 * wire.slots));
    }
}

}  // namespace

template <>
void run(const QuantizePack& p, Stream) {
  check_offsets("quantize_pack", p.plan);
  check_row_of("quantize_pack", p.plan);
  dispatch_fp8(p.fp8_dtype, [&]<typename F>() {
    dispatch_float(p.x.dtype, [&]<typename T>() {
      if (p.topk_idx.defined() && p.topk_idx.dtype == DType::i64) {
        pack<F, T, int64_t>(p);
      } else {
        pack<F, T, int32_t>(p);
      }
    });
  });
}

// ---- unpack -------------------------------------------------------------------------------------
// unpack: ids and probs of received rows; codes and scales stay where they are.

template <>
void run(const Unpack& p, Stream) {
  const int64_t slots = p.topk_idx.shape[1];
  const Wire wire{p.hidden, slots};
  const auto bytes = static_cast<size_t>(4 * slots);
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < p.packed.shape[0]; ++r) {
    const uint8_t* row = p.packed.as<const uint8_t>() + r * wire.bytes();
    std::memcpy(p.topk_idx.as<int32_t>() + r * slots, row + wire.ids(), bytes);
    std::memcpy(p.probs.as<float>() + r * slots, row + wire.probs(), bytes);
  }
}

// ---- share_words --------------------------------------------------------------------------------
// share_words: every rank writes its words and, behind them, the number of the call to every
// mailbox, then waits until its own has that number from all. Calls use two places by turns: a rank
// writes to one again when all others have come to the call in between, so have read it.

template <>
void run(const ShareWords& p, Stream) {
  using Clock = std::chrono::steady_clock;
  const int64_t ranks = p.peers.numel(), stride = p.mailbox.shape[2];
  const int64_t own = p.words.numel(), words = p.count();
  int32_t *calls = p.calls.as<int32_t>(), *ended = p.ended.as<int32_t>();
  auto* told = p.told.as<int32_t>();
  std::fill_n(told, ranks * words, 0);  // null where there are no words
  if (*ended != 0) return;
  const auto call = static_cast<int32_t>(static_cast<uint32_t>(*calls) + 1);
  *calls = call;
  const auto box = [&](int32_t* boxes, int64_t source) {
    return boxes + ((call & 1) * ranks + source) * stride;
  };
  for (int64_t r = 0; r < ranks; ++r) {
    int32_t* to = box(reinterpret_cast<int32_t*>(p.peers.as<const int64_t>()[r]), p.rank);
    std::copy_n(p.words.as<const int32_t>(), own, to + 1);
    std::copy_n(p.more.as<const int32_t>(), words - own, to + 1 + own);
    std::atomic_ref(*to).store(call, std::memory_order_release);
  }
  const auto end = Clock::now() + std::chrono::milliseconds(p.timeout_ms);
  for (int64_t r = 0; r < ranks; ++r) {
    int32_t* from = box(p.mailbox.as<int32_t>(), r);
    const auto came = [&] {
      const int32_t seen = std::atomic_ref(*from).load(std::memory_order_acquire);
      return static_cast<int32_t>(static_cast<uint32_t>(seen) - static_cast<uint32_t>(call)) >= 0;
    };
    bool here = came();
    for (; !here && Clock::now() < end; here = came())
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (here) {
      std::copy_n(from + 1, words, told + r * words);
    } else {
      ++p.late.as<int32_t>()[r];
      *ended = 1;
    }
  }
}

// ---- copy_rows ----------------------------------------------------------------------------------

template <>
void run(const CopyRows& p, Stream) {
  const int64_t width = p.out.shape[1] * size_of(p.out.dtype);
  for (int64_t i = 0; i < p.places.shape[0]; ++i) {
    const auto* place = p.places.as<const int64_t>() + 3 * i;
    if (place[1] == 0) continue;
    std::memcpy(p.out.as<uint8_t>() + place[2] * width, reinterpret_cast<const void*>(place[0]),
                static_cast<size_t>(place[1] * width));
  }
}

}  // namespace fp8moe::cpu
