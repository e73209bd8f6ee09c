// Where the parts of a packed row begin, in bytes (ops.h, packed_row_bytes).
#pragma once

#include "fp8moe/ops.h"

namespace fp8moe {

struct Wire {
  int64_t hidden;
  int64_t slots;

  int64_t scales() const { return hidden; }
  int64_t ids() const { return hidden + 4 * cdiv(hidden, kTile); }
  int64_t probs() const { return ids() + 4 * slots; }
  int64_t end() const { return probs() + 4 * slots; }  // of what means something
  int64_t bytes() const { return packed_row_bytes(hidden, slots); }
};

}  // namespace fp8moe
