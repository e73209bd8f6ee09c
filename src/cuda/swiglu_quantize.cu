// h = Q(silu(gate) * up * prob) of z = [gate | up] [R, 2I]; optional columns of h [I, Kcap] from
// the same registers, and Q(z). One pass over z (two with Q(z)), whatever the outputs.
#include "core/backends.h"
#include "core/dispatch.h"
#include "cuda/device/swiglu.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {

void swiglu_quantize(const Tensor& z, const RoutingPlan& plan, const Tensor& probs, float clamp,
                     const Fp8Tensor& h, const Fp8Tensor& h_columns, const Fp8Tensor& z_q,
                     ScaleRule rule, Stream stream) {
  const int64_t rows = z.shape[0], intermediate = z.shape[1] / 2;
  if (rows == 0 || intermediate == 0) return;
  const DeviceGuard guard(z.device);
  const HiddenSource source = {.z = pre_activation(z, {}),
                               .probs = probs.as<float>(),
                               .clamp = clamp,
                               .intermediate = static_cast<int>(intermediate)};
  dispatch_fp8(h.data.dtype, [&]<typename F>() {
    launch_quantize_source<F>("swiglu_quantize", source, plan, rows, intermediate, h, h_columns,
                              {rule.pow2, rule.eps, kMaxFloat}, stream_of(stream));
  });
  if (!z_q.defined()) return;
  const float overflow = z.dtype == DType::f16    ? 65504.0f
                         : z.dtype == DType::bf16 ? 0x1.fep127f
                                                  : kMaxFloat;
  dispatch_fp8(z_q.data.dtype, [&]<typename F>() {
    launch_quantize_source<F>("swiglu_quantize", ZSource{source.z}, plan, rows, 2 * intermediate,
                              z_q, {}, {rule.pow2, rule.eps, overflow}, stream_of(stream));
  });
}

}  // namespace fp8moe::cuda
