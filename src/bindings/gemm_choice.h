#pragma once

#include <nanobind/nanobind.h>

namespace fp8moe {

// What a grouped GEMM runs on CUDA: explain_grouped_gemm, sm_count and, for measuring and tests,
// grouped_gemm_candidates and force_grouped_gemm.
void bind_gemm_choice(nanobind::module_& m);

}  // namespace fp8moe
