// permute_pad, unpermute_unpad and their gradients on the CPU: their definition.
#include <cmath>
#include <cstring>
#include <vector>

#include "common/backends.h"
#include "common/dispatch.h"
#include "common/reduce.h"
#include "cpu/multiversion.h"
#include "cpu/plan_check.h"
#include "cpu/row_scales.h"

namespace fp8moe::cpu {

// ---- permute_pad --------------------------------------------------------------------------------
// permute_pad: rows, scales and probs of tokens to the rows of the plan; padding rows are zero.

namespace {

constexpr int64_t kRows = 16;  // a task: 16 neighbouring floats of a gemm-layout scale row

}  // namespace

template <>
void run(const PermutePad& p, Stream) {
  check_rows("permute_pad", p.plan, -1);
  const int64_t row_bytes = p.x.data.shape[1] * size_of(p.x.data.dtype);
  const int64_t from_stride = p.x.data.stride() * size_of(p.x.data.dtype);
  const int64_t rows = p.plan.row_offsets()[p.plan.experts];
  const int32_t* token_of_row = p.plan.token_of_row();
  const int32_t* slot_of_row = p.plan.slot_of_row();
  const char* from = p.x.data.as<const char>();
  char* to = p.y.data.as<char>();

#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t last = std::min(first + kRows, rows);
    int64_t tokens[kRows];  // -1: zeros
    for (int64_t row = first; row < last; ++row) {
      int64_t token = token_of_row[row];
      if (p.probs.defined()) {
        const float prob =
            token < 0 ? 0.0f : p.probs.as<const float>()[token * p.plan.slots + slot_of_row[row]];
        p.row_probs.as<float>()[row] = prob;
        if (p.zero_unweighted && prob == 0.0f) token = -1;
      }
      if (token < 0) {
        std::memset(to + row * row_bytes, 0, row_bytes);
      } else {
        std::memcpy(to + row * row_bytes, from + token * from_stride, row_bytes);
      }
      tokens[row - first] = token;
    }
    if (!p.x.scale_inv.defined()) continue;
    const RowScales source(p.x);
    const RowScales target(p.y);
    const int64_t tiles = cdiv(p.x.data.shape[1], kTile);
    for (int64_t j = 0; j < tiles; ++j)
      for (int64_t row = first; row < last; ++row) {
        const int64_t token = tokens[row - first];
        target.of(row)[j * target.tile] = token < 0 ? 0.0f : source.of(token)[j * source.tile];
      }
  }
}

// ---- the sums -----------------------------------------------------------------------------------
// What permute_pad_backward and unpermute_unpad share.

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

// out[t] = sum over slots ascending of probs[t,s] * y[row_of[t,s]], each term a fused multiply-add
// onto an f32 that starts at 0, rounded once. Without probs the factor is 1 (then the add is
// exact). y [R, C] f32/f16/bf16; out [T, C] likewise; probs [T, S] f32 or none. peers, first: of
// UnpermuteUnpad, or none.
void gather_sum(const Tensor& y, const RoutingPlan& plan, const Tensor& probs, const Tensor& out,
                const Tensor& peers = {}, const Tensor& first = {}) {
  const int64_t c = y.shape[1];
  const int64_t slots = plan.slots;
  const int32_t* row_of = plan.row_of();
  const float* prob = probs.defined() ? probs.as<const float>() : nullptr;
  dispatch_float(y.dtype, [&]<typename T>() {
#pragma omp parallel
    {
      std::vector<const T*> rows(slots), bases(slots, y.as<const T>());
      for (int64_t s = 0; s < slots && peers.defined(); ++s)
        bases[s] = reinterpret_cast<const T*>(peers.as<const int64_t>()[s]) +
                   (first.as<const int32_t>()[s] - plan.row_offsets()[s]) * c;
      std::vector<float> weights(slots);
#pragma omp for schedule(static)
      for (int64_t t = 0; t < plan.tokens; ++t) {
        int64_t n = 0;
        for (int64_t i = t * slots; i < (t + 1) * slots; ++i) {
          if (row_of[i] < 0) continue;
          rows[n] = bases[i - t * slots] + row_of[i] * c;
          weights[n++] = prob != nullptr ? prob[i] : 1.0f;
        }
        weighted_sum<T>(rows.data(), weights.data(), n, c, out.as<T>() + t * c);
      }
    }
  });
}

}  // namespace

// ---- permute_pad_backward -----------------------------------------------------------------------
// permute_pad_backward: each token's rows summed, the gradient of its probs gathered.

namespace {

constexpr int64_t kSerial = 1 << 14;  // fewer probs than this are not worth waking the threads

}  // namespace

template <>
void run(const PermutePadBackward& p, Stream) {
  check_row_of("permute_pad_backward", p.plan);
  gather_sum(p.dy, p.plan, {}, p.dx);
  if (!p.dprobs.defined()) return;
  const int32_t* row_of = p.plan.row_of();
  const int64_t assignments = p.plan.tokens * p.plan.slots;
#pragma omp parallel for schedule(static) if (assignments > kSerial)
  for (int64_t i = 0; i < assignments; ++i)
    p.dprobs.as<float>()[i] = row_of[i] < 0 ? 0.0f : p.row_dprobs.as<const float>()[row_of[i]];
}

// ---- unpermute_unpad ----------------------------------------------------------------------------

template <>
void run(const UnpermuteUnpad& p, Stream) {
  check_row_of("unpermute_unpad", p.plan);
  if (p.peers.defined()) check_offsets("unpermute_unpad", p.plan);
  gather_sum(p.y, p.plan, p.probs, p.out, p.peers, p.first);
}

// ---- unpermute_unpad_backward -------------------------------------------------------------------
// unpermute_unpad_backward: dy[row] = prob * dout[t], dprobs[t,s] = <y[row], dout[t]>.

namespace {

template <typename T>
FP8MOE_CLONES void scale_row(const T* from, float weight, int64_t c, T* to) {
  for (int64_t i = 0; i < c; ++i) to[i] = from_float<T>(weight * to_float(from[i]));
}

template <typename T>
FP8MOE_CLONES float dot(const T* a, const T* b, int64_t c) {
  return pinned_sum(c, [=](int64_t i) { return to_float(a[i]) * to_float(b[i]); });
}

}  // namespace

template <>
void run(const UnpermuteUnpadBackward& p, Stream stream) {
  check_rows("unpermute_unpad_backward", p.plan, -1);
  if (!p.probs.defined())
    return run(PermutePad{.x = {.data = p.dout}, .plan = p.plan, .y = {.data = p.dy}}, stream);
  const int64_t c = p.dout.shape[1];
  const int64_t rows = p.plan.row_offsets()[p.plan.experts];
  const int64_t assignments = p.plan.tokens * p.plan.slots;
  const int32_t* row_of = p.plan.row_of();
  for (int64_t i = 0; i < assignments; ++i)
    if (row_of[i] < 0) p.dprobs.as<float>()[i] = 0.0f;
  dispatch_float(p.dout.dtype, [&]<typename T>() {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t token = p.plan.token_of_row()[row];
      T* to = p.dy.as<T>() + row * c;
      if (token < 0) {
        std::memset(to, 0, c * sizeof(T));
        continue;
      }
      const T* from = p.dout.as<const T>() + token * c;
      const int64_t assignment = token * p.plan.slots + p.plan.slot_of_row()[row];
      scale_row<T>(from, p.probs.as<const float>()[assignment], c, to);
      p.dprobs.as<float>()[assignment] = dot<T>(p.y.as<const T>() + row * c, from, c);
    }
  });
}

}  // namespace fp8moe::cpu
