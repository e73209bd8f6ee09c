// quantize_pack: a token is quantized into its first row of the wire and copied to the others; what
// differs between them is which experts are local.
#include <cstring>

#include "common/dispatch.h"
#include "cpu/multiversion.h"
#include "cpu/plan_check.h"
#include "cpu/tile.h"
#include "ops/backends.h"
#include "ops/exchange/wire.h"

namespace fp8moe::cpu {
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

template <typename F, typename T, typename Id>
void pack(const Tensor& x, const Tensor& topk_idx, const Tensor& probs, int64_t num_experts,
          const RoutingPlan& plan, const Tensor& packed, ScaleRule rule) {
  const int64_t ranks = plan.experts;
  const int64_t experts = num_experts / ranks;  // of a rank
  const Wire wire{x.shape[1], topk_idx.defined() ? topk_idx.shape[1] : 0};
  uint8_t* rows = packed.as<uint8_t>();

#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < plan.tokens; ++t) {
    const uint8_t* done = nullptr;
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t at = plan.row_of()[t * ranks + r];
      if (at < 0) continue;
      uint8_t* row = rows + at * wire.bytes();
      if (done == nullptr) {
        quantize_row<F>(x.as<const T>() + t * wire.hidden, wire.hidden, rule, row,
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
      uint8_t* row = rows + at * wire.bytes();
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
        pack<F, T, int64_t>(p.x, p.topk_idx, p.probs, p.num_experts, p.plan, p.packed, p.rule);
      } else {
        pack<F, T, int32_t>(p.x, p.topk_idx, p.probs, p.num_experts, p.plan, p.packed, p.rule);
      }
    });
  });
}

}  // namespace fp8moe::cpu
