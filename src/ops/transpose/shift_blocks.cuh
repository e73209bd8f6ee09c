// The tiles of transpose_cuda.cu that have one scale S. It is taken as the largest scale of all
// tokens, known before codes arrive, and each thread shifts its own as they do; where that was
// wrong, or codes are special, the tile is made again.
#pragma once

#include "ops/transpose/shift_tile.cuh"

namespace fp8moe::cuda::shift {

constexpr int kTileBlocksPerSm = 12;

struct TileShared {
  TileCodes codes;
  int top[kWarps];  // of each warp's tokens
  int reached;      // S is the scale of a token with a nonzero code
};

// The shift by k <= kFp8ShiftToZero as one or two products in f16. A product that is not exact lies
// under a quarter of the format's least subnormal, so only what becomes zero is rounded twice.
// 2^-k in both halves; of E5M2 two halves whose product is 2^-k.
template <typename F>
__device__ __forceinline__ uint32_t shift_factors(int k) {
  const int k1 = F::kMantissa == 3 ? k : min(k, 24), k2 = F::kMantissa == 3 ? k : k - k1;
  return pack2<Fp16>(scale_of_field(127 - k1), scale_of_field(127 - k2));
}
template <typename F>
__device__ __forceinline__ uint32_t shift_halves(uint32_t halves, uint32_t factors) {
  if constexpr (F::kMantissa == 3) return multiply_halves(halves, factors);
  return multiply_halves(multiply_halves(halves, first_twice(factors)), second_twice(factors));
}
constexpr uint32_t kNoShift = 0x3C003C00u;  // factors of k = 0

// sum + halves 2^-7: of 32 pairs of codes finite if and only if all of them are.
__device__ __forceinline__ uint32_t add_scaled(uint32_t sum, uint32_t halves) {
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(halves), "r"(0x20002000u));
  return sum;
}
__device__ __forceinline__ bool is_finite(uint32_t halves) {
  return (((halves & 0x7FFF7FFFu) + 0x04000400u) & 0x80008000u) == 0;
}

// The largest of a block's values. A barrier.
__device__ __forceinline__ int tile_max(int value, int (&of_warp)[kWarps]) {
  value = __reduce_max_sync(kFullWarp, value);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  return max(max(of_warp[0], of_warp[1]), max(of_warp[2], of_warp[3]));
}

// How the codes of a token get to the scale of field `top`.
template <typename F>
__device__ __forceinline__ uint32_t factors_of_token(int field, int top) {
  return shift_factors<F>(field == 0 ? kFp8ShiftToZero<F>
                                     : min(max(top - field, 0), kFp8ShiftToZero<F>));
}

// This thread's codes shifted and transposed in place, first a vector a token, then one for every 4
// channels, a word of 4 tokens each. kKeepSpecials: specials stay what they are.
// Otherwise false if there are any; `reached` becomes true with a nonzero code of S's scale.
template <typename F, bool kKeepSpecials>
__device__ __forceinline__ bool shift_codes(const TokenOfTile& token, int top, TileShared& shared,
                                            bool& reached) {
  const uint32_t factors_of_own = factors_of_token<F>(token.field, top);
  uint32_t sum_low = 0, sum_high = 0, at_top = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 0) copy_wait<1>();
    if (half == 1) copy_wait<0>();
    uint32_t code[4][4], factors[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 v = token.vector(shared.codes, half, j);
      code[j][0] = v.x, code[j][1] = v.y, code[j][2] = v.z, code[j][3] = v.w;
      factors[j] = __shfl_sync(kFullWarp, factors_of_own, 4 * half + j, 8);
      if (factors[j] == kNoShift) at_top |= v.x | v.y | v.z | v.w;
    }
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      uint32_t low[4], high[4], shifted[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        low[j] = shift_halves<F>(halves_of_codes<F, 0>(code[j][four]), factors[j]);
        high[j] = shift_halves<F>(halves_of_codes<F, 1>(code[j][four]), factors[j]);
        sum_low = add_scaled(sum_low, low[j]), sum_high = add_scaled(sum_high, high[j]);
      }
      transposed_codes<F>(low, shifted[0], shifted[1]);
      transposed_codes<F>(high, shifted[2], shifted[3]);
      if constexpr (kKeepSpecials) {
        uint32_t before[4] = {code[0][four], code[1][four], code[2][four], code[3][four]};
        transpose_4x4(before);
#pragma unroll
        for (int i = 0; i < 4; ++i) shifted[i] = keep_specials<F>(shifted[i], before[i]);
      }
      token.vector(shared.codes, half, four) = {shifted[0], shifted[1], shifted[2], shifted[3]};
    }
  }
  reached = (at_top & kMagnitudes) != 0;
  return is_finite(sum_low) && is_finite(sum_high);
}

// The tile made again, of any codes. Returns the field of S = the largest scale among tokens that
// hold a nonzero code, 1 where none does.
template <typename F>
__device__ __forceinline__ int shift_any_codes(const Params& p, const TokenOfTile& token, int tile,
                                               TileShared& shared) {
  token.copy_codes(p, tile, shared.codes);
  copy_wait<0>();
  int top = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint4 v = token.vector(shared.codes, j / 4, j % 4);
    const int field = __shfl_sync(kFullWarp, token.field, j, 8);
    if (((v.x | v.y | v.z | v.w) & kMagnitudes) != 0 || field == kPoison) top = max(top, field);
  }
  top = tile_max(top, shared.top);
  if (top == 0) top = 127;
  bool reached;
  shift_codes<F, true>(token, top, shared, reached);
  __syncthreads();
  return top;
}

// Channels below `channels` to rows of out, `ld` apart: 8 threads a channel, 16 tokens a thread.
__device__ __forceinline__ void store_tile(const TileCodes& codes, uint8_t* out, int64_t ld,
                                           int channels) {
  constexpr int kGroup = 128;  // words of 4 tokens at all channels
  const int chunk = threadIdx.x % 8, begin = threadIdx.x / 8;
  const auto* word = reinterpret_cast<const uint32_t*>(codes.vector) + 4 * kGroup * chunk +
                     begin / 4 * 32 + begin % 4;
  out += begin * ld + 16 * chunk;
#pragma unroll
  for (int first = 0; first < 8; first += 4) {
    uint4 v[4];  // read whether stored or not: no branches
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t* at = word + 4 * ((first + i) ^ chunk);
      v[i] = {at[0], at[kGroup], at[2 * kGroup], at[3 * kGroup]};
    }
#pragma unroll
    for (int i = 0; i < 4; ++i, out += 16 * ld)
      store_if(16 * (first + i) + begin < channels, out, v[i]);
  }
}

template <typename F, bool kScalesByRow>
__global__ __launch_bounds__(kThreads,
                             kTileBlocksPerSm) void shift_tiles(const __grid_constant__ Params p) {
  __shared__ TileShared shared;
  const int block = block_of_tokens(p), tile = blockIdx.y;
  const TokenBlock tokens = token_block(p.plan, block);
  if (tokens.expert < 0) return;
  TokenOfTile token{};
  token.load<kScalesByRow>(p, tokens, tile, shared.codes);
  if (threadIdx.x == 0) shared.reached = 0;
  int top = tile_max(token.field, shared.top);
  bool reached;
  const bool ordinary = shift_codes<F, false>(token, top, shared, reached);
  if (reached || top == 0 || top == kPoison) shared.reached = 1;
  if (__syncthreads_or(!ordinary) || !shared.reached)
    top = shift_any_codes<F>(p, token, tile, shared);
  if (threadIdx.x == 0)
    p.out.scale[tile * p.out.scale_tile + block * p.out.scale_block] =
        scale_of_field(top == 0 ? 127 : top);
  store_tile(shared.codes, p.out.data + int64_t{128} * tile * p.out.ld + int64_t{128} * block,
             p.out.ld, p.channels - 128 * tile);
}

}  // namespace fp8moe::cuda::shift
