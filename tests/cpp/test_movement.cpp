// permute_pad and unpermute_unpad, forward and backward, element by element from the plan's row_of.
#include "check.h"

using namespace fp8moe;
using namespace fp8moe::test;

namespace {

struct Case {
  int64_t tokens, slots, experts, align;
  std::vector<int> topk;
};

std::vector<Case> cases() {
  Random random(11);
  std::vector<Case> list;
  for (int64_t align : {1, 16, 128}) {
    list.push_back({37, 3, 5, align, random_topk(37 * 3, 5, random)});
    list.push_back({0, 2, 3, align, {}});
    list.push_back({4, 1, 3, align, {1, 1, 1, 1}});
    list.push_back({3, 2, 1, align, {-1, -1, 0, 0, -1, 0}});
  }
  return list;
}

constexpr int64_t kWidth = 144;

bool is_padding(const RoutingPlan& plan, int64_t row) { return plan.token_of_row()[row] < 0; }

void permute(const Case& c, Random& random) {
  const OwnedPlan plan = routed(c.tokens, c.slots, c.experts, c.align, c.topk);
  const int64_t rows = plan->row_offsets()[c.experts];
  const Owned probs(DType::f32, {c.tokens, c.slots}), y_probs(DType::f32, {plan->rows()});
  fill_normal(probs, random);

  for (DType dtype : {DType::f32, DType::bf16}) {
    const Owned x(dtype, {c.tokens, kWidth}), y(dtype, {plan->rows(), kWidth});
    fill_normal(x, random);
    permute_pad({.x = x, .plan = plan, .probs = probs, .y = y, .row_probs = y_probs});
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t t = plan->token_of_row()[row], s = plan->slot_of_row()[row];
      CHECK(y_probs.at(row) == (t < 0 ? 0.0 : probs.at(t * c.slots + s)));
      for (int64_t j = 0; j < kWidth; ++j)
        CHECK(y.at(row * kWidth + j) == (t < 0 ? 0.0 : x.at(t * kWidth + j)));
    }
  }
  for (ScaleLayout from : {ScaleLayout::row, ScaleLayout::gemm})
    for (ScaleLayout to : {ScaleLayout::row, ScaleLayout::gemm}) {
      const OwnedFp8 x(DType::e4m3, c.tokens, kWidth, from),
          y(DType::e4m3, plan->rows(), kWidth, to);
      fill_random(x, random);
      permute_pad({.x = x, .plan = plan, .y = y});
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t j = 0; j < kWidth; ++j) {
          const int64_t t = plan->token_of_row()[row];
          CHECK(y.code(row, j) == (t < 0 ? 0 : x.code(t, j)));
          CHECK(y.scale_at(row, j) == (t < 0 ? 0.0 : x.scale_at(t, j)));
        }
    }

  // Backward: the sum over a token's slots.
  const Owned dy(DType::f32, {plan->rows(), kWidth}), dx(DType::f32, {c.tokens, kWidth});
  const Owned dprobs(DType::f32, {c.tokens, c.slots});
  fill_normal(dy, random);
  fill_normal(y_probs, random);
  permute_pad_backward({.dy = dy, .plan = plan, .row_dprobs = y_probs, .dx = dx, .dprobs = dprobs});
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t j = 0; j < kWidth; ++j) {
      float sum = 0.0f;
      for (int64_t s = 0; s < c.slots; ++s) {
        const int32_t row = plan->row_of()[t * c.slots + s];
        if (row >= 0) sum += dy.as<float>()[row * kWidth + j];
      }
      CHECK(dx.as<float>()[t * kWidth + j] == sum);
    }
    for (int64_t s = 0; s < c.slots; ++s) {
      const int32_t row = plan->row_of()[t * c.slots + s];
      CHECK(dprobs.at(t * c.slots + s) == (row < 0 ? 0.0 : y_probs.at(row)));
    }
  }
}

void unpermute(const Case& c, bool weighted, Random& random) {
  const OwnedPlan plan = routed(c.tokens, c.slots, c.experts, c.align, c.topk);
  const Owned y(DType::bf16, {plan->rows(), kWidth}), out(DType::bf16, {c.tokens, kWidth});
  Owned probs(DType::f32, {c.tokens, c.slots});
  fill_normal(y, random);
  fill_normal(probs, random);
  const Tensor given = weighted ? probs.view : Tensor{};
  unpermute_unpad({.y = y, .plan = plan, .probs = given, .out = out});
  for (int64_t t = 0; t < c.tokens; ++t)
    for (int64_t j = 0; j < kWidth; ++j) {
      double sum = 0.0, magnitude = 0.0;
      for (int64_t s = 0; s < c.slots; ++s) {
        const int32_t row = plan->row_of()[t * c.slots + s];
        if (row < 0) continue;
        const double term = (weighted ? probs.at(t * c.slots + s) : 1.0) * y.at(row * kWidth + j);
        sum += term;
        magnitude += std::fabs(term);
      }
      CHECK(std::fabs(out.at(t * kWidth + j) - sum) <=
            0x1p-8 * std::fabs(sum) + 0x1p-20 * magnitude);
    }

  const Owned dout(DType::bf16, {c.tokens, kWidth}), dy(DType::bf16, {plan->rows(), kWidth});
  const Owned dprobs(DType::f32, {c.tokens, c.slots});
  fill_normal(dout, random);
  unpermute_unpad_backward({.dout = dout,
                            .plan = plan,
                            .y = weighted ? y.view : Tensor{},
                            .probs = given,
                            .dy = dy,
                            .dprobs = weighted ? dprobs.view : Tensor{}});
  for (int64_t row = 0; row < plan->row_offsets()[c.experts]; ++row)
    for (int64_t j = 0; j < kWidth; ++j) {
      double expected = 0.0;
      if (!is_padding(plan, row)) {
        const int64_t t = plan->token_of_row()[row], s = plan->slot_of_row()[row];
        expected = (weighted ? probs.at(t * c.slots + s) : 1.0) * dout.at(t * kWidth + j);
      }
      CHECK(std::fabs(dy.at(row * kWidth + j) - expected) <= 0x1p-8 * std::fabs(expected));
    }
  for (int64_t i = 0; weighted && i < c.tokens * c.slots; ++i) {
    const int32_t row = plan->row_of()[i];
    double sum = 0.0, magnitude = 0.0;
    for (int64_t j = 0; row >= 0 && j < kWidth; ++j) {
      const double term = y.at(row * kWidth + j) * dout.at(i / c.slots * kWidth + j);
      sum += term;
      magnitude += std::fabs(term);
    }
    CHECK(std::fabs(dprobs.at(i) - sum) <= 0x1p-19 * magnitude);
  }
}

void bad_arguments() {
  const OwnedPlan plan = routed(2, 2, 3, 1, {0, 1, 2, -1});
  const Owned x(DType::bf16, {2, 32}), y(DType::bf16, {4, 32});
  const Owned probs(DType::f32, {2, 2});
  const std::vector<uint8_t> before = y.copy();
  CHECK_INVALID("[permute_pad]", permute_pad({.x = x.view, .plan = plan, .probs = probs, .y = y}));
  CHECK_INVALID("[permute_pad]", permute_pad({.x = x.view, .y = y}));
  CHECK_INVALID("[unpermute_unpad_backward]",
                unpermute_unpad_backward({.dout = x, .plan = plan, .probs = probs, .dy = y}));
  CHECK(y.copy() == before);
}

// outputs(p) says the shape, dtype, device and layout of what is wanted; an op runs with memory.
void wanted_outputs() {
  const OwnedPlan plan = routed(4, 1, 3, 16, {1, 1, 1, 1});
  const Owned x(DType::bf16, {4, kWidth}), probs(DType::f32, {4, 1});
  PermutePad p{.x = x, .plan = plan, .probs = probs};
  p.y = Fp8Tensor::wanted(ScaleLayout::gemm);
  p.row_probs = Tensor::wanted();
  outputs(p);
  CHECK(p.y.data.defined() && p.y.data.dtype == DType::bf16 && !p.y.scale_inv.defined());
  CHECK(p.y.data.ndim == 2 && p.y.data.shape[0] == plan->rows() && p.y.data.shape[1] == kWidth);
  CHECK(p.row_probs.ndim == 1 && p.row_probs.shape[0] == plan->rows());

  Quantize q{.x = x};
  q.q = Fp8Tensor::wanted(ScaleLayout::gemm, DType::e5m2);
  CHECK_INVALID("[quantize] q must have memory", quantize(q));
  outputs(q);
  CHECK(q.q.data.dtype == DType::e5m2 && q.q.data.shape[0] == 4 && q.q.layout == ScaleLayout::gemm);
  CHECK(q.q.scale_inv.shape[0] == cdiv(kWidth, 128) && q.q.scale_inv.shape[1] == 4);

  Route r;
  const Owned ids(DType::i64, {5, 2});
  r.topk_idx = ids;
  r.plan = {.buffer = Tensor::wanted(), .slots = -1, .experts = 3, .align = 16, .capacity = -1};
  outputs(r);
  CHECK(r.plan.tokens == 5 && r.plan.slots == 2 && r.plan.capacity == 10);
  CHECK(r.plan.buffer.shape[0] == r.plan.buffer_size() && r.plan.buffer.dtype == DType::i32);

  GroupedGemm g{.plan = plan};
  g.d = Tensor::wanted(DType::f16);
  CHECK_INVALID("[grouped_gemm] a is required", outputs(g));
}

}  // namespace

int main() {
  wanted_outputs();
  Random random(12);
  for (const Case& c : cases()) {
    permute(c, random);
    for (bool weighted : {false, true}) unpermute(c, weighted, random);
  }
  bad_arguments();
}
