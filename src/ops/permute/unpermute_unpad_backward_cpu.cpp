// unpermute_unpad_backward: dy[row] = prob * dout[t], dprobs[t,s] = <y[row], dout[t]>.
#include <cstring>

#include "common/dispatch.h"
#include "common/reduce.h"
#include "cpu/multiversion.h"
#include "cpu/plan_check.h"
#include "ops/backends.h"

namespace fp8moe::cpu {

namespace {

template <typename T>
FP8MOE_CLONES void scale_row(const T* from, float weight, int64_t c, T* to) {
  for (int64_t i = 0; i < c; ++i) to[i] = from_float<T>(weight * to_float(from[i]));
}

template <typename T>
FP8MOE_CLONES float dot(const T* a, const T* b, int64_t c) {
  return pinned_sum(c, [=](int64_t i) { return to_float(a[i]) * to_float(b[i]); });
}

}  // namespace

template <>
void run(const UnpermuteUnpadBackward& p, Stream stream) {
  check_rows("unpermute_unpad_backward", p.plan, -1);
  if (!p.probs.defined())
    return run(PermutePad{.x = {.data = p.dout}, .plan = p.plan, .y = {.data = p.dy}}, stream);
  const int64_t c = p.dout.shape[1];
  const int64_t rows = p.plan.row_offsets()[p.plan.experts];
  const int64_t assignments = p.plan.tokens * p.plan.slots;
  const int32_t* row_of = p.plan.row_of();
  for (int64_t i = 0; i < assignments; ++i)
    if (row_of[i] < 0) p.dprobs.as<float>()[i] = 0.0f;
  dispatch_float(p.dout.dtype, [&]<typename T>() {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t token = p.plan.token_of_row()[row];
      T* to = p.dy.as<T>() + row * c;
      if (token < 0) {
        std::memset(to, 0, c * sizeof(T));
        continue;
      }
      const T* from = p.dout.as<const T>() + token * c;
      const int64_t assignment = token * p.plan.slots + p.plan.slot_of_row()[row];
      scale_row<T>(from, p.probs.as<const float>()[assignment], c, to);
      p.dprobs.as<float>()[assignment] = dot<T>(p.y.as<const T>() + row * c, from, c);
    }
  });
}

}  // namespace fp8moe::cpu
