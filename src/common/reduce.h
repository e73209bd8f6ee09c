// The pinned order of long sums, so that CPU and CUDA, and any number of threads, give the same bits:
// tiles of 128 terms, each a balanced tree of neighbours ((t0+t1)+(t2+t3))+..., the tiles added in
// ascending order starting from 0. Terms past the end are +0.
#pragma once

#include "common/hd.h"

namespace fp8moe {

// term[0..127] is overwritten; the sum is returned.
FP8MOE_HD float tree_sum_128(float* term) {
  for (int width = 64; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) term[i] = term[2 * i] + term[2 * i + 1];
  return term[0];
}

// sum of term(i), i in [0, n)
template <typename Term>
FP8MOE_HD float pinned_sum(int n, Term term) {
  float sum = 0.0f;
  for (int first = 0; first < n; first += 128) {
    float tile[128];
    for (int i = 0; i < 128; ++i) tile[i] = first + i < n ? term(first + i) : 0.0f;
    sum += tree_sum_128(tile);
  }
  return sum;
}

}  // namespace fp8moe
