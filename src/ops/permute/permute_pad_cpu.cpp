// permute_pad: rows, scales and probs of tokens to the rows of the plan; padding rows are zero.
#include <cstring>

#include "cpu/plan_check.h"
#include "cpu/row_scales.h"
#include "ops/backends.h"

namespace fp8moe::cpu {

namespace {

constexpr int64_t kRows = 16;  // a task: 16 neighbouring floats of a gemm-layout scale row

}  // namespace

template <>
void run(const PermutePad& p, Stream) {
  check_rows("permute_pad", p.plan, -1);
  const int64_t row_bytes = p.x.data.shape[1] * size_of(p.x.data.dtype);
  const int64_t from_stride = p.x.data.stride() * size_of(p.x.data.dtype);
  const int64_t rows = p.plan.row_offsets()[p.plan.experts];
  const int32_t* token_of_row = p.plan.token_of_row();
  const int32_t* slot_of_row = p.plan.slot_of_row();
  const char* from = p.x.data.as<const char>();
  char* to = p.y.data.as<char>();

#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t last = std::min(first + kRows, rows);
    int64_t tokens[kRows];  // -1: zeros
    for (int64_t row = first; row < last; ++row) {
      int64_t token = token_of_row[row];
      if (p.probs.defined()) {
        const float prob =
            token < 0 ? 0.0f : p.probs.as<const float>()[token * p.plan.slots + slot_of_row[row]];
        p.row_probs.as<float>()[row] = prob;
        if (p.zero_unweighted && prob == 0.0f) token = -1;
      }
      if (token < 0) {
        std::memset(to + row * row_bytes, 0, row_bytes);
      } else {
        std::memcpy(to + row * row_bytes, from + token * from_stride, row_bytes);
      }
      tokens[row - first] = token;
    }
    if (!p.x.scale_inv.defined()) continue;
    const RowScales source(p.x);
    const RowScales target(p.y);
    const int64_t tiles = cdiv(p.x.data.shape[1], kTile);
    for (int64_t j = 0; j < tiles; ++j)
      for (int64_t row = first; row < last; ++row) {
        const int64_t token = tokens[row - first];
        target.of(row)[j * target.tile] = token < 0 ? 0.0f : source.of(token)[j * source.tile];
      }
  }
}

}  // namespace fp8moe::cpu
