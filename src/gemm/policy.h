// Which tiles, in what order: the candidates for a grouped GEMM, and the choice among them by one
// cost. Plain C++ over plain structs, no device needed.
#pragma once

#include <cstdint>
#include <vector>

#include "fp8moe/explain.h"
#include "gemm/tile.h"

namespace fp8moe::cuda::gemm {

// What the host knows of a launch.
struct Problem {
  Kind kind = Kind::fprop;
  int64_t m = 0;         // fprop: rows of all experts; wgrad: rows of dw
  int64_t n = 0;         // columns of D
  int64_t k_blocks = 0;  // of K; wgrad: of the tokens of all experts, the most there can be
  int64_t experts = 1;
  bool bf16 = true;  // D, else f32
  bool add = false;  // wgrad: to what D holds
};

using Candidate = GemmCandidate;

constexpr const TileShape& shape_of(const Candidate& candidate) {
  return tile_shape(candidate.tile_m, candidate.tile_n);
}

// Every way to run it.
std::vector<Candidate> candidates(const Problem& problem, int64_t sm_count);

// What it takes, as far as candidates differ; the experts' rows are taken to be as a
// random routing spreads them.
double nanoseconds(const Problem& problem, const Candidate& candidate, int64_t sm_count);

// The cheapest candidate; or the forced one, which must be legal (else InvalidArgument).
Candidate choose(const Problem& problem, int64_t sm_count);

// For measuring and tests: the candidate of this thread's launches from now on; null: the choice.
void force(const Candidate* candidate);

}  // namespace fp8moe::cuda::gemm
