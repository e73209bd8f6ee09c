// Compiled with -ffp-contract=fast (CMakeLists.txt): a*b is exact here, so fusing changes no bit.
#include "gemm/gemm_tile_cpu.h"

#include "cpu/multiversion.h"

namespace fp8moe::cpu {
namespace {

// kRows x kVectors accumulators of kLanes floats stay in registers over the whole depth.
template <int kRows, int kVectors, int kLanes>
inline __attribute__((always_inline)) void run_tile(const float* a, const float* b, int depth,
                                                    float* partial) {
  typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
  typedef Vector Unaligned __attribute__((aligned(sizeof(float)), may_alias));
  Vector sum[kRows][kVectors] = {};
  for (int p = 0; p < depth; ++p, ++a, b += kVectors * kLanes) {
    Vector column[kVectors];
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) column[j] = reinterpret_cast<const Unaligned*>(b)[j];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) sum[i][j] += column[j] * a[i * 128];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j)
      reinterpret_cast<Unaligned*>(partial)[i * kVectors + j] = sum[i][j];
  }
}

void run_baseline(const float* a, const float* b, int depth, float* partial) {
  run_tile<4, 2, 4>(a, b, depth, partial);
}

#if FP8MOE_MULTIVERSION
__attribute__((target("arch=x86-64-v3"))) void run_v3(const float* a, const float* b, int depth,
                                                      float* partial) {
  run_tile<6, 2, 8>(a, b, depth, partial);
}

__attribute__((target("arch=x86-64-v4"))) void run_v4(const float* a, const float* b, int depth,
                                                      float* partial) {
  run_tile<12, 2, 16>(a, b, depth, partial);
}
#endif

}  // namespace

std::vector<TileKernel> tile_kernels() {
  std::vector<TileKernel> kernels;
#if FP8MOE_MULTIVERSION
  if (has_v4()) kernels.push_back({12, 32, run_v4});
  if (has_v3()) kernels.push_back({6, 16, run_v3});
#endif
  kernels.push_back({4, 8, run_baseline});
  return kernels;
}

}  // namespace fp8moe::cpu
