// The transpose in the FP8 domain, shared by transpose_fp8 and permute_transpose_fp8.
#pragma once

#include "fp8moe/ops.h"

namespace fp8moe::cuda {

// Row r of the plan is row r of q, or under `gather` row token_of_row[r]. Scales that are neither
// zero nor a positive power of two are counted in the plan's status and make their tiles' scales
// infinite. On the current device, q and columns not empty.
void shift_columns(const char* op, const Fp8Tensor& q, const RoutingPlan& plan, bool gather,
                   const Fp8Tensor& columns, Stream stream);

}  // namespace fp8moe::cuda
