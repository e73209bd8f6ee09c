// From the operands of the operators to the parameters of a launch.
#pragma once

#include "fp8moe/ops.h"
#include "fp8moe/plan.h"
#include "fp8moe/tensor.h"
#include "gemm/params.h"
#include "gemm/policy.h"

namespace fp8moe::cuda::gemm {

// d[rows of e] = a[rows of e] w[e]^T, and a2's pair behind it; Kind::fprop.
Params fprop_problem(const GroupedGemm& p, const Candidate& candidate);

// dw[e] (+)= dy_t[:, tokens of e] x_t[:, tokens of e]^T; Kind::wgrad_128x128 or wgrad_1x128.
Params wgrad_problem(const Fp8Tensor& dy_t, const Fp8Tensor& x_t, const RoutingPlan& plan,
                     const Tensor& dw, bool accumulate, const Candidate& candidate);

}  // namespace fp8moe::cuda::gemm
