// The pinned order of long sums, so that CPU and CUDA, and any number of threads, give the same
// bits: tiles of 128 terms, each a balanced tree of neighbours ((t0+t1)+(t2+t3))+..., the tiles
// added in ascending order starting from 0. Terms past the end are +0.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace fp8moe {

// One level of the tree: neighbours added. The widths are constants, so a host compiler vectorizes
// it.
template <int kWidth>
FP8MOE_HD float tree_sum(const float* term) {
  if constexpr (kWidth == 1) {
    return term[0];
  } else {
    float pair[kWidth / 2];
    for (int i = 0; i < kWidth / 2; ++i) pair[i] = term[2 * i] + term[2 * i + 1];
    return tree_sum<kWidth / 2>(pair);
  }
}

// sum of term(i), i in [0, n)
template <typename Term>
FP8MOE_HD float pinned_sum(int64_t n, Term term) {
  float sum = 0.0f;
  float tile[128];
  const int64_t whole = n / 128 * 128;
  for (int64_t first = 0; first < whole; first += 128) {
    for (int i = 0; i < 128; ++i) tile[i] = term(first + i);
    sum += tree_sum<128>(tile);
  }
  if (whole < n) {
    for (int i = 0; i < 128; ++i) tile[i] = whole + i < n ? term(whole + i) : 0.0f;
    sum += tree_sum<128>(tile);
  }
  return sum;
}

}  // namespace fp8moe
