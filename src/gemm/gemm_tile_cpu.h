// The register-blocked inner tile of the CPU GEMMs: one 128-block of the contraction.
#pragma once

#include <vector>

namespace fp8moe::cpu {

constexpr int kTileRowsMax = 12;     // every kernel's rows divide 12,
constexpr int kTileColumnsMax = 32;  // its columns 32

// partial[i][j] = sum over p ascending of a[i][p] b[p][j], i < rows, j < columns; f32, from zero.
// a: rows at a stride of 128; b: [depth][columns]; partial: [rows][columns]. The operands are
// decoded FP8 values, whose products are exact, so every kernel gives the same bits, fused or not.
struct TileKernel {
  int rows;
  int columns;
  void (*run)(const float* a, const float* b, int depth, float* partial);
};

// Those this machine can run, the widest instruction set first.
std::vector<TileKernel> tile_kernels();

}  // namespace fp8moe::cpu
