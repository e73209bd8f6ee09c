#include "ops/permute/gather_sum_cpu.h"

#include <cmath>
#include <vector>

#include "common/dispatch.h"
#include "cpu/multiversion.h"

namespace fp8moe::cpu {

namespace {

constexpr int64_t kStrip = 512;  // columns summed at a time: 2 KiB of f32 stay in the first cache

// sum[i] += weights[k] * rows[k][i] for k ascending in one pass over the sum.
template <int kRows, typename T>
FP8MOE_HD void add_rows(const T* const* rows, const float* weights, int64_t first, int64_t width,
                        float* __restrict sum) {
  const T* row[kRows];
  float weight[kRows];
  for (int k = 0; k < kRows; ++k) row[k] = rows[k] + first, weight[k] = weights[k];
  for (int64_t i = 0; i < width; ++i) {
    float s = sum[i];
    for (int k = 0; k < kRows; ++k) s = std::fma(weight[k], to_float(row[k][i]), s);
    sum[i] = s;
  }
}

template <typename T>
FP8MOE_CLONES void weighted_sum(const T* const* rows, const float* weights, int64_t n, int64_t c,
                                T* out) {
  float sum[kStrip];
  for (int64_t first = 0; first < c; first += kStrip) {
    const int64_t width = std::min(kStrip, c - first);
    for (int64_t i = 0; i < width; ++i) sum[i] = 0.0f;
    int64_t k = 0;
    for (; k + 4 <= n; k += 4) add_rows<4>(rows + k, weights + k, first, width, sum);
    for (; k < n; ++k) add_rows<1>(rows + k, weights + k, first, width, sum);
    for (int64_t i = 0; i < width; ++i) out[first + i] = from_float<T>(sum[i]);
  }
}

}  // namespace

void gather_sum(const Tensor& y, const RoutingPlan& plan, const Tensor& probs, const Tensor& out) {
  const int64_t c = y.shape[1];
  const int64_t slots = plan.slots;
  const int32_t* row_of = plan.row_of();
  const float* prob = probs.defined() ? probs.as<const float>() : nullptr;
  dispatch_float(y.dtype, [&]<typename T>() {
#pragma omp parallel
    {
      std::vector<const T*> rows(slots);
      std::vector<float> weights(slots);
#pragma omp for schedule(static)
      for (int64_t t = 0; t < plan.tokens; ++t) {
        int64_t n = 0;
        for (int64_t i = t * slots; i < (t + 1) * slots; ++i) {
          if (row_of[i] < 0) continue;
          rows[n] = y.as<const T>() + row_of[i] * c;
          weights[n++] = prob != nullptr ? prob[i] : 1.0f;
        }
        weighted_sum<T>(rows.data(), weights.data(), n, c, out.as<T>() + t * c);
      }
    }
  });
}

}  // namespace fp8moe::cpu
