// transpose_fp8 and permute_transpose_fp8: each output code is nearest to the input's value under
// the tile's scale, and that scale is the one the tile asks for.
#include "check.h"

using namespace fp8moe;
using namespace fp8moe::test;

namespace {

void shift(DType format, ScaleLayout rows, ScaleLayout columns, int64_t align, int64_t c) {
  Random random(21);
  const std::vector<int> counts = {1, 0, 130, 15, 128};
  const int64_t experts = static_cast<int64_t>(counts.size());
  const OwnedPlan plan = from_counts(counts, 274 + 3, align);
  const OwnedFp8 q(format, plan->rows(), c, rows), q_t(format, c, plan->columns(), columns);
  fill_random(q, random);
  // A zero tile with a giant scale decides nothing; a scale far below the block's flushes to zero.
  const int64_t first = plan->row_offsets()[2];
  std::memset(q.data.as<uint8_t>() + first * c, 0, std::min<int64_t>(c, kTile));
  q.scale.as<float>()[q.scale_index(first, 0)] = 0x1p100f;
  q.scale.as<float>()[q.scale_index(first + 1, 0)] = 0x1p-100f;
  const std::vector<uint8_t> before = q.data.copy();
  transpose_fp8({.q = q, .plan = plan, .columns = q_t});
  CHECK(q.data.copy() == before);

  for (int64_t e = 0; e < experts; ++e) {
    const int64_t row = plan->row_offsets()[e], column = plan->col_offsets()[e];
    for (int64_t t0 = 0; t0 < counts[e]; t0 += kTile)
      for (int64_t i = 0; i < c; ++i) {
        const int64_t tokens = std::min<int64_t>(kTile, counts[e] - t0);
        const double scale = q_t.scale_at(i, column + t0);
        double largest = 0.0, largest_scale = 0.0;
        // Block tiles cover 128 channels, column tiles this one.
        const int64_t i0 = columns == ScaleLayout::block ? i / kTile * kTile : i;
        const int64_t i1 = columns == ScaleLayout::block ? std::min(i0 + kTile, c) : i + 1;
        for (int64_t t = 0; t < tokens; ++t)
          for (int64_t ii = i0; ii < i1; ++ii)
            if (q.at(row + t0 + t, ii) != 0.0) {
              largest = std::max(largest, std::fabs(q.at(row + t0 + t, ii)));
              largest_scale = std::max(largest_scale, q.scale_at(row + t0 + t, ii));
            }
        if (largest == 0.0) {
          CHECK(scale == 1.0);
        } else if (columns == ScaleLayout::block) {
          CHECK(scale == largest_scale);
        } else {
          const double top = format == DType::e4m3 ? 448.0 : 57344.0;
          CHECK(largest / scale <= top && largest / (scale / 2) > top);
        }
        for (int64_t t = 0; t < tokens; ++t)
          CHECK(is_nearest(format, q_t.code(i, column + t0 + t), q.at(row + t0 + t, i) / scale));
      }
    for (int64_t i = 0; i < c; ++i)
      for (int64_t t = column + counts[e]; t < plan->col_offsets()[e + 1]; ++t)
        CHECK(q_t.code(i, t) == 0);
  }
}

void requantize() {
  Random random(22);
  const OwnedPlan plan = from_counts({5, 0, 130}, 135, 1);
  const int64_t c = 144;
  const OwnedFp8 q(DType::e4m3, 135, c, ScaleLayout::gemm);
  fill_random(q, random);
  for (int64_t i = 0; i < q.scale.view.numel(); ++i) q.scale.as<float>()[i] *= 1.3f;
  const OwnedFp8 q_t(DType::e4m3, c, plan->columns(), ScaleLayout::gemm);
  CHECK_INVALID("[transpose_fp8]", transpose_fp8({.q = q, .plan = plan, .columns = q_t}));
  transpose_fp8({.q = q, .plan = plan, .columns = q_t, .requantize = true});
  for (int64_t e = 0; e < 3; ++e)
    for (int64_t t = 0; t < plan->tokens_per_expert()[e]; ++t)
      for (int64_t i = 0; i < c; ++i) {
        const int64_t column = plan->col_offsets()[e] + t;
        const double x = static_cast<float>(q.at(plan->row_offsets()[e] + t, i));
        CHECK(is_nearest(DType::e4m3, q_t.code(i, column), x / q_t.scale_at(i, column)));
      }
}

// permute_transpose_fp8 == transpose_fp8({.q = permute_pad}), defined content bit for bit.
void gathered(ScaleLayout rows, ScaleLayout columns, int64_t align) {
  Random random(23);
  const int64_t tokens = 150, slots = 2, c = 144;
  const OwnedPlan plan = routed(tokens, slots, 4, align, random_topk(tokens * slots, 4, random));
  const OwnedFp8 x(DType::e4m3, tokens, c, rows);
  fill_random(x, random);
  const OwnedFp8 y(DType::e4m3, plan->rows(), c, ScaleLayout::gemm);
  const OwnedFp8 two(DType::e4m3, c, plan->columns(), columns);
  const OwnedFp8 one(DType::e4m3, c, plan->columns(), columns);
  permute_pad({.x = x, .plan = plan, .y = y});
  transpose_fp8({.q = y, .plan = plan, .columns = two});
  permute_transpose_fp8({.q = x, .plan = plan, .columns = one});
  for (int64_t i = 0; i < c; ++i)
    for (int64_t t = 0; t < plan->col_offsets()[4]; ++t)
      CHECK(one.code(i, t) == two.code(i, t) && one.scale_at(i, t) == two.scale_at(i, t));
}

void empty_and_bad() {
  const OwnedPlan none = from_counts({0, 0}, 0, 1);
  const OwnedFp8 nothing(DType::e4m3, 0, 32, ScaleLayout::gemm);
  const OwnedFp8 nothing_t(DType::e4m3, 32, 0, ScaleLayout::block);
  transpose_fp8({.q = nothing, .plan = none, .columns = nothing_t});
  permute_transpose_fp8({.q = nothing, .plan = none, .columns = nothing_t});

  Random random(24);
  const OwnedPlan plan = from_counts({3}, 3, 1);
  const OwnedFp8 q(DType::e4m3, 3, 32, ScaleLayout::gemm);
  fill_random(q, random);
  const OwnedFp8 q_t(DType::e4m3, 32, 128, ScaleLayout::block);
  const std::vector<uint8_t> before = q_t.data.copy();
  q.scale.as<float>()[1] = 3.0f;
  CHECK_INVALID("[transpose_fp8]", transpose_fp8({.q = q, .plan = plan, .columns = q_t}));
  CHECK_INVALID("[permute_transpose_fp8]",
                permute_transpose_fp8({.q = q, .plan = plan, .columns = q_t}));
  CHECK_INVALID(
      "[transpose_fp8]",
      transpose_fp8(
          {.q = q, .plan = plan, .columns = OwnedFp8(DType::e4m3, 32, 256, ScaleLayout::block)}));
  CHECK_INVALID(
      "[transpose_fp8]",
      transpose_fp8(
          {.q = q, .plan = plan, .columns = OwnedFp8(DType::e5m2, 32, 128, ScaleLayout::block)}));
  CHECK(q_t.data.copy() == before);
}

}  // namespace

int main() {
  for (ScaleLayout columns : {ScaleLayout::block, ScaleLayout::gemm}) {
    for (ScaleLayout rows : {ScaleLayout::row, ScaleLayout::gemm})
      for (int64_t align : {1, 16}) {
        shift(DType::e4m3, rows, columns, align, 144);
        gathered(rows, columns, align);
      }
    shift(DType::e5m2, ScaleLayout::gemm, columns, 128, 272);
    shift(DType::e4m3, ScaleLayout::gemm, columns, 1, 16);
  }
  requantize();
  empty_and_bad();
}
