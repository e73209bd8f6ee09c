// unpack: ids and probs of received rows; codes and scales stay where they are.
#include <cstring>

#include "ops/backends.h"
#include "ops/exchange/wire.h"

namespace fp8moe::cpu {

template <>
void run(const Unpack& p, Stream) {
  const int64_t slots = p.topk_idx.shape[1];
  const Wire wire{p.hidden, slots};
  const auto bytes = static_cast<size_t>(4 * slots);
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < p.packed.shape[0]; ++r) {
    const uint8_t* row = p.packed.as<const uint8_t>() + r * wire.bytes();
    std::memcpy(p.topk_idx.as<int32_t>() + r * slots, row + wire.ids(), bytes);
    std::memcpy(p.probs.as<float>() + r * slots, row + wire.probs(), bytes);
  }
}

}  // namespace fp8moe::cpu
