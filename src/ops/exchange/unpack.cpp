#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void unpack(const Tensor& packed, int64_t hidden, const Tensor& topk_idx, const Tensor& probs,
            Stream stream) {
  constexpr int64_t kMaxInt = 0x7FFFFFFF;
  const Checker check("unpack", packed.device);
  check.ndim(packed, "packed", 2);
  check.ndim(topk_idx, "topk_idx", 2);
  const int64_t rows = packed.shape[0];
  const int64_t slots = topk_idx.shape[1];
  FP8MOE_CHECK(hidden >= 0 && hidden <= kMaxInt,
               "[unpack] hidden must not be negative or over 2^31 - 1; got ", hidden);
  check.multiple(hidden, "hidden", 16);
  check.tensor(packed, "packed", {rows, packed_row_bytes(hidden, slots)});
  check.dtype(packed, "packed", {DType::u8});
  check.aligned(packed, "packed");
  check.tensor(topk_idx, "topk_idx", {rows, slots});
  check.dtype(topk_idx, "topk_idx", {DType::i32});
  check.tensor(probs, "probs", {rows, slots});
  check.dtype(probs, "probs", {DType::f32});
  check.disjoint({{topk_idx, "topk_idx"}, {probs, "probs"}}, {{packed, "packed"}});
  if (topk_idx.numel() == 0) return;
  FP8MOE_DISPATCH("unpack", packed.device, unpack(packed, hidden, topk_idx, probs, stream));
}

}  // namespace fp8moe
