#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

void unpack(const Unpack& p, Stream stream) {
  constexpr int64_t kMaxInt = 0x7FFFFFFF;
  const Checker check("unpack", p.packed.device);
  check.ndim(p.packed, "packed", 2);
  check.ndim(p.topk_idx, "topk_idx", 2);
  const int64_t rows = p.packed.shape[0];
  const int64_t slots = p.topk_idx.shape[1];
  FP8MOE_CHECK(p.hidden >= 0 && p.hidden <= kMaxInt,
               "[unpack] hidden must not be negative or over 2^31 - 1; got ", p.hidden);
  check.multiple(p.hidden, "hidden", 16);
  check.tensor(p.packed, "packed", {rows, packed_row_bytes(p.hidden, slots)});
  check.dtype(p.packed, "packed", {DType::u8});
  check.aligned(p.packed, "packed");
  check.tensor(p.topk_idx, "topk_idx", {rows, slots});
  check.dtype(p.topk_idx, "topk_idx", {DType::i32});
  check.tensor(p.probs, "probs", {rows, slots});
  check.dtype(p.probs, "probs", {DType::f32});
  check.disjoint({{p.topk_idx, "topk_idx"}, {p.probs, "probs"}}, {{p.packed, "packed"}});
  if (p.topk_idx.numel() == 0) return;
  dispatch(p, p.packed.device, stream);
}

}  // namespace fp8moe
