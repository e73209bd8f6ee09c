// The operators on the CPU: arguments are already checked.
#pragma once

#include "fp8moe/ops.h"

namespace fp8moe::cpu {
#include "common/backend_ops.inc"
}  // namespace fp8moe::cpu
