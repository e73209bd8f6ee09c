// What permute_pad_backward and unpermute_unpad share on the CPU.
#pragma once

#include "fp8moe/plan.h"

namespace fp8moe::cpu {

// out[t] = sum over slots ascending of probs[t,s] * y[row_of[t,s]], each term a fused multiply-add
// onto an f32 that starts at 0, rounded once. Without probs the factor is 1 (then the add is
// exact). y [R, C] f32/f16/bf16; out [T, C] likewise; probs [T, S] f32 or none.
void gather_sum(const Tensor& y, const RoutingPlan& plan, const Tensor& probs, const Tensor& out);

}  // namespace fp8moe::cpu
