// The checks act_quantize and its backward share.
#pragma once

#include <cmath>

#include "common/check.h"
#include "ops/backends.h"

namespace fp8moe {

// [rows, width] of z = [gate | up], the plan if any, probs [rows] if any.
inline void check_swiglu(const Checker& check, int64_t rows, int64_t width, const RoutingPlan& plan,
                         const Tensor& probs, float limit) {
  FP8MOE_CHECK(width % 32 == 0, "[", check.op(),
               "] z.shape[1] must be twice a multiple of 16; got ", width);
  if (plan.defined()) {
    check.plan(plan);
    FP8MOE_CHECK(rows == plan.rows(), "[", check.op(), "] z must have the plan's ", plan.rows(),
                 " rows; got ", rows);
  }
  if (probs.defined()) {
    check.tensor(probs, "probs", {rows});
    check.dtype(probs, "probs", {DType::f32});
  }
  FP8MOE_CHECK(limit > 0.0f, "[", check.op(), "] limit must be positive, infinity for none; got ",
               limit);
}

// As the backends have it: 0 stands for no limit.
inline float backend_limit(float limit) { return std::isinf(limit) ? 0.0f : limit; }

}  // namespace fp8moe
