/* The C ABI: rows that arrive grouped by expert are quantized to FP8, multiplied by each expert's
 * weight, and checked against a naive loop over the original f32 values. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "fp8moe/c_api.h"

/* An operator by its arguments' names; what is left out is not given. */
#define CALL(op, ...) \
  fp8moe_##op(&(fp8moe_##op##_args){.size = sizeof(fp8moe_##op##_args), __VA_ARGS__}, NULL)

enum { kExperts = 3, kRows = 90, kN = 160, kK = 320, kBlocks = 3, kBlocksN = 2, kRowsPadded = 92 };

static void check(fp8moe_status status) {
  if (status == FP8MOE_OK) return;
  fprintf(stderr, "error %d: %s\n", (int)status, fp8moe_last_error());
  exit(1);
}

static fp8moe_tensor tensor(int32_t dtype, size_t element, int32_t ndim, int64_t a, int64_t b,
                            int64_t c) {
  fp8moe_tensor t = {NULL, dtype, FP8MOE_CPU, 0, ndim, {a, b, c, 0}, 0};
  int64_t count = 1;
  for (int32_t i = 0; i < ndim; ++i) count *= t.shape[i];
  t.data = calloc((size_t)count, element);
  if (t.data == NULL) exit(1);
  return t;
}

/* Uniform in (-1, 1). */
static float next(uint32_t* state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(int32_t)*state / 2147483648.0f;
}

int main(void) {
  const fp8moe_scale_rule rule = {1, 1e-10f};
  const fp8moe_tensor counts = tensor(FP8MOE_I32, 4, 1, kExperts, 0, 0);
  int32_t* count = counts.data;
  count[0] = 41; /* expert 1 gets none */
  count[2] = 49;

  fp8moe_plan plan = {{0}, kRows, 1, kExperts, 1, kRows};
  plan.buffer = tensor(FP8MOE_I32, 4, 1, fp8moe_plan_buffer_size(&plan), 0, 0);
  check(CALL(plan_from_counts, .tokens_per_expert = &counts, .plan = &plan));
  const int32_t* row_offsets = (int32_t*)plan.buffer.data + fp8moe_plan_row_offsets_at(&plan);

  const fp8moe_tensor x = tensor(FP8MOE_F32, 4, 2, kRows, kK, 0);
  const fp8moe_tensor w = tensor(FP8MOE_F32, 4, 3, kExperts, kN, kK);
  const fp8moe_tensor d = tensor(FP8MOE_F32, 4, 2, kRows, kN, 0);
  const fp8moe_fp8_tensor a = {tensor(FP8MOE_E4M3, 1, 2, kRows, kK, 0),
                               tensor(FP8MOE_F32, 4, 2, kBlocks, kRowsPadded, 0),
                               FP8MOE_LAYOUT_GEMM};
  const fp8moe_fp8_tensor b = {tensor(FP8MOE_E4M3, 1, 3, kExperts, kN, kK),
                               tensor(FP8MOE_F32, 4, 3, kExperts, kBlocksN, kBlocks),
                               FP8MOE_LAYOUT_BLOCK};
  float *xs = x.data, *ws = w.data;
  const float* ds = d.data;
  uint32_t state = 1;
  for (int i = 0; i < kRows * kK; ++i) xs[i] = next(&state);
  for (int i = 0; i < kExperts * kN * kK; ++i) ws[i] = next(&state);

  check(CALL(quantize, .x = &x, .q = &a, .rule = rule));
  check(CALL(quantize_weight, .w = &w, .q = &b, .rule = rule));
  check(CALL(grouped_gemm, .a = &a, .w = &b, .plan = &plan, .d = &d));

  double error = 0.0, norm = 0.0;
  for (int e = 0; e < kExperts; ++e)
    for (int row = row_offsets[e]; row < row_offsets[e + 1]; ++row)
      for (int n = 0; n < kN; ++n) {
        double sum = 0.0;
        for (int k = 0; k < kK; ++k) sum += (double)xs[row * kK + k] * ws[(e * kN + n) * kK + k];
        error += (ds[row * kN + n] - sum) * (ds[row * kN + n] - sum);
        norm += sum * sum;
      }
  printf("fp8moe %s: relative error %.4f\n", fp8moe_get_build_info().version, sqrt(error / norm));

  void* owned[] = {counts.data, plan.buffer.data, x.data,      w.data,          d.data,
                   a.data.data, a.scale_inv.data, b.data.data, b.scale_inv.data};
  for (size_t i = 0; i < sizeof(owned) / sizeof(owned[0]); ++i) free(owned[i]);
  return error < norm * 0.05 * 0.05 ? 0 : 1;
}
