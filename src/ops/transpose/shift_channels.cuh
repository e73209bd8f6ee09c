// The tiles of transpose_cuda.cu where each channel has its own scale S. A thread takes its codes
// from shared memory once, shifts and transposes them in registers, and stores them. In packed f16,
// two channels an instruction: value = code * 2^-k (k: how far the token's scale is under the
// tile's largest), the channels' largest values, code' = value * 2^raise. Powers of two are exact
// there as long as value fits; warps whose channels do not, or hold specials, compute in f32.
#pragma once

#include "ops/transpose/shift_tile.cuh"

namespace fp8moe::cuda::shift {

constexpr int kChannelBlocksPerSm = 9;
constexpr int kLeastBase = 32;  // exponent field: what is made of it in f32 stays normal

// Codes come times 2^kUp, so that more of f16's exponents are of use. Down to 2^-kExact of the base
// they are exact, subnormals and all; from 2^-kZero on their factor is zero.
template <typename F>
constexpr int kUp = F::kMantissa == 3 ? 7 : 0;  // 448 2^7 = 57344
template <typename F>
constexpr int kZero = kUp<F> + 15;
template <typename F>
constexpr int kExact = F::kMantissa == 3 ? 21 : 8;

// Real values times 2^-kDown fit in f32, large scales and all. Those that do not fit below are
// under every scale there is; they only count as not zero.
template <typename F>
constexpr int kDown = F::kMantissa == 3 ? 9 : 16;

// Of the largest code; and what takes a significand over its own, in f16, to the next exponent.
template <typename F>
constexpr int kMaxExponent = static_cast<int>(F::kMaxCode >> F::kMantissa) - F::kBias;
template <typename F>
constexpr uint32_t kCarry = F::kMantissa == 3 ? 0x80 : 0;

struct ChannelShared {
  TileCodes codes;
  // f16, of each token, what its codes are multiplied by; NaN if no f16 can be that.
  // [token / 8 % 2][token / 16][token % 8]: no bank conflicts.
  alignas(128) uint16_t factor[kThreads];
  // Exponent field of each token's scale; 0: a zero scale or no token; kPoison: a bad scale.
  alignas(128) uint8_t field[kThreads];

  // The largest field.
  __device__ __forceinline__ int top() const {
    const uint32_t four = reinterpret_cast<const uint32_t*>(field)[threadIdx.x % 32];
    const uint32_t two = __vmaxu2(four & 0xFF00FFu, four >> 8 & 0xFF00FFu);
    return static_cast<int>(__reduce_max_sync(kFullWarp, max(two & 0xFFFFu, two >> 16)));
  }
  // Read after a barrier.
  __device__ __forceinline__ void set_factor(uint32_t of_token) {
    const unsigned token = threadIdx.x;
    factor[token / 8 % 2 * 64 + token / 16 * 8 + token % 8] = static_cast<uint16_t>(of_token);
  }
};

// What a thread shifts and stores, of its warp's first 16 channels, then of the next: 16 tokens at
// 4 channels. Vec8 lanes have all tokens of the same channels.
struct Patch {
  static constexpr int kToken = 32;  // words from a token to the next

  unsigned first;  // of its tokens' words, each of four codes
  int channels;    // from the warp's first one on, those past the matrix's last not counted
  uint8_t* out;    // the first channel's codes

  __device__ __forceinline__ Patch(const Params& p, int block, int tile) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    first = 512 * (lane % 8) + 4 * (2 * warp ^ lane % 8) + lane / 8;
    channels = p.channels - 128 * tile - static_cast<int>(32 * warp);
    out = p.out.data + strides(128 * tile + static_cast<int>(channel()), p.out.ld) +
          (128 * block + static_cast<int>(first_token()));
  }
  // The first one, and the first token, within the tile.
  static __device__ __forceinline__ unsigned channel() {
    return threadIdx.x / 32 * 32 + threadIdx.x % 32 / 8 * 4;
  }
  static __device__ __forceinline__ unsigned first_token() { return threadIdx.x % 8 * 16; }

  __device__ __forceinline__ void next(int64_t ld) { first ^= 4, channels -= 16, out += 16 * ld; }

  __device__ __forceinline__ uint32_t* words(ChannelShared& shared) const {
    return reinterpret_cast<uint32_t*>(shared.codes.vector) + first;
  }
  __device__ __forceinline__ void load(ChannelShared& shared, uint32_t (&code)[16]) const {
    const uint32_t* word = words(shared);
#pragma unroll
    for (int j = 0; j < 16; ++j) code[j] = word[kToken * j];
  }
  // Two tokens' each.
  static __device__ __forceinline__ void load_factors(const ChannelShared& shared,
                                                      uint32_t (&factors)[8]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 v = *reinterpret_cast<const uint4*>(&shared.factor[64 * i + threadIdx.x % 8 * 8]);
      factors[4 * i] = v.x, factors[4 * i + 1] = v.y;
      factors[4 * i + 2] = v.z, factors[4 * i + 3] = v.w;
    }
  }
  // code[4 q + i]: channel i at tokens 4 q ... 4 q + 3.
  __device__ __forceinline__ void store(const uint32_t (&code)[16], int64_t ld) const {
    uint8_t* to = out;
#pragma unroll
    for (int i = 0; i < 4; ++i, to += ld)
      cuda::store(to, uint4{code[i], code[4 + i], code[8 + i], code[12 + i]});
  }
};

// f16: what a token's codes are multiplied by. NaN where none is exact.
template <typename F>
__device__ __forceinline__ uint32_t channel_factor(int field, int base) {
  if (base == kPoison || (field != 0 && base - field > kExact<F>)) return 0x7FFF;
  return max(field - (base - kZero<F>), 0) << 10;
}

// max(most, |v|) of two packed pairs; NaN where there is one.
__device__ __forceinline__ uint32_t most_or_nan(uint32_t most, uint32_t v) {
  asm("{\n .reg .b32 m;\n abs.f16x2 m, %1;\n max.NaN.f16x2 %0, %0, m;\n}" : "+r"(most) : "r"(v));
  return most;
}

// Of two channels, `most` in f16 times 2^(kUp - base): how their codes get from there to their
// scales. False if f16 cannot: specials, or values far under their tokens' scales.
template <typename F>
__device__ __forceinline__ bool raise_of(uint32_t most, uint32_t& raise) {
  constexpr uint32_t kBoth = 0x00010001u;
  constexpr uint32_t kLeast = (static_cast<uint32_t>(kMaxExponent<F>) << 10) * kBoth;
  const uint32_t over = most | 0x80008000u;  // minuends that borrow nothing from each other
  const uint32_t small = (over - kBoth) & ~(over - kLeast);  // neither zero nor large enough
  raise = ((static_cast<uint32_t>(kMaxExponent<F> + 30) << 10) * kBoth -
           ((most + kCarry<F> * kBoth) & 0x7C007C00u)) &
          0x7C007C00u;
  return ((small | (most + 0x04000400u)) & 0x80008000u) == 0;
}

// False, and nothing written, if it cannot be done in f16. scale_inv: of the thread's channels.
template <typename F>
__device__ __forceinline__ bool shift_channels_in_f16(const Patch& patch, int base,
                                                      ChannelShared& shared, int64_t ld,
                                                      float* scale_inv) {
  uint32_t code[16], factors[8], low[16], high[16];
  patch.load_factors(shared, factors);
  patch.load(shared, code);
  uint32_t most[2] = {};  // of two channels each
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    const uint32_t by = first_twice(factors[j / 2]), next = second_twice(factors[j / 2]);
    low[j] = multiply_halves(halves_of_codes<F, 0>(code[j]), by);
    high[j] = multiply_halves(halves_of_codes<F, 1>(code[j]), by);
    low[j + 1] = multiply_halves(halves_of_codes<F, 0>(code[j + 1]), next);
    high[j + 1] = multiply_halves(halves_of_codes<F, 1>(code[j + 1]), next);
    most[0] = most_or_nan(most_or_nan(most[0], low[j]), low[j + 1]);
    most[1] = most_or_nan(most_or_nan(most[1], high[j]), high[j + 1]);
  }
  // Of the eight lanes of the same channels four get the first two, four the others.
  const bool second = (threadIdx.x & 4) != 0;
  const uint32_t given = __shfl_xor_sync(kFullWarp, second ? most[0] : most[1], 4);
  uint32_t top = most_or_nan(second ? most[1] : most[0], given);
  top = most_or_nan(top, __shfl_xor_sync(kFullWarp, top, 2));
  top = most_or_nan(top, __shfl_xor_sync(kFullWarp, top, 1));
  uint32_t raise;
  if (!__all_sync(kFullWarp, raise_of<F>(top, raise))) return false;
  const uint32_t of_channel = threadIdx.x % 2 != 0 ? top >> 16 : top & 0xFFFFu;
  const int exponent = static_cast<int>((of_channel + kCarry<F>) >> 10);
  const int field = base + exponent - (15 + kUp<F> + kMaxExponent<F>);
  // Four of the eight store one of the four scales each.
  const unsigned own = threadIdx.x % 8 / 4 * 2 + threadIdx.x % 2;
  if (threadIdx.x % 4 < 2) scale_inv[own] = scale_of_field(of_channel == 0 ? 127 : field);
  const uint32_t other = __shfl_xor_sync(kFullWarp, raise, 4);
  const uint32_t raise_low = second ? other : raise, raise_high = second ? raise : other;
#pragma unroll
  for (int four = 0; four < 16; four += 4) {
    uint32_t first[4], last[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      first[j] = multiply_halves(low[four + j], raise_low);
      last[j] = multiply_halves(high[four + j], raise_high);
    }
    transposed_codes<F>(first, code[four], code[four + 1]);
    transposed_codes<F>(last, code[four + 2], code[four + 3]);
  }
  patch.store(code, ld);
  return true;
}

// S of a channel = the smallest power of two whose largest code holds the channel's largest value,
// `top` (times 2^-kDown). Its exponent field.
template <typename F>
__device__ __forceinline__ int field_of(float top) {
  if (top == 0.0f) return 127;
  const bool small = top < 0x1p-126f;
  const uint32_t bits = __float_as_uint(small ? top * 0x1p24f : top) + (kCarry<F> << 13);
  return max(static_cast<int>(bits >> 23) - (small ? 24 : 0) + kDown<F> - kMaxExponent<F>, 1);
}

// The same of any codes, in f32.
template <typename F>
__device__ __forceinline__ void shift_any_channels(const Patch& patch, int base,
                                                   ChannelShared& shared, int64_t ld,
                                                   float* scale_inv) {
  uint32_t* word = patch.words(shared);
  float top[4] = {}, inverse[4];
#pragma unroll 1
  for (int j = 0; j < 16; ++j) {
    const uint32_t code = word[Patch::kToken * j] & kMagnitudes;
    const float scale = scale_of_field(shared.field[Patch::first_token() + j]);
    float v[4];
    fp8_decode4<F>(code, v);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if ((code >> 8 * i & 0xFF) < F::kFirstNan)
        top[i] = fmaxf(top[i], __fmul_ru(v[i], scale * scale_of_field(127 - kDown<F>)));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int field = base == kPoison ? kPoison : field_of<F>(lanes_max<8>(top[i]));
    if (threadIdx.x % 8 == 0) scale_inv[i] = scale_of_field(field);
    inverse[i] = field >= 254 ? 0x1p-127f : scale_of_field(254 - field);
  }
#pragma unroll 1
  for (int four = 0; four < 4; ++four, word += 4 * Patch::kToken) {
    uint32_t codes[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t code = word[Patch::kToken * j];
      const float scale = scale_of_field(shared.field[Patch::first_token() + 4 * four + j]);
      float v[4];
      fp8_decode4<F>(code, v);
      // A ratio over 2^40 meets only zeros.
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] *= fminf(scale * inverse[i], 0x1p40f);
      codes[j] = keep_specials<F>(fp8_encode4<F>(v[0], v[1], v[2], v[3]), code);
    }
    transpose_4x4(codes);
#pragma unroll
    for (int i = 0; i < 4; ++i) word[Patch::kToken * i] = codes[i];  // nobody else's
  }
  uint32_t code[16];
  patch.load(shared, code);
  patch.store(code, ld);
}

// The scale of a token without a nonzero code does not count. Between barriers, codes being there.
__device__ __forceinline__ void forget_scales_of_zeros(ChannelShared& shared) {
  const unsigned lane = threadIdx.x % 8, eight = threadIdx.x / 8;
#pragma unroll 1
  for (unsigned j = 0; j < 8; ++j) {
    const uint4 v = shared.codes.vector[64 * eight + 8 * j + lane];
    const unsigned any = __ballot_sync(kFullWarp, ((v.x | v.y | v.z | v.w) & kMagnitudes) != 0);
    uint8_t& field = shared.field[8 * eight + j];
    if (lane == 0 && (any >> (8 * (eight % 4)) & 0xFF) == 0 && field != kPoison) field = 0;
  }
}

template <typename F, bool kScalesByRow>
__global__ __launch_bounds__(kThreads, kChannelBlocksPerSm) void shift_channels(
    const __grid_constant__ Params p) {
  __shared__ ChannelShared shared;
  const int block = block_of_tokens(p), tile = blockIdx.y;
  const TokenBlock tokens = token_block(p.plan, block);
  if (tokens.expert < 0) return;
  TokenOfTile token{};
  token.load<kScalesByRow>(p, tokens, tile, shared.codes);
  shared.field[threadIdx.x] = static_cast<uint8_t>(token.field);
  __syncthreads();
  int base = max(shared.top(), kLeastBase);
  shared.set_factor(channel_factor<F>(token.field, base));
  copy_wait<0>();
  if (__syncthreads_or(token.field != 0 && base - token.field > kExact<F>)) {
    forget_scales_of_zeros(shared);
    __syncthreads();
    base = max(shared.top(), kLeastBase);
    shared.set_factor(channel_factor<F>(shared.field[threadIdx.x], base));
    __syncthreads();
  }
  Patch patch(p, block, tile);
  float* scale_inv =
      p.out.scale + strides(block, p.out.scale_block) + (128 * tile + Patch::channel());
#pragma unroll 1
  for (int half = 0; half < 2 && patch.channels > 0;
       ++half, patch.next(p.out.ld), scale_inv += 16) {
    if (!shift_channels_in_f16<F>(patch, base, shared, p.out.ld, scale_inv))
      shift_any_channels<F>(patch, base, shared, p.out.ld, scale_inv);
  }
}

}  // namespace fp8moe::cuda::shift
