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
template <bool kPerChannel>
constexpr int kBlocksPerSm = kPerChannel ? 2 : 4;  // what registers allow without spills
constexpr uint32_t kMagnitudes = 0x7F7F7F7Fu;
constexpr int kPoison = 255;  // exponent field of infinity: what a bad scale counts as

struct Params {
  const uint8_t* codes;  // [rows, C]
  const float* scale_inv;
  int64_t scale_row, scale_tile;
  int channels, tiles;
  int run;  // tiles
  PlanView plan;
  ColumnsOut out;  // [C, Kcap]
  int stride;      // of gathered rows
};

struct Shared {
  TransposedCodes<16> codes;
  int top[kWarps];                             // of each warp's tokens: per tile
  alignas(16) float channel_top[kWarps][128];  // per channel
  uint8_t exponent[2][128];                    // of the tokens' scales, of this tile and the next
  uint4 incoming[4][kThreads];                 // the next tile's codes, each thread's own
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
    return low | high << 16;
  }
};

// A thread's 4 tokens at 16 channels.
struct Rows {
  uint32_t code[4][4];  // [token][4 channels each]
  int exponent[4];      // field of the scale; 0: zero scale or no token; kPoison: a bad scale
};

// S = the largest scale among rows that hold a nonzero code; 1 where none does.
// load_next: called once the codes are in registers.
template <typename F, typename LoadNext>
__device__ __forceinline__ void shift_to_block(Rows& rows, float* scale_inv, Shared& shared,
                                               LoadNext load_next) {
  const int warp = threadIdx.x / 32, in_warp = threadIdx.x % 32;
  int top = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t any =
        (rows.code[j][0] | rows.code[j][1] | rows.code[j][2] | rows.code[j][3]) & kMagnitudes;
    if (any != 0 || rows.exponent[j] == kPoison) top = max(top, rows.exponent[j]);
  }
  top = __reduce_max_sync(kFullWarp, top);
  if (in_warp == 0) shared.top[warp] = top;
  load_next();
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) top = max(top, shared.top[w]);
  if (top == 0) top = 127;
  if (threadIdx.x == 0) *scale_inv = __uint_as_float(static_cast<uint32_t>(top) << 23);
  uint32_t special = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (const uint32_t codes : rows.code[j]) special |= specials<F>(codes);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int e = rows.exponent[j];
    const Shift<F> shift(e == 0 ? kFp8ShiftToZero<F> : min(max(top - e, 0), kFp8ShiftToZero<F>));
    if (special == 0) {
#pragma unroll
      for (uint32_t& codes : rows.code[j]) codes = shift(codes);
    } else {
#pragma unroll
      for (uint32_t& codes : rows.code[j]) codes = keep_specials<F>(shift(codes), codes);
    }
  }
}

// Real values times 2^-kDown fit in f32, large scales and all. Those that do not fit below are
// under every scale there is; they only count as not zero.
template <typename F>
constexpr int kDown = F::kMantissa == 3 ? 9 : 16;

// S of a channel = the smallest power of two whose largest code holds the channel's largest value,
// `top` (times 2^-kDown). Its exponent field.
template <typename F>
__device__ __forceinline__ int field_of(float top) {
  constexpr int kMaxExponent = static_cast<int>(F::kMaxCode >> F::kMantissa) - F::kBias;
  constexpr uint32_t kMaxMantissa = F::kMaxCode & ((1u << F::kMantissa) - 1);
  if (top == 0.0f) return 127;
  const bool small = top < 0x1p-126f;
  const uint32_t bits = __float_as_uint(small ? top * 0x1p24f : top);
  const int carry = (bits >> (23 - F::kMantissa) & ((1u << F::kMantissa) - 1)) > kMaxMantissa;
  const int exponent = static_cast<int>(bits >> 23) - (small ? 24 : 0) + kDown<F>;
  return max(exponent - kMaxExponent + carry, 1);
}

__device__ __forceinline__ float scale_of_field(int field) {
  return __uint_as_float(static_cast<uint32_t>(field) << 23);
}

template <typename F, typename LoadNext>
__device__ __forceinline__ void shift_to_channels(Rows& rows, int channels, float* scale_inv,
                                                  Shared& shared, LoadNext load_next) {
  const int warp = threadIdx.x / 32, in_warp = threadIdx.x % 32, lane = threadIdx.x % 8;
  float scale[4];
  bool poisoned = false;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    scale[j] = scale_of_field(rows.exponent[j]);
    poisoned = poisoned || rows.exponent[j] == kPoison;
  }
#pragma unroll
  for (int four = 0; four < 4; ++four) {
    float top[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float down = scale[j] * __uint_as_float((127u - kDown<F>) << 23);
      float v[4];
      fp8_decode4<F>(rows.code[j][four], v);
      // fmaxf ignores E4M3's NaNs; E5M2's infinities are left out here.
      const uint32_t special = F::kMantissa == 3 ? 0 : specials<F>(rows.code[j][four]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (special != 0 && (special >> (8 * i + 7) & 1)) v[i] = 0.0f;
        top[i] = fmaxf(top[i], __fmul_ru(fabsf(v[i]), down));
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(kFullWarp, top[i], 8));
      top[i] = fmaxf(top[i], __shfl_xor_sync(kFullWarp, top[i], 16));
    }
    if (in_warp < 8)
      *reinterpret_cast<float4*>(&shared.channel_top[warp][16 * lane + 4 * four]) = {
          top[0], top[1], top[2], top[3]};
  }
  load_next();
  poisoned = __syncthreads_or(poisoned);
  if (threadIdx.x < 128) {
    float top = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared.channel_top[w][threadIdx.x]);
    const int field = poisoned ? kPoison : field_of<F>(top);
    if (static_cast<int>(threadIdx.x) < channels) scale_inv[threadIdx.x] = scale_of_field(field);
    // 1 / S, where only this thread read that channel's maxima.
    shared.channel_top[0][threadIdx.x] = field >= 254 ? 0x1p-127f : scale_of_field(254 - field);
  }
  __syncthreads();
#pragma unroll
  for (int four = 0; four < 4; ++four) {
    const float4 inverse =
        *reinterpret_cast<const float4*>(&shared.channel_top[0][16 * lane + 4 * four]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float v[4];
      fp8_decode4<F>(rows.code[j][four], v);
      // A ratio over 2^40 meets only zeros.
      v[0] *= fminf(scale[j] * inverse.x, 0x1p40f), v[1] *= fminf(scale[j] * inverse.y, 0x1p40f);
      v[2] *= fminf(scale[j] * inverse.z, 0x1p40f), v[3] *= fminf(scale[j] * inverse.w, 0x1p40f);
      rows.code[j][four] =
          keep_specials<F>(fp8_encode4<F>(v[0], v[1], v[2], v[3]), rows.code[j][four]);
    }
  }
}

// One thread's share of the tiles of a token block, as it comes from memory. Its codes: tokens
// 4 (t / 8) + j at channels 16 (t % 8) on. Its scale: that of token t, t < 128.
struct Incoming {
  int row[4];              // -1: no token
  const float* scale_row;  // nullptr: none
  float scale;

  template <bool kGather>
  __device__ __forceinline__ void aim(const Params& p, TokenBlock tokens) {
    const auto row_of = [&](int token) {
      const int r = tokens.first_row + token;
      return token >= tokens.tokens ? -1 : kGather ? p.plan.token_of_row[r] : r;
    };
#pragma unroll
    for (int j = 0; j < 4; ++j) row[j] = row_of(static_cast<int>(threadIdx.x) / 8 * 4 + j);
    const int own = row_of(threadIdx.x);
    scale_row = own >= 0 ? p.scale_inv + own * p.scale_row : nullptr;
  }
  template <bool kGather>
  __device__ __forceinline__ void load(const Params& p, int tile, Shared& shared) {
    const int stride = kGather ? p.stride : p.channels;
    const int channel = 128 * tile + static_cast<int>(threadIdx.x) % 8 * 16;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool there = row[j] >= 0 && channel < p.channels;  // zeros where not
      copy_async(&shared.incoming[j][threadIdx.x],
                 there ? p.codes + int64_t{row[j]} * stride + channel : p.codes, there ? 16 : 0);
    }
    copy_commit();
    scale = scale_row != nullptr ? __ldg(scale_row + tile * p.scale_tile) : 0.0f;
  }
  // The scale's exponent field; a bad scale is counted.
  __device__ __forceinline__ uint8_t exponent(const Params& p) const {
    if (is_pow2_scale(scale) || __float_as_uint(scale) == 0)
      return static_cast<uint8_t>(exponent_field(scale));
    atomicAdd(p.plan.status + kBadScale, 1);
    return kPoison;
  }
};

// kGather: neighbouring blocks take neighbouring tokens of one run of channels, so that the slice
// of the gathered rows stays in L2; else they share whole rows.
template <typename F, bool kGather, bool kPerChannel>
__global__ __launch_bounds__(kThreads, kBlocksPerSm<kPerChannel>) void shift_tiles(
    const __grid_constant__ Params p) {
  __shared__ Shared shared;
  const int lane = threadIdx.x % 8, group = threadIdx.x / 8;
  const int blocks = p.plan.col_offsets[p.plan.experts] / 128;
  const int runs = (p.tiles + p.run - 1) / p.run;
  int side = 0;
#pragma unroll 1
  for (uint32_t index = blockIdx.x; index < static_cast<uint32_t>(blocks) * runs;
       index += gridDim.x) {
    const int block = static_cast<int>(kGather ? index % blocks : index / runs);
    const int begin = static_cast<int>(kGather ? index / blocks : index % runs) * p.run;
    const int end = min(begin + p.run, p.tiles);
    Incoming next;
    next.aim<kGather>(p, token_block_of_warp(p.plan, block));
    next.load<kGather>(p, begin, shared);
    if (threadIdx.x < 128) shared.exponent[side][threadIdx.x] = next.exponent(p);
    __syncthreads();
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile, side ^= 1) {
      Rows rows;
      const uchar4 e = *reinterpret_cast<const uchar4*>(&shared.exponent[side][4 * group]);
      rows.exponent[0] = e.x, rows.exponent[1] = e.y;
      rows.exponent[2] = e.z, rows.exponent[3] = e.w;
      copy_wait<0>();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 codes = shared.incoming[j][threadIdx.x];
        rows.code[j][0] = codes.x, rows.code[j][1] = codes.y;
        rows.code[j][2] = codes.z, rows.code[j][3] = codes.w;
      }
      const bool more = tile + 1 < end;
      const auto load_next = [&] {
        if (more) next.load<kGather>(p, tile + 1, shared);
      };

      float* scale_inv = p.out.scale + tile * p.out.scale_tile + block * p.out.scale_block;
      if constexpr (kPerChannel)
        shift_to_channels<F>(rows, p.channels - 128 * tile, scale_inv, shared, load_next);
      else
        shift_to_block<F>(rows, scale_inv, shared, load_next);
#pragma unroll
      for (int four = 0; four < 4; ++four) {
        uint32_t codes[4] = {rows.code[0][four], rows.code[1][four], rows.code[2][four],
                             rows.code[3][four]};
        shared.codes.put(16 * lane + 4 * four, group, codes);
      }
      if (more && threadIdx.x < 128) shared.exponent[side ^ 1][threadIdx.x] = next.exponent(p);
      __syncthreads();
      shared.codes.store_to(p.out.data + int64_t{128} * tile * p.out.ld + int64_t{128} * block,
                            p.out.ld, p.channels - 128 * tile, 128);
    }
  }
}

// The length of runs that ends first on `slots` concurrent blocks: whole waves of runs, each run
// waiting about one tile's time for its first.
int64_t run_of(int64_t blocks, int64_t tiles, int64_t slots) {
  const auto time = [&](int64_t run) { return cdiv(blocks * cdiv(tiles, run), slots) * (run + 1); };
  int64_t best = 1;
  for (int64_t run = 2; run <= 8; ++run)
    if (time(run) < time(best)) best = run;
  return best;
}

}  // namespace

void shift_columns(const char* op, const Fp8Tensor& q, const RoutingPlan& plan, bool gather,
                   const Fp8Tensor& columns, Stream stream) {
  const RowsOut rows = rows_out(q);
  const int64_t tiles = cdiv(rows.ld, kTile), blocks = plan.columns() / kTile;
  const bool per_channel = columns.layout == ScaleLayout::gemm;
  const int per_sm = per_channel ? kBlocksPerSm<true> : kBlocksPerSm<false>;
  const int64_t run = run_of(blocks, tiles, int64_t{per_sm} * device_info(q.data.device).sm_count);
  const Params params = {.codes = rows.data,
                         .scale_inv = rows.scale,
                         .scale_row = q.layout == ScaleLayout::row ? q.scale_inv.stride() : 1,
                         .scale_tile = rows.scale_tile,
                         .channels = static_cast<int>(rows.ld),
                         .tiles = static_cast<int>(tiles),
                         .run = static_cast<int>(run),
                         .plan = view_of(plan),
                         .out = columns_out(columns),
                         .stride = static_cast<int>(q.data.stride())};
  dispatch_fp8(q.data.dtype, [&]<typename F>() {
    const auto kernel =
        gather ? (per_channel ? shift_tiles<F, true, true> : shift_tiles<F, true, false>)
               : (per_channel ? shift_tiles<F, false, true> : shift_tiles<F, false, false>);
    launch(op, kernel, persistent_grid(q.data.device, blocks * cdiv(tiles, run), per_sm), kThreads,
           0, stream_of(stream), params);
  });
}

}  // namespace fp8moe::cuda
