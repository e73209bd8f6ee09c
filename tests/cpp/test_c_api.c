/* The C ABI from plain C11: a route, a quantization, a grouped GEMM, a dispatch to ranks, and the
 * errors. The numbers are small integers, so that FP8, f32 and every sum are exact. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fp8moe/c_api.h"

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      fprintf(stderr, "%s:%d: CHECK(%s): %s\n", __FILE__, __LINE__, #condition, \
              fp8moe_last_error());                                             \
      exit(1);                                                                  \
    }                                                                           \
  } while (0)

/* An operator by its arguments' names; what is left out is not given. */
#define CALL(op, ...) \
  fp8moe_##op(&(fp8moe_##op##_args){.size = sizeof(fp8moe_##op##_args), __VA_ARGS__}, NULL)
#define WORKSPACE(op, bytes, ...)                                                                 \
  fp8moe_##op##_workspace(&(fp8moe_##op##_args){.size = sizeof(fp8moe_##op##_args), __VA_ARGS__}, \
                          bytes)

enum { kTokens = 5, kSlots = 2, kExperts = 3, kRows = 10, kN = 16, kK = 144, kBlocks = 2 };

static fp8moe_tensor tensor(void* data, int32_t dtype, int32_t ndim, int64_t a, int64_t b,
                            int64_t c) {
  fp8moe_tensor t = {data, dtype, FP8MOE_CPU, 0, ndim, {a, b, c, 0}, 0};
  return t;
}

/* Tokens to 3 ranks of one expert, and what arrives at rank 2 moved where it lies. */
static void dispatch(int32_t* ids, float* x, fp8moe_scale_rule rule) {
  enum { kRanks = 3, kTo2 = 4, kRow = 176 }; /* codes 144, scales 8, ids 8, probs 8 */
  static uint8_t packed[kTokens * kSlots * kRow];
  float probs[kTokens * kSlots], weights[kTo2 * kSlots];
  int32_t counts[kRanks * 2], local[kTo2 * kSlots];
  for (int i = 0; i < kTokens * kSlots; ++i) probs[i] = (float)i;
  fp8moe_plan plan = {{0}, kTokens, kRanks, kRanks, 1, kTokens * kSlots};
  const int64_t size = fp8moe_plan_buffer_size(&plan);
  int32_t* buffer = malloc((size_t)size * sizeof(int32_t));
  plan.buffer = tensor(buffer, FP8MOE_I32, 1, size, 0, 0);
  const fp8moe_tensor it = tensor(ids, FP8MOE_I32, 2, kTokens, kSlots, 0);
  const fp8moe_tensor ct = tensor(counts, FP8MOE_I32, 2, kRanks, 2, 0);
  int64_t bytes = -1;
  CHECK(WORKSPACE(dispatch_plan, &bytes, .plan = &plan) == FP8MOE_OK && bytes == 0);
  CHECK(CALL(dispatch_plan, .topk_idx = &it, .num_experts = kRanks, .plan = &plan, .counts = &ct) ==
        FP8MOE_OK);
  CHECK(counts[0] == 3 && counts[1] == 4 && counts[4] == kTo2 && counts[5] == 4);

  CHECK(fp8moe_packed_row_bytes(kK, kSlots) == kRow);
  const fp8moe_tensor xt = tensor(x, FP8MOE_F32, 2, kTokens, kK, 0);
  const fp8moe_tensor pt = tensor(probs, FP8MOE_F32, 2, kTokens, kSlots, 0);
  const fp8moe_tensor wire = tensor(packed, FP8MOE_U8, 2, kTokens * kSlots, kRow, 0);
  CHECK(CALL(quantize_pack, .x = &xt, .topk_idx = &it, .probs = &pt, .num_experts = kRanks,
             .plan = &plan, .packed = &wire, .fp8_dtype = FP8MOE_E4M3, .rule = rule) == FP8MOE_OK);
  CHECK(CALL(quantize_pack, .x = &xt, .topk_idx = &it, .probs = &pt, .num_experts = kRanks,
             .plan = &plan, .packed = &wire, .fp8_dtype = 99,
             .rule = rule) == FP8MOE_INVALID_ARGUMENT);

  uint8_t* rank_2 = packed + buffer[fp8moe_plan_row_offsets_at(&plan) + 2] * kRow;
  const fp8moe_tensor arrived = tensor(rank_2, FP8MOE_U8, 2, kTo2, kRow, 0);
  const fp8moe_tensor lt = tensor(local, FP8MOE_I32, 2, kTo2, kSlots, 0);
  const fp8moe_tensor wt = tensor(weights, FP8MOE_F32, 2, kTo2, kSlots, 0);
  CHECK(CALL(unpack, .packed = &arrived, .hidden = kK, .topk_idx = &lt, .probs = &wt) == FP8MOE_OK);
  CHECK(local[0] == -1 && local[1] == 0 && weights[1] == 1.0f); /* token 0: slot 1 is expert 2 */

  int32_t mailbox[8] = {0}, calls = 0, ended = 0, late = 0, said[3] = {5, 6, 7}, told[3] = {0};
  int64_t address = (int64_t)(intptr_t)mailbox; /* of one rank */
  const fp8moe_tensor st = tensor(said, FP8MOE_I32, 1, 3, 0, 0);
  const fp8moe_tensor at = tensor(&address, FP8MOE_I64, 1, 1, 0, 0);
  const fp8moe_tensor mt = tensor(mailbox, FP8MOE_I32, 3, 2, 1, 4);
  const fp8moe_tensor nt = tensor(&calls, FP8MOE_I32, 1, 1, 0, 0);
  const fp8moe_tensor et = tensor(&ended, FP8MOE_I32, 1, 1, 0, 0);
  const fp8moe_tensor ft = tensor(&late, FP8MOE_I32, 1, 1, 0, 0);
  const fp8moe_tensor tt = tensor(told, FP8MOE_I32, 2, 1, 3, 0);
  CHECK(CALL(share_words, .words = &st, .peers = &at, .mailbox = &mt, .calls = &nt, .ended = &et,
             .late = &ft, .rank = 0, .timeout_ms = 1000, .told = &tt) == FP8MOE_OK);
  CHECK(calls == 1 && ended == 0 && late == 0 && told[0] == 5 && told[2] == 7);
  int32_t copied[3] = {0};
  int64_t place[3] = {(int64_t)(intptr_t)told, 1, 0};
  const fp8moe_tensor copied_t = tensor(copied, FP8MOE_I32, 2, 1, 3, 0);
  const fp8moe_tensor place_t = tensor(place, FP8MOE_I64, 2, 1, 3, 0);
  CHECK(CALL(copy_rows, .out = &copied_t, .places = &place_t) == FP8MOE_OK && copied[2] == 7);

  uint8_t moved[kTo2 * kK];
  float scale[kBlocks * 4];
  fp8moe_fp8_tensor from = {tensor(rank_2, FP8MOE_E4M3, 2, kTo2, kK, 0),
                            tensor(rank_2 + kK, FP8MOE_F32, 2, kTo2, kBlocks, 0),
                            FP8MOE_LAYOUT_ROW};
  const fp8moe_fp8_tensor to = {tensor(moved, FP8MOE_E4M3, 2, kTo2, kK, 0),
                                tensor(scale, FP8MOE_F32, 2, kBlocks, 4, 0), FP8MOE_LAYOUT_GEMM};
  from.data.row_stride = kRow;
  from.scale_inv.row_stride = kRow / 4;
  int32_t here[kTo2] = {0, 0, 0, 0};
  fp8moe_plan one = {{0}, kTo2, 1, 1, 1, kTo2};
  const int64_t words = fp8moe_plan_buffer_size(&one);
  int32_t* one_buffer = malloc((size_t)words * sizeof(int32_t));
  one.buffer = tensor(one_buffer, FP8MOE_I32, 1, words, 0, 0);
  const fp8moe_tensor ht = tensor(here, FP8MOE_I32, 2, kTo2, 1, 0);
  CHECK(CALL(route, .topk_idx = &ht, .plan = &one) == FP8MOE_OK);
  CHECK(CALL(permute_pad, .x = &from, .plan = &one, .y = &to) == FP8MOE_OK);
  for (int r = 0; r < kTo2; ++r) CHECK(memcmp(moved + r * kK, rank_2 + r * kRow, kK) == 0);
  from.data.row_stride = INT64_MAX;
  CHECK(CALL(permute_pad, .x = &from, .plan = &one, .y = &to) == FP8MOE_INVALID_ARGUMENT);
  CHECK(strstr(fp8moe_last_error(), "2^63 bytes") != NULL);
  from.data.row_stride = -16;
  CHECK(CALL(permute_pad, .x = &from, .plan = &one, .y = &to) == FP8MOE_INVALID_ARGUMENT);
  free(one_buffer);
  free(buffer);
}

/* One token of four experts: the gradient of its softmax over the best two. */
static void router(void) {
  float logits[4] = {0, 1, 1, -1}, scores[4], weights[2], d[2] = {1, 0}, dlogits[4];
  int64_t idx[2], counts[4];
  const fp8moe_tensor lt = tensor(logits, FP8MOE_F32, 2, 1, 4, 0);
  const fp8moe_tensor st = tensor(scores, FP8MOE_F32, 2, 1, 4, 0);
  const fp8moe_tensor it = tensor(idx, FP8MOE_I64, 2, 1, 2, 0);
  const fp8moe_tensor wt = tensor(weights, FP8MOE_F32, 2, 1, 2, 0);
  const fp8moe_tensor ct = tensor(counts, FP8MOE_I64, 1, 4, 0, 0);
  const fp8moe_tensor dt = tensor(d, FP8MOE_F32, 2, 1, 2, 0);
  const fp8moe_tensor gt = tensor(dlogits, FP8MOE_F32, 2, 1, 4, 0);
  CHECK(CALL(router_topk, .logits = &lt, .scores = &st, .topk_idx = &it, .topk_weights = &wt,
             .tokens_per_expert = &ct, .num_groups = 1, .topk_groups = 1, .best_per_group = 1,
             .select_by_logits = 1, .softmax_after_topk = 1,
             .routed_scaling_factor = 4) == FP8MOE_OK);
  CHECK(idx[0] == 1 && idx[1] == 2 && weights[0] == 2 && weights[1] == 2);
  CHECK(counts[0] == 0 && counts[1] == 1 && counts[2] == 1 && counts[3] == 0);
  CHECK(CALL(router_topk_backward, .dweights = &dt, .scores = &st, .topk_idx = &it,
             .topk_weights = &wt, .dlogits = &gt, .softmax_after_topk = 1,
             .routed_scaling_factor = 4) == FP8MOE_OK);
  CHECK(dlogits[0] == 0 && dlogits[1] == 1 && dlogits[2] == -1 && dlogits[3] == 0);
}

int main(void) {
  router();
  static const int32_t expert_of[kTokens * kSlots] = {0, 2, 2, 0, -1, 2, 0, 0, 2, -1};
  int32_t ids[kTokens * kSlots];
  float x[kTokens * kK], w[kExperts * kN * kK], d[kRows * kN];
  const fp8moe_scale_rule rule = {FP8MOE_SCALE_POW2, 1e-10f};
  memcpy(ids, expert_of, sizeof(ids));
  for (int i = 0; i < kTokens * kK; ++i) x[i] = (float)(i * 7 % 11 - 5);
  for (int i = 0; i < kExperts * kN * kK; ++i) w[i] = (float)(i * 5 % 13 - 6);

  fp8moe_plan plan = {{0}, kTokens, kSlots, kExperts, 1, kTokens * kSlots};
  CHECK(strcmp(fp8moe_last_error(), "") == 0);
  CHECK(fp8moe_plan_rows(&plan) == kRows);
  CHECK(fp8moe_plan_columns(&plan) == 3 * 128);
  const int64_t size = fp8moe_plan_buffer_size(&plan);
  CHECK(fp8moe_plan_row_of_at(&plan) < size);
  CHECK(fp8moe_plan_col_blocks_at(&plan) == size - 3 * 4);
  int32_t* buffer = malloc((size_t)size * sizeof(int32_t));
  plan.buffer = tensor(buffer, FP8MOE_I32, 1, size, 0, 0);

  int64_t bytes = -1;
  CHECK(WORKSPACE(route, &bytes, .plan = &plan) == FP8MOE_OK && bytes >= 0);
  void* scratch = calloc(1, (size_t)bytes + 1);
  const fp8moe_tensor topk = tensor(ids, FP8MOE_I32, 2, kTokens, kSlots, 0);
  const fp8moe_tensor workspace = tensor(scratch, FP8MOE_U8, 1, bytes, 0, 0);
  CHECK(CALL(route, .topk_idx = &topk, .plan = &plan, .workspace = &workspace) == FP8MOE_OK);
  const int32_t* offsets = buffer + fp8moe_plan_row_offsets_at(&plan);
  CHECK(offsets[0] == 0 && offsets[1] == 4 && offsets[2] == 4 && offsets[3] == 8);

  uint8_t x_codes[kTokens * kK], a_codes[kRows * kK], w_codes[kExperts * kN * kK];
  float x_scale[kTokens * kBlocks], a_scale[kBlocks * 12], w_scale[kExperts * kBlocks];
  const fp8moe_tensor xt = tensor(x, FP8MOE_F32, 2, kTokens, kK, 0);
  const fp8moe_tensor wt = tensor(w, FP8MOE_F32, 3, kExperts, kN, kK);
  const fp8moe_tensor dt = tensor(d, FP8MOE_F32, 2, kRows, kN, 0);
  const fp8moe_fp8_tensor xq = {tensor(x_codes, FP8MOE_E4M3, 2, kTokens, kK, 0),
                                tensor(x_scale, FP8MOE_F32, 2, kTokens, kBlocks, 0),
                                FP8MOE_LAYOUT_ROW};
  const fp8moe_fp8_tensor aq = {tensor(a_codes, FP8MOE_E4M3, 2, kRows, kK, 0),
                                tensor(a_scale, FP8MOE_F32, 2, kBlocks, 12, 0), FP8MOE_LAYOUT_GEMM};
  const fp8moe_fp8_tensor wq = {tensor(w_codes, FP8MOE_E4M3, 3, kExperts, kN, kK),
                                tensor(w_scale, FP8MOE_F32, 3, kExperts, 1, kBlocks),
                                FP8MOE_LAYOUT_BLOCK};
  CHECK(CALL(quantize, .x = &xt, .q = &xq, .rule = rule) == FP8MOE_OK);
  const fp8moe_scale_rule unknown = {4, 1e-10f};
  CHECK(CALL(quantize, .x = &xt, .q = &xq, .rule = unknown) == FP8MOE_INVALID_ARGUMENT);
  CHECK(CALL(permute_pad, .x = &xq, .plan = &plan, .y = &aq) == FP8MOE_OK);
  CHECK(CALL(quantize_weight, .w = &wt, .q = &wq, .rule = rule) == FP8MOE_OK);
  CHECK(CALL(grouped_gemm, .a = &aq, .w = &wq, .plan = &plan, .d = &dt) == FP8MOE_OK);
  const int32_t* row_of = buffer + fp8moe_plan_row_of_at(&plan);
  for (int i = 0; i < kTokens * kSlots; ++i) {
    CHECK((row_of[i] < 0) == (expert_of[i] < 0));
    for (int n = 0; n < kN && row_of[i] >= 0; ++n) {
      float sum = 0.0f;
      for (int k = 0; k < kK; ++k)
        sum += x[i / kSlots * kK + k] * w[(expert_of[i] * kN + n) * kK + k];
      CHECK(d[row_of[i] * kN + n] == sum);
    }
  }

  dispatch(ids, x, rule);

  /* Errors: a status, the message, nothing written. */
  const float kept = d[0];
  fp8moe_tensor bad = dt;
  bad.shape[1] = kN + 1;
  CHECK(CALL(grouped_gemm, .a = &aq, .w = &wq, .plan = &plan, .d = &bad) ==
        FP8MOE_INVALID_ARGUMENT);
  CHECK(strstr(fp8moe_last_error(), "[grouped_gemm] d must be [10, 16]; got [10, 17]") != NULL);
  CHECK(CALL(grouped_gemm, .a = &aq, .w = &wq, .plan = &plan) == FP8MOE_INVALID_ARGUMENT);
  CHECK(CALL(grouped_gemm, .a = &aq, .w = &wq, .d = &dt) == FP8MOE_INVALID_ARGUMENT);
  bad = dt;
  bad.dtype = 99;
  CHECK(CALL(grouped_gemm, .a = &aq, .w = &wq, .plan = &plan, .d = &bad) ==
        FP8MOE_INVALID_ARGUMENT);
  CHECK(strstr(fp8moe_last_error(), "dtype") != NULL);
  bad = dt;
  bad.ndim = 7;
  CHECK(CALL(grouped_gemm, .a = &aq, .w = &wq, .plan = &plan, .d = &bad) ==
        FP8MOE_INVALID_ARGUMENT);
  bad = dt;
  bad.shape[0] = bad.shape[1] = INT64_C(1) << 40;
  CHECK(CALL(grouped_gemm, .a = &aq, .w = &wq, .plan = &plan, .d = &bad) ==
        FP8MOE_INVALID_ARGUMENT);
  CHECK(strstr(fp8moe_last_error(), "2^63 bytes") != NULL);
  CHECK(WORKSPACE(route, NULL, .plan = &plan) == FP8MOE_INVALID_ARGUMENT);
  /* On the CPU nothing is counted by; sizes are asked for before there are outputs. */
  CHECK(WORKSPACE(grouped_gemm_wgrad, &bytes, .plan = &plan) == FP8MOE_OK && bytes == 0);
  CHECK(WORKSPACE(act_quantize_backward, &bytes, .plan = &plan) == FP8MOE_OK && bytes == 0);
  bad = dt;
  bad.device_type = FP8MOE_CUDA;
  CHECK(WORKSPACE(grouped_gemm_wgrad, &bytes, .dw = &bad) == FP8MOE_OK &&
        bytes == FP8MOE_ZERO_WORKSPACE_BYTES);
  CHECK(fp8moe_plan_rows(NULL) == -1);
  fp8moe_plan huge = plan;
  huge.capacity = INT64_MAX;
  CHECK(fp8moe_plan_buffer_size(&huge) == -1 && strstr(fp8moe_last_error(), "2^31") != NULL);
  plan.align = 0;
  CHECK(fp8moe_plan_rows(&plan) == -1 && strstr(fp8moe_last_error(), "align") != NULL);
  CHECK(fp8moe_packed_row_bytes(-1, 8) == -1 && fp8moe_packed_row_bytes(128, -1) == -1);
  CHECK(fp8moe_packed_row_bytes(INT64_MAX, 8) == -1);
  CHECK(strstr(fp8moe_last_error(), "packed_row_bytes") != NULL);
  CHECK(d[0] == kept);

  /* A struct's size: what an older caller does not know is not given; a newer one's must be zero.
   */
  struct {
    fp8moe_permute_pad_args args;
    int64_t more;
  } newer = {.args = {.x = &xq, .plan = &plan, .y = &aq, .zero_unweighted = 1}, .more = 0};
  plan.align = 1;
  newer.args.size = sizeof(newer.args);
  CHECK(fp8moe_permute_pad(&newer.args, NULL) == FP8MOE_INVALID_ARGUMENT);
  CHECK(strstr(fp8moe_last_error(), "zero_unweighted needs probs") != NULL);
  newer.args.size = offsetof(fp8moe_permute_pad_args, zero_unweighted);
  CHECK(fp8moe_permute_pad(&newer.args, NULL) == FP8MOE_OK);
  newer.args.zero_unweighted = 0;
  newer.args.size = sizeof(newer);
  CHECK(fp8moe_permute_pad(&newer.args, NULL) == FP8MOE_OK);
  newer.more = 1;
  CHECK(fp8moe_permute_pad(&newer.args, NULL) == FP8MOE_INVALID_ARGUMENT);
  newer.args.size = 0;
  CHECK(fp8moe_permute_pad(&newer.args, NULL) == FP8MOE_INVALID_ARGUMENT);
  CHECK(strstr(fp8moe_last_error(), "args.size must be") != NULL);
  CHECK(fp8moe_permute_pad(NULL, NULL) == FP8MOE_INVALID_ARGUMENT);

  /* Rows of weight 0 as padding. */
  float probs[kTokens * kSlots] = {1.0f}, row_probs[kRows];
  const fp8moe_tensor pt = tensor(probs, FP8MOE_F32, 2, kTokens, kSlots, 0);
  const fp8moe_tensor rt = tensor(row_probs, FP8MOE_F32, 1, kRows, 0, 0);
  CHECK(CALL(permute_pad, .x = &xq, .plan = &plan, .probs = &pt, .y = &aq, .row_probs = &rt,
             .zero_unweighted = 1) == FP8MOE_OK);
  for (int i = 0; i < kTokens * kSlots; ++i)
    for (int k = 0; k < kK && row_of[i] >= 0; ++k)
      CHECK(a_codes[row_of[i] * kK + k] == (i == 0 ? x_codes[k] : 0));

  /* High precision: no scales. */
  float y[kRows * kK];
  const fp8moe_fp8_tensor x_plain = {.data = xt},
                          y_plain = {.data = tensor(y, FP8MOE_F32, 2, kRows, kK, 0)};
  CHECK(CALL(permute_pad, .x = &x_plain, .plan = &plan, .y = &y_plain) == FP8MOE_OK);
  CHECK(memcmp(y + row_of[0] * kK, x, kK * sizeof(float)) == 0);

  CHECK(strcmp(fp8moe_get_build_info().version, "") != 0);
  free(scratch);
  free(buffer);
  return 0;
}
