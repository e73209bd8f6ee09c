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

// Writes, adds to or reads bf16 or f32 [experts, m, n] row-major by boxes of box_rows and
// kOutputBoxBytes of columns in 128-byte-swizzled shared memory; what lies outside is left out and
// reads as zero. Coordinates: (column, row, expert).
CUtensorMap output_box_map(const char* op, const char* name, const Tensor& d, int64_t experts,
                           int64_t m, int64_t n, int box_rows);

// The same by `boxes` boxes side by side, which lie one behind the other in shared memory; a row
// must be whole boxes. Coordinates: (0, row, box, expert).
CUtensorMap output_strip_map(const char* op, const char* name, const Tensor& d, int64_t experts,
                             int64_t m, int64_t n, int box_rows, int boxes);

// f32 [k_blocks, row_length] row-major, read in boxes of [1, box_rows].
CUtensorMap scale_map(const char* op, const char* name, const void* data, int64_t k_blocks,
                      int64_t row_length, int box_rows);

}  // namespace fp8moe::cuda::gemm
