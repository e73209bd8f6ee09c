// Each 128-token by 128-channel tile: codes shifted to one scale S (of the tile, or of each
// channel: shift_channels.cuh) and transposed, code' = RNE(code * s_r / S). One block a tile.
#include "cuda/shift_columns.h"

#include "core/dispatch.h"
#include "cuda/device/shift_channels.cuh"
#include "cuda/device/shift_tile.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {
namespace shift {
namespace {

constexpr int kBlocksPerSm = 8;  // what registers allow without spills

struct Shared {
  TransposedCodes<8> codes;
  int top[kWarps];  // of each warp's tokens
};

template <typename F>
__device__ __forceinline__ uint32_t shift_pair(uint16_t codes, uint32_t first, uint32_t second) {
  uint32_t halves;
  uint16_t shifted;
  if constexpr (F::kMantissa == 3) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    halves = multiply_halves(halves, first);
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(shifted) : "r"(halves));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(codes));
    halves = multiply_halves(multiply_halves(halves, first), second);
    asm("cvt.rn.satfinite.e5m2x2.f16x2 %0, %1;" : "=h"(shifted) : "r"(halves));
  }
  return shifted;
}

// The shift by k <= kFp8ShiftToZero as one or two products in f16. A product that is not exact lies
// under a quarter of the format's least subnormal, so only what becomes zero is rounded twice.
template <typename F>
struct Shift {
  uint32_t first, second;  // 2^-k = first * second, in both halves

  __device__ __forceinline__ explicit Shift(int k) {
    const int k1 = min(k, 24);
    const float a = scale_of_field(127 - k1), b = scale_of_field(127 - (k - k1));
    first = pack2<Fp16>(a, a), second = pack2<Fp16>(b, b);
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t codes) const {
    const uint32_t low = shift_pair<F>(static_cast<uint16_t>(codes), first, second);
    const uint32_t high = shift_pair<F>(static_cast<uint16_t>(codes >> 16), first, second);
    return low | high << 16;
  }
};

// S = the largest scale among rows that hold a nonzero code; 1 where none does.
template <typename F>
__device__ __forceinline__ void shift_to_block(Rows& rows, float* scale_inv,
                                               int (&top_of_warp)[kWarps]) {
  const int warp = threadIdx.x / 32, in_warp = threadIdx.x % 32;
  int top = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t any =
        (rows.code[j][0] | rows.code[j][1] | rows.code[j][2] | rows.code[j][3]) & kMagnitudes;
    const int e = rows.exponent(j);
    if (any != 0 || e == kPoison) top = max(top, e);
  }
  top = __reduce_max_sync(kFullWarp, top);
  if (in_warp == 0) top_of_warp[warp] = top;
  __syncthreads();
  top = __reduce_max_sync(kFullWarp, top_of_warp[in_warp % kWarps]);
  if (top == 0) top = 127;
  if (threadIdx.x == 0) *scale_inv = scale_of_field(top);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int e = rows.exponent(j);
    const Shift<F> shift(e == 0 ? kFp8ShiftToZero<F> : min(max(top - e, 0), kFp8ShiftToZero<F>));
    uint32_t special = 0;
#pragma unroll
    for (const uint32_t codes : rows.code[j]) special |= specials<F>(codes);
    if (special == 0) {
#pragma unroll
      for (uint32_t& codes : rows.code[j]) codes = shift(codes);
    } else {
#pragma unroll
      for (uint32_t& codes : rows.code[j]) codes = keep_specials<F>(shift(codes), codes);
    }
  }
}

template <typename F>
__global__ __launch_bounds__(kThreads,
                             kBlocksPerSm) void shift_tiles(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  const int block = blockIdx.x, tile = blockIdx.y;
  const TokenBlock tokens = token_block_of_warp(p.plan, block);
  if (tokens.expert < 0) return;
  const int lane = threadIdx.x % 8, group = threadIdx.x / 8;
  Rows rows;
  rows.load(p, tokens, tile);
  shift_to_block<F>(rows, p.out.scale + tile * p.out.scale_tile + block * p.out.scale_block,
                    shared.top);
#pragma unroll
  for (int four = 0; four < 4; ++four) {
    uint32_t codes[4] = {rows.code[0][four], rows.code[1][four], rows.code[2][four],
                         rows.code[3][four]};
    shared.codes.put(16 * lane + 4 * four, group, codes);
  }
  __syncthreads();
  shared.codes.store_to(p.out.data + int64_t{128} * tile * p.out.ld + int64_t{128} * block,
                        p.out.ld, p.channels - 128 * tile, 128);
}

}  // namespace
}  // namespace shift

void shift_columns(const char* op, const Fp8Tensor& q, const RoutingPlan& plan, bool gather,
                   const Fp8Tensor& columns, Stream stream) {
  const RowsOut rows = rows_out(q);
  const bool per_channel = columns.layout == ScaleLayout::gemm;
  const shift::Params params = {
      .codes = rows.data,
      .scale_inv = rows.scale,
      .scale_row = q.layout == ScaleLayout::row ? q.scale_inv.stride() : 1,
      .scale_tile = rows.scale_tile,
      .stride = q.data.stride(),
      .channels = static_cast<int>(rows.ld),
      .gather = gather,
      .plan = view_of(plan),
      .out = columns_out(columns)};
  // Neighbours take neighbouring tokens: they end the lines of the output that they share, and the
  // slice of gathered rows stays in L2. Blocks past the plan's columns end at once.
  const dim3 grid(static_cast<unsigned>(plan.columns() / kTile),
                  static_cast<unsigned>(cdiv(rows.ld, kTile)));
  dispatch_fp8(q.data.dtype, [&]<typename F>() {
    launch(op, per_channel ? shift::shift_channels<F> : shift::shift_tiles<F>, grid,
           shift::kThreads, 0, stream_of(stream), params);
  });
}

}  // namespace fp8moe::cuda
