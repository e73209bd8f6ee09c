// Each 128-token by 128-channel tile: codes shifted to one scale S (of the tile, or of each
// channel) and transposed, code' = RNE(code * s_r / S). One block a tile, codes packed in
// registers.
#include "cuda/shift_columns.h"

#include "core/dispatch.h"
#include "cuda/device/eight.cuh"
#include "cuda/device/tile.cuh"
#include "cuda/device/transposed_codes.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kMagnitudes = 0x7F7F7F7Fu;
constexpr int kPoison = 255;  // exponent field of infinity: what a bad scale counts as

struct Params {
  const uint8_t* codes;  // [rows, C]
  const float* scale_inv;
  int64_t scale_row, scale_tile;
  int channels, tiles;
  PlanView plan;
  ColumnsOut out;  // [C, Kcap]
};

struct Shared {
  TransposedCodes<16> codes;
  int top[kWarps][128];  // per channel; per tile: [warp][0]
};

// 0x80 in every byte whose code is NaN (or E5M2's infinity): copied, never shifted.
template <typename F>
__device__ __forceinline__ uint32_t specials(uint32_t codes) {
  return ((codes & kMagnitudes) + (0x80u - F::kFirstNan) * 0x01010101u) & 0x80808080u;
}

template <typename F>
__device__ __forceinline__ uint32_t keep_specials(uint32_t shifted, uint32_t codes) {
  const uint32_t special = specials<F>(codes);
  if (special == 0) return shifted;
  const uint32_t whole = (special >> 7) * 0xFFu;
  return (shifted & ~whole) | (codes & whole);
}

__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

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
    const float a = __uint_as_float(static_cast<uint32_t>(127 - k1) << 23);
    const float b = __uint_as_float(static_cast<uint32_t>(127 - (k - k1)) << 23);
    first = pack2<Fp16>(a, a), second = pack2<Fp16>(b, b);
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t codes) const {
    const uint32_t low = shift_pair<F>(static_cast<uint16_t>(codes), first, second);
    const uint32_t high = shift_pair<F>(static_cast<uint16_t>(codes >> 16), first, second);
    return keep_specials<F>(low | high << 16, codes);
  }
};

// A thread's 4 tokens at 16 channels.
struct Rows {
  uint32_t code[4][4];  // [token][4 channels each]
  int exponent[4];      // field of the scale; 0: zero scale or no token; kPoison: a bad scale
};

// S = the largest scale among rows that hold a nonzero code; 1 where none does.
template <typename F>
__device__ __forceinline__ void shift_to_block(Rows& rows, float* scale_inv, Shared& shared) {
  const int warp = threadIdx.x / 32, in_warp = threadIdx.x % 32;
  int top = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t any =
        (rows.code[j][0] | rows.code[j][1] | rows.code[j][2] | rows.code[j][3]) & kMagnitudes;
    if (any != 0 || rows.exponent[j] == kPoison) top = max(top, rows.exponent[j]);
  }
  top = __reduce_max_sync(kFullWarp, top);
  if (in_warp == 0) shared.top[warp][0] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) top = max(top, shared.top[w][0]);
  if (top == 0) top = 127;
  if (threadIdx.x == 0) *scale_inv = __uint_as_float(static_cast<uint32_t>(top) << 23);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int e = rows.exponent[j];
    const Shift<F> shift(e == 0 ? kFp8ShiftToZero<F> : min(max(top - e, 0), kFp8ShiftToZero<F>));
#pragma unroll
    for (uint32_t& codes : rows.code[j]) codes = shift(codes);
  }
}

// value's exponent field and mantissa as one integer, plus the scale's exponent: ranks values
// without overflow. 0 for a zero and for a special.
template <typename F>
__device__ __forceinline__ int rank(float value, bool special, int exponent) {
  const uint32_t bits = __float_as_uint(value) & 0x7FFFFFFFu;
  if (exponent == kPoison) return 0x7FFF;
  if (bits == 0 || special || exponent == 0) return 0;
  return static_cast<int>(bits >> (23 - F::kMantissa)) + (exponent << F::kMantissa);
}

// S of a channel = the smallest power of two whose largest code holds the channel's largest value.
template <typename F>
__device__ __forceinline__ int field_of(int top) {
  constexpr int kM = F::kMantissa;
  constexpr int kMaxExponent = static_cast<int>(F::kMaxCode >> kM) - F::kBias;
  constexpr int kMaxMantissa = F::kMaxCode & ((1u << kM) - 1);
  if (top == 0) return 127;
  const int carry = (top & ((1 << kM) - 1)) > kMaxMantissa;
  return min(max((top >> kM) - 127 - kMaxExponent + carry, 1), kPoison);
}

template <typename F>
__device__ __forceinline__ void shift_to_channels(Rows& rows, int channels, float* scale_inv,
                                                  Shared& shared) {
  const int warp = threadIdx.x / 32, in_warp = threadIdx.x % 32, lane = threadIdx.x % 8;
#pragma unroll
  for (int four = 0; four < 4; ++four) {
    int top[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float v[4];
      fp8_decode4<F>(rows.code[j][four], v);
      const uint32_t special = specials<F>(rows.code[j][four]);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        top[i] = max(top[i], rank<F>(v[i], special >> (8 * i + 7) & 1, rows.exponent[j]));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      top[i] = max(top[i], __shfl_xor_sync(kFullWarp, top[i], 8));
      top[i] = max(top[i], __shfl_xor_sync(kFullWarp, top[i], 16));
    }
    if (in_warp < 8)
      *reinterpret_cast<int4*>(&shared.top[warp][16 * lane + 4 * four]) = {top[0], top[1], top[2],
                                                                           top[3]};
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    int top = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = max(top, shared.top[w][threadIdx.x]);
    const int field = field_of<F>(top);
    if (static_cast<int>(threadIdx.x) < channels)
      scale_inv[threadIdx.x] = __uint_as_float(static_cast<uint32_t>(field) << 23);
    shared.top[0][threadIdx.x] = field;  // only this thread reads that column's maxima
  }
  __syncthreads();
#pragma unroll
  for (int four = 0; four < 4; ++four) {
    const int4 fields = *reinterpret_cast<const int4*>(&shared.top[0][16 * lane + 4 * four]);
    const int field[4] = {fields.x, fields.y, fields.z, fields.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int e = rows.exponent[j];
      float v[4];
      fp8_decode4<F>(rows.code[j][four], v);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = e == 0 ? kFp8ShiftToZero<F>
                             : min(max(field[i] - e, -kFp8ShiftToZero<F>), kFp8ShiftToZero<F>);
        v[i] *= __uint_as_float(static_cast<uint32_t>(127 - k) << 23);
      }
      rows.code[j][four] =
          keep_specials<F>(fp8_encode4<F>(v[0], v[1], v[2], v[3]), rows.code[j][four]);
    }
  }
}

// Thread t: tokens 4 (t / 8) + j, channels 16 (t % 8) on.
template <typename F, bool kGather, bool kPerChannel>
__global__ __launch_bounds__(kThreads) void shift_tiles(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  // Under gather neighbours in the grid are blocks of tokens, and the gathered rows' slice of
  // channels stays in L2; else neighbours share whole rows.
  const int blocks = gridDim.x / p.tiles;
  const int tile = kGather ? blockIdx.x / blocks : blockIdx.x % p.tiles;
  const int block = kGather ? blockIdx.x % blocks : blockIdx.x / p.tiles;
  const TokenBlock tokens = token_block_of_warp(p.plan, block);
  if (tokens.expert < 0) return;
  const int lane = threadIdx.x % 8, group = threadIdx.x / 8;
  const int channel = 128 * tile + 16 * lane;

  Rows rows;
  bool bad = false;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int token = 4 * group + j;
    uint4 codes = {};
    float s = 0.0f;
    if (token < tokens.tokens) {
      int64_t row = tokens.first_row + token;
      if constexpr (kGather) row = p.plan.token_of_row[row];
      if (channel < p.channels) codes = load_once<uint4>(p.codes + row * p.channels + channel);
      s = __ldg(p.scale_inv + row * p.scale_row + tile * p.scale_tile);
    }
    rows.code[j][0] = codes.x, rows.code[j][1] = codes.y;
    rows.code[j][2] = codes.z, rows.code[j][3] = codes.w;
    const bool bad_scale = !is_pow2_scale(s) && __float_as_uint(s) != 0;
    rows.exponent[j] = bad_scale ? kPoison : exponent_field(s);
    bad = bad || bad_scale;
  }
  if (bad && lane == 0) {
    int count = 0;
    for (int e : rows.exponent) count += e == kPoison;
    atomicAdd(p.plan.status + kBadScale, count);
  }

  float* scale_inv = p.out.scale + tile * p.out.scale_tile + block * p.out.scale_block;
  if constexpr (kPerChannel)
    shift_to_channels<F>(rows, p.channels - 128 * tile, scale_inv, shared);
  else
    shift_to_block<F>(rows, scale_inv, shared);

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

void shift_columns(const char* op, const Fp8Tensor& q, const RoutingPlan& plan, bool gather,
                   const Fp8Tensor& columns, Stream stream) {
  const RowsOut rows = rows_out(q);
  const int64_t tiles = cdiv(rows.ld, kTile), blocks = plan.columns() / kTile;
  const bool per_channel = columns.layout == ScaleLayout::gemm;
  const Params params = {.codes = rows.data,
                         .scale_inv = rows.scale,
                         .scale_row = rows.scale_row,
                         .scale_tile = rows.scale_tile,
                         .channels = static_cast<int>(rows.ld),
                         .tiles = static_cast<int>(tiles),
                         .plan = view_of(plan),
                         .out = columns_out(columns)};
  dispatch_fp8(q.data.dtype, [&]<typename F>() {
    const auto kernel =
        gather ? (per_channel ? shift_tiles<F, true, true> : shift_tiles<F, true, false>)
               : (per_channel ? shift_tiles<F, false, true> : shift_tiles<F, false, false>);
    launch(op, kernel, static_cast<unsigned>(blocks * tiles), kThreads, 0, stream_of(stream),
           params);
  });
}

}  // namespace fp8moe::cuda
