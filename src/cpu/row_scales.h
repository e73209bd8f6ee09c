// The scales of 1x128 tiles, whichever way they lie.
#pragma once

#include "fp8moe/tensor.h"

namespace fp8moe::cpu {

// Tile j of row r has its scale at data[r * row + j * tile]; layout row or gemm.
struct RowScales {
  float* data = nullptr;
  int64_t row = 0;
  int64_t tile = 0;

  RowScales() = default;
  explicit RowScales(const Fp8Tensor& t)
      : data(t.scale_inv.as<float>()),
        row(t.layout == ScaleLayout::row ? t.scale_inv.stride() : 1),
        tile(t.layout == ScaleLayout::row ? 1 : t.scale_inv.shape[1]) {}

  float* of(int64_t r) const { return data + r * row; }
};

}  // namespace fp8moe::cpu
