// 128x128 tiles of [E, N, K]: what quantize_weight and quantize in block layout are made of.
#pragma once

#include "fp8moe/ops.h"

namespace fp8moe::cuda {

// q and q_t as in quantize_weight; either may be left out. On the current device, x not empty.
void quantize_blocks(const char* op, const Tensor& x, int64_t experts, int64_t n, int64_t k,
                     const Fp8Tensor& q, const Fp8Tensor& q_t, ScaleRule rule, int64_t interleave,
                     Stream stream);

}  // namespace fp8moe::cuda
