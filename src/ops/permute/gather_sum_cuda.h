// What permute_pad_backward and unpermute_unpad share on CUDA.
#pragma once

#include "fp8moe/plan.h"

namespace fp8moe::cuda {

// out[t] = sum over slots ascending of probs[t,s] * y[row_of[t,s]], each term a fused multiply-add
// onto an f32 that starts at 0, rounded once (probs undefined: 1). y [R, C] f32/f16/bf16; out [T,
// C]. In the same launch dprobs[t,s] = row_dprobs[row_of[t,s]], 0 for a dropped slot; both or
// none.
void gather_sum(const char* op, const Tensor& y, const RoutingPlan& plan, const Tensor& probs,
                const Tensor& out, const Tensor& row_dprobs, const Tensor& dprobs, Stream stream);

}  // namespace fp8moe::cuda
