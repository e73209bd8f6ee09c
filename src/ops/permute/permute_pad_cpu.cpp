// permute_pad: rows, scales and probs of tokens to the rows of the plan; padding rows are zero.
#include <cstring>

#include "cpu/plan_check.h"
#include "cpu/row_scales.h"
#include "ops/backends.h"

namespace fp8moe::cpu {

namespace {

constexpr int64_t kRows = 16;  // a task: 16 neighbouring floats of a gemm-layout scale row

}  // namespace

void permute_pad(const Fp8Tensor& x, const RoutingPlan& plan, const Tensor& probs,
                 const Fp8Tensor& y, const Tensor& row_probs, bool zero_unweighted, Stream) {
  check_rows("permute_pad", plan);
  const int64_t row_bytes = x.data.shape[1] * size_of(x.data.dtype);
  const int64_t from_stride = x.data.stride() * size_of(x.data.dtype);
  const int64_t rows = plan.row_offsets()[plan.experts];
  const int32_t* token_of_row = plan.token_of_row();
  const int32_t* slot_of_row = plan.slot_of_row();
  const char* from = x.data.as<const char>();
  char* to = y.data.as<char>();

#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t last = std::min(first + kRows, rows);
    int64_t tokens[kRows];  // -1: zeros
    for (int64_t row = first; row < last; ++row) {
      int64_t token = token_of_row[row];
      if (probs.defined()) {
        const float prob =
            token < 0 ? 0.0f : probs.as<const float>()[token * plan.slots + slot_of_row[row]];
        row_probs.as<float>()[row] = prob;
        if (zero_unweighted && prob == 0.0f) token = -1;
      }
      if (token < 0) {
        std::memset(to + row * row_bytes, 0, row_bytes);
      } else {
        std::memcpy(to + row * row_bytes, from + token * from_stride, row_bytes);
      }
      tokens[row - first] = token;
    }
    if (!x.scale_inv.defined()) continue;
    const RowScales source(x);
    const RowScales target(y);
    const int64_t tiles = cdiv(x.data.shape[1], kTile);
    for (int64_t j = 0; j < tiles; ++j)
      for (int64_t row = first; row < last; ++row) {
        const int64_t token = tokens[row - first];
        target.of(row)[j * target.tile] = token < 0 ? 0.0f : source.of(token)[j * source.tile];
      }
  }
}

}  // namespace fp8moe::cpu
