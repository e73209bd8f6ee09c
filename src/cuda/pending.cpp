// The ops that have no CUDA kernel yet. Whoever adds a kernel deletes its entry here.
#include <string>

#include "core/backends.h"
#include "fp8moe/error.h"

namespace fp8moe::cuda {
namespace {

[[noreturn]] void pending(const char* op) {
  throw UnsupportedDevice("[" + std::string(op) + "] has no CUDA kernel yet; pass CPU tensors");
}

}  // namespace

void quantize(const Tensor&, const Fp8Tensor&, ScaleRule, Stream) { pending("quantize"); }
void quantize_dual(const Tensor&, const RoutingPlan&, const Fp8Tensor&, const Fp8Tensor&, ScaleRule,
                   Stream) {
  pending("quantize_dual");
}
void quantize_weight(const Tensor&, const Fp8Tensor&, const Fp8Tensor&, ScaleRule, int64_t,
                     Stream) {
  pending("quantize_weight");
}
void dequantize(const Fp8Tensor&, const Tensor&, Stream) { pending("dequantize"); }
void transpose_fp8(const Fp8Tensor&, const RoutingPlan&, const Fp8Tensor&, bool, ScaleRule,
                   Stream) {
  pending("transpose_fp8");
}
void permute_transpose_fp8(const Fp8Tensor&, const RoutingPlan&, const Fp8Tensor&, Stream) {
  pending("permute_transpose_fp8");
}

}  // namespace fp8moe::cuda
