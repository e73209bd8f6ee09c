// unpack: a thread an id and a prob.
#include "device/runtime.h"
#include "ops/backends.h"
#include "ops/exchange/wire.h"

namespace fp8moe::cuda {
namespace {

constexpr int kThreads = 256;

struct Params {
  const uint8_t* ids;  // of row 0; probs follow
  int64_t row_bytes;
  int64_t entries;  // R S
  int slots;
  int32_t* topk_idx;  // [R, S]
  float* probs;       // [R, S]
};

__global__ void __launch_bounds__(kThreads) copy_ids(const __grid_constant__ Params p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.entries) return;
  const uint8_t* ids = p.ids + i / p.slots * p.row_bytes;
  const int64_t slot = i % p.slots;
  p.topk_idx[i] = __ldg(reinterpret_cast<const int32_t*>(ids) + slot);
  p.probs[i] = __ldg(reinterpret_cast<const float*>(ids) + p.slots + slot);
}

}  // namespace

template <>
void run(const Unpack& p, Stream stream) {
  const int64_t entries = p.topk_idx.numel();
  if (entries == 0) return;
  const DeviceGuard guard(p.packed.device);
  const Wire wire{.hidden = p.hidden, .slots = p.topk_idx.shape[1]};
  const Params params{.ids = p.packed.as<const uint8_t>() + wire.ids(),
                      .row_bytes = wire.bytes(),
                      .entries = entries,
                      .slots = static_cast<int>(wire.slots),
                      .topk_idx = p.topk_idx.as<int32_t>(),
                      .probs = p.probs.as<float>()};
  launch("unpack", copy_ids, static_cast<unsigned>(cdiv(entries, kThreads)), kThreads, 0,
         stream_of(stream), params);
}

}  // namespace fp8moe::cuda
