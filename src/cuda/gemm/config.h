// Which kernel runs a grouped GEMM: pure functions over plain structs, no device needed.
#pragma once

#include <cstdint>

namespace fp8moe::cuda::gemm {

struct Config {
  int tile_n = 192;  // columns of a tile of D: 128, 160 or 192
  int cluster = 2;   // CTAs that load for each other: 1 or 2
};

inline Config choose_config() { return {}; }

}  // namespace fp8moe::cuda::gemm
