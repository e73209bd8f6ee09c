// rows = Q(x) by 1x128 tiles and columns = Q(x^T) per expert, from one read of x.
#include "core/backends.h"
#include "core/dispatch.h"
#include "cuda/device/eight.cuh"
#include "cuda/device/swiglu.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {
namespace {

template <typename T>
struct DenseSource {
  const T* x;  // [R, C]
  int64_t columns;

  __device__ __forceinline__ void operator()(int64_t row, int column, float (&v)[8]) const {
    Eight<T> packed;
    packed.load(x + row * columns + column);
    packed.values(v);
  }
};

}  // namespace

void quantize_dual(const Tensor& x, const RoutingPlan& plan, const Fp8Tensor& rows,
                   const Fp8Tensor& columns, ScaleRule rule, Stream stream) {
  if (x.numel() == 0) return;
  const DeviceGuard guard(x.device);
  dispatch_fp8(rows.data.dtype, [&]<typename F>() {
    dispatch_float(x.dtype, [&]<typename T>() {
      launch_quantize_source<F>("quantize_dual", DenseSource<T>{x.as<T>(), x.shape[1]}, plan,
                                x.shape[0], x.shape[1], rows, columns,
                                {rule.pow2, rule.eps, max_finite(x.dtype)}, stream_of(stream));
    });
  });
}

}  // namespace fp8moe::cuda
