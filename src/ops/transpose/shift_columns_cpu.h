// The transpose in the FP8 domain, shared by transpose_fp8 and permute_transpose_fp8.
#pragma once

#include "fp8moe/plan.h"

namespace fp8moe::cpu {

// Row r of the plan is row source[r] of q (null: row r). Throws, before anything is written, where
// a scale of a row that carries a token is neither zero nor a positive power of two.
void shift_columns(const char* op, const Fp8Tensor& q, const RoutingPlan& plan,
                   const int32_t* source, const Fp8Tensor& columns);

}  // namespace fp8moe::cpu
