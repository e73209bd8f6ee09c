// TMA descriptors, encoded on the host and passed to kernels by value.
#pragma once

#include <cuda.h>

#include "fp8moe/tensor.h"

namespace fp8moe::cuda::gemm {

// Reads FP8 [rows, k] row-major in boxes of [box_rows, 128] into 128-byte-swizzled shared memory;
// what lies outside reads as zero. `op` and `name` are for the error of a misaligned address (16
// bytes). Coordinates: (k, row).
CUtensorMap operand_map(const char* op, const char* name, const void* data, int64_t rows, int64_t k,
                        int box_rows);

// The same for the operand whose rows become columns of D, by groups of 16 or 32 rows (which must
// divide them): row (group / 4) q + 2 j + i of a group is put at 8 j + 2 q + i, q < 4, i < 2. wgmma
// then leaves a lane group / 4 adjacent columns of D. Coordinates: (k, 0, 0, 0, row / group).
CUtensorMap column_operand_map(const char* op, const char* name, const void* data, int64_t rows,
                               int64_t k, int box_rows, int group);

// f32 [k_blocks, row_length] row-major, read in boxes of [1, box_rows].
CUtensorMap scale_map(const char* op, const char* name, const void* data, int64_t k_blocks,
                      int64_t row_length, int box_rows);

}  // namespace fp8moe::cuda::gemm
