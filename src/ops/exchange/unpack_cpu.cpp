// unpack: ids and probs of received rows; codes and scales stay where they are.
#include <cstring>

#include "ops/backends.h"
#include "ops/exchange/wire.h"

namespace fp8moe::cpu {

void unpack(const Tensor& packed, int64_t hidden, const Tensor& topk_idx, const Tensor& probs,
            Stream) {
  const int64_t slots = topk_idx.shape[1];
  const Wire wire{hidden, slots};
  const auto bytes = static_cast<size_t>(4 * slots);
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < packed.shape[0]; ++r) {
    const uint8_t* row = packed.as<const uint8_t>() + r * wire.bytes();
    std::memcpy(topk_idx.as<int32_t>() + r * slots, row + wire.ids(), bytes);
    std::memcpy(probs.as<float>() + r * slots, row + wire.probs(), bytes);
  }
}

}  // namespace fp8moe::cpu
