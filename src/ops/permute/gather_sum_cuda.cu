// A block a token: its kept slots in shared memory, then 16 bytes a thread of up to kBatch rows in
// flight.
#include "ops/permute/gather_sum_cuda.h"

#include "common/dispatch.h"
#include "device/convert.cuh"
#include "device/memory.cuh"
#include "device/runtime.h"
#include "device/slots.cuh"

namespace fp8moe::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kBatch = 8;  // rows in flight

struct Params {
  const char* y;            // [R, C]
  char* out;                // [T, C]
  const int32_t* row_of;    // [T, S]
  const float* probs;       // [T, S] or null
  const float* row_dprobs;  // [R] or null
  float* dprobs;            // [T, S]
  int slots;
  int vectors;  // 16 bytes each, in a row
  uint64_t read_policy;
};

template <typename T>
__global__ void __launch_bounds__(kThreads) sum_rows(const __grid_constant__ Params p) {
  extern __shared__ KeptSlot kept[];
  constexpr int kN = 16 / sizeof(T);
  const int64_t token = blockIdx.x;
  const int32_t* row_of = p.row_of + token * p.slots;
  const int n =
      keep_slots(row_of, p.probs == nullptr ? nullptr : p.probs + token * p.slots, p.slots, kept);

  for (int v = threadIdx.x; v < p.vectors; v += kThreads) {
    const char* column = p.y + v * int64_t{16};
    float sum[kN] = {};
    for (int first = 0; first < n; first += kBatch) {
      uint4 words[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (first + j < n)
          words[j] =
              load<uint4>(column + int64_t{kept[first + j].row} * p.vectors * 16, p.read_policy);
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (first + j < n) {
          float x[kN];
          unpack<T>(&words[j].x, x);
          const float prob = kept[first + j].prob;
#pragma unroll
          for (int i = 0; i < kN; ++i) sum[i] = __fmaf_rn(prob, x[i], sum[i]);
        }
    }
    store(p.out + (token * p.vectors + v) * 16, pack<T>(sum));
  }
  if (p.dprobs != nullptr)
    for (int s = threadIdx.x; s < p.slots; s += kThreads) {
      const int row = row_of[s];
      p.dprobs[token * p.slots + s] = row < 0 ? 0.0f : p.row_dprobs[row];
    }
}

}  // namespace

void gather_sum(const char* op, const Tensor& y, const RoutingPlan& plan, const Tensor& probs,
                const Tensor& out, const Tensor& row_dprobs, const Tensor& dprobs, Stream stream) {
  if (plan.tokens == 0) return;
  const DeviceGuard guard(out.device);
  const Params params{.y = y.as<const char>(),
                      .out = out.as<char>(),
                      .row_of = plan.row_of(),
                      .probs = probs.as<const float>(),
                      .row_dprobs = row_dprobs.as<const float>(),
                      .dprobs = dprobs.as<float>(),
                      .slots = static_cast<int>(plan.slots),
                      .vectors = static_cast<int>(out.shape[1] * size_of(out.dtype) / 16),
                      .read_policy = read_once_policy(out)};
  dispatch_float(out.dtype, [&]<typename T>() {
    launch(op, sum_rows<T>, static_cast<unsigned>(plan.tokens), kThreads,
           plan.slots * sizeof(KeptSlot), stream_of(stream), params);
  });
}

}  // namespace fp8moe::cuda
