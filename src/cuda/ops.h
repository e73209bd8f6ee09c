// The operators on CUDA, arguments already checked, and what else core asks of this backend.
#pragma once

#include "fp8moe/explain.h"
#include "fp8moe/ops.h"

namespace fp8moe::cuda {
#include "common/backend_ops.inc"

// Refuses a machine without driver or GPU, and a GPU that is not compute capability 9.0.
void require_device(Device device, const char* op);

// Plain C++, and in every build: they ask no device.
GemmChoice explain_grouped_gemm(const GemmQuery& query);
std::vector<GemmCandidate> grouped_gemm_candidates(const GemmQuery& query);
void force_grouped_gemm(const GemmCandidate* candidate);
}  // namespace fp8moe::cuda
