// SPDX-License-Identifier: Apache-2.0
// Which kernel a grouped GEMM runs on CUDA, and how well its tiles fit. It needs no device, and no
// CUDA backend in the build.
#pragma once

#include <cstdint>
#include <vector>

#include "fp8moe/error.h"
#include "fp8moe/tensor.h"

namespace fp8moe {

// The three products of a linear layer with weight [E, N, K] over M rows of all experts.
enum class GemmPass { fprop, dgrad, wgrad };

struct GemmQuery {
  GemmPass pass = GemmPass::fprop;
  int64_t m = 0, n = 0, k = 0;  // the M rows are spread over the experts as evenly as they go
  int64_t experts = 1;
  int64_t sm_count = 132;
  DType out = DType::bf16;                   // of D, of wgrad dW: bf16 or f32
  bool accumulate = false;                   // wgrad: added to dW
  ScaleLayout columns = ScaleLayout::block;  // of wgrad's operands: block or gemm
};

// One way to run a grouped GEMM. All that are legal give the same bits.
struct GemmCandidate {
  int tile_m = 128, tile_n = 128;  // of the output, what a CTA works on at a time
  int raster_group = 16;           // rows of tiles per raster group: CTAs walk it column by column
  bool dynamic = false;  // wgrad: CTAs claim tiles as they come free; else the schedule is static
  bool load_d = false;   // wgrad, added f32: D is loaded, added to and stored; else reduced into
  int launches = 1;      // one after another, each of a range of experts: of much work, so that
                         // CTAs do not drift apart

  bool operator==(const GemmCandidate&) const = default;
};

struct GemmChoice : GemmCandidate {
  int stages;        // of the ring in shared memory
  int shared_bytes;  // of a CTA
  int64_t tiles;     // of all experts
  double waves;      // tiles / SMs
  double idle;       // share of the SMs' time that the last wave leaves unused
  double waste;      // share of those tiles' arithmetic that is done outside the matrices
};

// Throws InvalidArgument for sizes out of range, and for options that the pass does not have.
FP8MOE_API GemmChoice explain_grouped_gemm(const GemmQuery& query);

// SMs of a GPU that is here; throws as an operator with tensors on it would.
FP8MOE_API int64_t sm_count(int device = 0);

// For measuring and tests: every candidate that is legal, and the one that this thread's launches
// run from now on (null: the choice). A launch for which it is not legal throws InvalidArgument.
FP8MOE_API std::vector<GemmCandidate> grouped_gemm_candidates(const GemmQuery& query);
FP8MOE_API void force_grouped_gemm(const GemmCandidate* candidate);

}  // namespace fp8moe
