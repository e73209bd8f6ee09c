// The tiles of shift_columns.cu where each channel has its own scale S. Two passes over a tile's
// codes, in packed f16, two channels an instruction: the channels' largest values,
// then the codes, as value = code * 2^-k (k: how far the token's scale is under the largest of its
// warp) and code' = value * 2^raise. Powers of two are exact there as long as value fits; the warps
// whose tokens spread too far, or hold specials, compute in f32 instead.
#pragma once

#include "cuda/device/shift_tile.cuh"

namespace fp8moe::cuda::shift {

constexpr int kChannelBlocksPerSm = 11;
constexpr int kLeastBase = 32;  // exponent field: what is made of it in f32 stays normal

struct ChannelShared {
  TileCodes codes;
  alignas(16) float top[kWarps][128];  // of each warp's tokens, times 2^-kDown; [0]: then 1 / S
  alignas(16) uint16_t raise[128];     // f16, from the largest base of the tile's warps
  int base[kWarps];                    // exponent field: the largest scale of the warp's tokens
};

// f16: 2^x, -14 <= x <= 15, in both halves.
__device__ __forceinline__ uint32_t halves_of_exponent(int x) {
  return static_cast<uint32_t>(x + 15) * 0x04000400u;
}

// Codes come times 2^kUp, so that more of f16's exponents are of use. Down to 2^-kExact of the base
// they are exact, subnormals and all; from 2^-kZero on their factor is zero.
template <typename F>
constexpr int kUp = F::kMantissa == 3 ? 7 : 0;  // 448 2^7 = 57344
template <typename F>
constexpr int kZero = kUp<F> + 15;
template <typename F>
constexpr int kExact = F::kMantissa == 3 ? 21 : 8;

// max(most, |v|) of two packed pairs; NaN where there is one.
__device__ __forceinline__ uint32_t most_or_nan(uint32_t most, uint32_t v) {
  asm("{\n .reg .b32 m;\n abs.f16x2 m, %1;\n max.NaN.f16x2 %0, %0, m;\n}" : "+r"(most) : "r"(v));
  return most;
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

// How f16 holds the codes of a warp's tokens.
struct Factors {
  uint32_t own;  // of the thread's token: 2^(kUp - k), zero for one without values
  int base;      // of the warp
  unsigned far;  // bits of tokens whose values, if they have any, are not exact

  template <typename F>
  __device__ __forceinline__ void set(int field) {
    base = max(__reduce_max_sync(kFullWarp, field), kLeastBase);
    own = static_cast<uint32_t>(max(field - (base - kZero<F>), 0)) * 0x04000400u;
    far = __ballot_sync(kFullWarp, field != 0 && base - field > kExact<F>);
  }
  // Whether f16 holds all of the thread's codes, specials aside.
  __device__ __forceinline__ bool exact(const TokenOfTile& token, TileCodes& codes) const {
    if (far == 0) return true;
    const unsigned of_eight = far >> (threadIdx.x % 32 / 8 * 8);
    uint32_t any = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint4 v = token.vector(codes, j / 4, j % 4);
      if (of_eight >> j & 1) any |= v.x | v.y | v.z | v.w;
    }
    return (any & kMagnitudes) == 0;
  }
};

// The largest values of the warp's tokens at each channel. True if f16 could tell.
template <typename F>
__device__ __forceinline__ bool channel_tops_in_f16(const TokenOfTile& token,
                                                    const Factors& factors, TileCodes& codes,
                                                    float (&top)[128]) {
  const int in_warp = threadIdx.x % 32, lane = threadIdx.x % 8, group = in_warp / 8;
  uint32_t most[8] = {};  // of channel pairs
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 0) copy_wait<1>();
    if (half == 1) copy_wait<0>();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 v = token.vector(codes, half, j);
      const uint32_t code[4] = {v.x, v.y, v.z, v.w};
      const uint32_t by = __shfl_sync(kFullWarp, factors.own, 4 * half + j, 8);
#pragma unroll
      for (int four = 0; four < 4; ++four) {
        uint32_t &low = most[2 * four], &high = most[2 * four + 1];
        low = most_or_nan(low, multiply_halves(halves_of_codes<F, 0>(code[four]), by));
        high = most_or_nan(high, multiply_halves(halves_of_codes<F, 1>(code[four]), by));
      }
    }
  }
  // Of the four lanes of the same channels each ends with the maxima of a quarter of them.
#pragma unroll
  for (int n = 4, step = 16; n >= 2; n /= 2, step /= 2) {
    const bool second = (in_warp & step) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const uint32_t keep = second ? most[i + n] : most[i], give = second ? most[i] : most[i + n];
      most[i] = most_or_nan(keep, __shfl_xor_sync(kFullWarp, give, step));
    }
  }
  // An infinity or a NaN overflows into its half's sign.
  const uint32_t special = (most_or_nan(most[0], most[1]) + 0x04000400u) & 0x80008000u;
  if (!__all_sync(kFullWarp, special == 0 && factors.exact(token, codes))) return false;
  const float unit = scale_of_field(factors.base - kUp<F> - kDown<F>);
  const float2 a = unpack2<Fp16>(most[0]), b = unpack2<Fp16>(most[1]);
  *reinterpret_cast<float4*>(&top[16 * lane + 4 * group]) = {a.x * unit, a.y * unit, b.x * unit,
                                                             b.y * unit};
  return true;
}

// The same of any scales and codes. A word of codes at a time, to need few registers.
template <typename F>
__device__ __forceinline__ void channel_tops_in_f32(const TokenOfTile& token, TileCodes& codes,
                                                    float (&tops)[128]) {
  const int in_warp = threadIdx.x % 32, lane = threadIdx.x % 8;
#pragma unroll 1
  for (int four = 0; four < 4; ++four) {
    float top[4] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t word =
          reinterpret_cast<const uint32_t*>(&token.vector(codes, j / 4, j % 4))[four];
      const float scale = scale_of_field(__shfl_sync(kFullWarp, token.field, j, 8));
      const float down = scale * scale_of_field(127 - kDown<F>);
      float v[4];
      fp8_decode4<F>(word, v);
      // fmaxf ignores E4M3's NaNs; E5M2's infinities are left out here.
      const uint32_t special = F::kMantissa == 3 ? 0 : specials<F>(word);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (special >> (8 * i + 7) & 1) v[i] = 0.0f;
        top[i] = fmaxf(top[i], __fmul_ru(fabsf(v[i]), down));
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(kFullWarp, top[i], 8));
      top[i] = fmaxf(top[i], __shfl_xor_sync(kFullWarp, top[i], 16));
    }
    if (in_warp < 8)
      *reinterpret_cast<float4*>(&tops[16 * lane + 4 * four]) = {top[0], top[1], top[2], top[3]};
  }
}

// Of channel threadIdx.x: S, and how codes get there. True if f16 cannot, whose largest power
// of two is 2^15: a channel of values far under its tokens' scales.
template <typename F>
__device__ __forceinline__ bool set_scale(ChannelShared& shared, int base, int channels,
                                          float* scale_inv) {
  const int channel = threadIdx.x;
  float top = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared.top[w][channel]);
  const int field = base == kPoison ? kPoison : field_of<F>(top);
  if (channel < channels) scale_inv[channel] = scale_of_field(field);
  // 1 / S, where only this thread read that channel's maxima.
  shared.top[0][channel] = field >= 254 ? 0x1p-127f : scale_of_field(254 - field);
  const int raise = base - field - kUp<F>;  // of a channel without values: anything
  shared.raise[channel] = static_cast<uint16_t>(halves_of_exponent(max(min(raise, 15), -14)));
  return top > 0.0f && raise > 15;
}

// The codes of half of the thread's tokens, to be replaced in place.
struct HalfOfCodes {
  uint32_t code[4][4];  // [token][4 channels each]

  __device__ __forceinline__ HalfOfCodes(const TokenOfTile& token, TileCodes& codes, int half) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 v = token.vector(codes, half, j);
      code[j][0] = v.x, code[j][1] = v.y, code[j][2] = v.z, code[j][3] = v.w;
    }
  }
};

// The shift in f16: a product that is not exact is subnormal there, far under the format's least
// subnormal, so only what becomes zero is rounded twice. `under`: the warp's base to the tile's.
template <typename F>
__device__ __forceinline__ void shift_in_f16(const TokenOfTile& token, const Factors& factors,
                                             int under, ChannelShared& shared) {
  const int lane = threadIdx.x % 8;
  const uint32_t factor = halves_of_exponent(-under);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const HalfOfCodes before(token, shared.codes, half);
    uint32_t by[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) by[j] = __shfl_sync(kFullWarp, factors.own, 4 * half + j, 8);
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const uint2 raise = *reinterpret_cast<const uint2*>(&shared.raise[16 * lane + 4 * four]);
      const uint32_t raise_low = multiply_halves(raise.x, factor);
      const uint32_t raise_high = multiply_halves(raise.y, factor);
      uint32_t low[4], high[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t code = before.code[j][four];
        low[j] = multiply_halves(multiply_halves(halves_of_codes<F, 0>(code), by[j]), raise_low);
        high[j] = multiply_halves(multiply_halves(halves_of_codes<F, 1>(code), by[j]), raise_high);
      }
      uint4 after;
      transposed_codes<F>(low, after.x, after.y);
      transposed_codes<F>(high, after.z, after.w);
      token.vector(shared.codes, half, four) = after;
    }
  }
}

template <typename F>
__device__ __forceinline__ void shift_in_f32(const TokenOfTile& token, ChannelShared& shared) {
  const int lane = threadIdx.x % 8;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const HalfOfCodes before(token, shared.codes, half);
    float scale[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      scale[j] = scale_of_field(__shfl_sync(kFullWarp, token.field, 4 * half + j, 8));
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const float4 inverse = *reinterpret_cast<const float4*>(&shared.top[0][16 * lane + 4 * four]);
      uint32_t codes[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t code = before.code[j][four];
        float v[4];
        fp8_decode4<F>(code, v);
        // A ratio over 2^40 meets only zeros.
        v[0] *= fminf(scale[j] * inverse.x, 0x1p40f), v[1] *= fminf(scale[j] * inverse.y, 0x1p40f);
        v[2] *= fminf(scale[j] * inverse.z, 0x1p40f), v[3] *= fminf(scale[j] * inverse.w, 0x1p40f);
        codes[j] = keep_specials<F>(fp8_encode4<F>(v[0], v[1], v[2], v[3]), code);
      }
      transpose_4x4(codes);
      token.vector(shared.codes, half, four) = {codes[0], codes[1], codes[2], codes[3]};
    }
  }
}

template <typename F, bool kScalesByRow>
__global__ __launch_bounds__(kThreads, kChannelBlocksPerSm) void shift_channels(
    const __grid_constant__ Params p) {
  __shared__ ChannelShared shared;
  const int block = blockIdx.x, tile = blockIdx.y, warp = threadIdx.x / 32;
  const TokenBlock tokens = token_block(p.plan, block);
  if (tokens.expert < 0) return;
  TokenOfTile token{};
  token.load<kScalesByRow>(p, tokens, tile, shared.codes);
  Factors factors;
  factors.set<F>(token.field);
  const bool in_f16 = channel_tops_in_f16<F>(token, factors, shared.codes, shared.top[warp]);
  if (!in_f16) channel_tops_in_f32<F>(token, shared.codes, shared.top[warp]);
  if (threadIdx.x % 32 == 0) shared.base[warp] = factors.base;
  __syncthreads();

  const int base = __reduce_max_sync(kFullWarp, shared.base[threadIdx.x % kWarps]);
  const int channels = p.channels - 128 * tile;
  const bool steep = set_scale<F>(
      shared, base, channels, p.out.scale + tile * p.out.scale_tile + block * p.out.scale_block);
  const bool any_steep = __syncthreads_or(steep);
  if (any_steep || !in_f16 || base - factors.base > 14)
    shift_in_f32<F>(token, shared);
  else
    shift_in_f16<F>(token, factors, base - factors.base, shared);
  __syncthreads();
  store_tile(shared.codes, p.out.data + int64_t{128} * tile * p.out.ld + int64_t{128} * block,
             p.out.ld, channels);
}

}  // namespace fp8moe::cuda::shift
