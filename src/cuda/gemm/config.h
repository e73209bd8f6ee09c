// Which kernel runs a grouped GEMM: pure functions over plain structs, no device needed.
#pragma once

#include <cstdint>

namespace fp8moe::cuda::gemm {

struct Config {
  int tile_n = 192;  // columns of a tile of D: 128 or 192; its rows are kTileM = 128
  int cluster =
      1;  // CTAs that load for each other; pairs were measured and are slower (docs/notes)
};

// Columns computed for n columns of D, tiles being whole.
constexpr int64_t padded_columns(int64_t n, int tile_n) {
  return (n + tile_n - 1) / tile_n * tile_n;
}

// A tile of 192 columns runs at about 1.1 times the rate of one of 128 (docs/notes); the narrow one
// pays where it leaves out more than that.
constexpr Config choose_config(int64_t n) {
  const bool narrow = 10 * padded_columns(n, 192) > 11 * padded_columns(n, 128);
  return {.tile_n = narrow ? 128 : 192};
}

}  // namespace fp8moe::cuda::gemm
