// Which kernel a grouped GEMM of given sizes and bf16 output runs on CUDA, and how well its tiles
// fit. No device is asked; a build without the CUDA backend answers, too.
#pragma once

#include <cstdint>

#include "fp8moe/error.h"

namespace fp8moe {

// The three products of a linear layer with weight [E, N, K] over M rows of all experts.
enum class GemmPass { fprop, dgrad, wgrad };

struct GemmChoice {
  int tile_m, tile_n;  // of the output, what a CTA works on at a time
  int stages;          // of the ring in shared memory
  int shared_bytes;    // of a CTA
  int band;            // rows of tiles that CTAs take together, column by column
  bool taken;          // tiles are taken as CTAs come free; else they are dealt in turn
  int64_t tiles;       // of all experts, before those of a last wave are cut
  double waves;        // tiles / SMs
  double idle;         // share of the SMs' time that the last wave leaves unused
  double waste;        // share of those tiles' arithmetic that is done outside the matrices
};

// M rows spread over the experts as evenly as they go. Throws InvalidArgument for negative sizes,
// no experts or no SMs.
FP8MOE_API GemmChoice explain_grouped_gemm(GemmPass pass, int64_t m, int64_t n, int64_t k,
                                           int64_t experts, int64_t sm_count);

}  // namespace fp8moe
