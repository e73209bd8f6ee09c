// columns = the rows of q transposed expert by expert: codes shifted to one scale a tile, or, under
// requantize, dequantized to f32 and quantized again along the tokens.
#include "common/dispatch.h"
#include "device/runtime.h"
#include "device/swiglu.cuh"
#include "ops/backends.h"
#include "ops/transpose/shift_columns_cuda.h"

namespace fp8moe::cuda {
namespace {

// Vec8 dequantized values.
template <typename F>
struct DequantizedSource {
  RowsOut q;

  __device__ __forceinline__ void operator()(int64_t row, int column, float (&v)[8]) const {
    const uint2 codes = load<uint2>(q.data + row * q.ld + column);
    const float s = __ldg(q.scale + row * q.scale_row + column / 128 * q.scale_tile);
    fp8_decode4<F>(codes.x, v), fp8_decode4<F>(codes.y, v + 4);
#pragma unroll
    for (float& x : v) x *= s;
  }
};

}  // namespace

template <>
void run(const TransposeFp8& p, Stream stream) {
  if (p.q.data.numel() == 0) return;
  const DeviceGuard guard(p.q.data.device);
  if (!p.requantize) return shift_columns("transpose_fp8", p.q, p.plan, false, p.columns, stream);
  dispatch_fp8(p.q.data.dtype, [&]<typename F>() {
    quantize_columns_from<F>("transpose_fp8", DequantizedSource<F>{rows_out(p.q)}, p.plan,
                             p.q.data.shape[0], p.q.data.shape[1], {}, p.columns, p.rule, kMaxFloat,
                             stream_of(stream));
  });
}

}  // namespace fp8moe::cuda
