// What the kernels of shift_columns.cu share: a block of 256 threads for a tile of 128 tokens and
// 128 channels, 8 lanes a token, a thread with 4 tokens at 16 channels.
#pragma once

#include "cuda/device/outputs.cuh"
#include "cuda/device/plan.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/transposed_codes.cuh"

namespace fp8moe::cuda::shift {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kMagnitudes = 0x7F7F7F7Fu;
constexpr int kPoison = 255;  // exponent field of infinity: what a bad scale counts as

struct Params {
  const uint8_t* codes;  // [rows, C]
  const float* scale_inv;
  int64_t scale_row, scale_tile;
  int64_t stride;  // of rows
  int channels;
  bool gather;
  PlanView plan;
  ColumnsOut out;  // [C, Kcap]
};

// The scale's exponent field; kPoison for one that is neither zero nor a power of two.
__device__ __forceinline__ int exponent_or_poison(float scale) {
  return is_pow2_scale(scale) || __float_as_uint(scale) == 0 ? exponent_field(scale) : kPoison;
}

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

__device__ __forceinline__ float scale_of_field(int field) {
  return __uint_as_float(static_cast<uint32_t>(field) << 23);
}

__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// A thread's 4 tokens at 16 channels: tokens 4 (t / 8) + j at channels 16 (t % 8) on.
struct Rows {
  uint32_t code[4][4];  // [token][4 channels each]
  uint32_t exponents;   // a byte a token, see exponent()

  // Field of the token's scale; 0: zero scale or no token; kPoison: a bad scale.
  __device__ __forceinline__ int exponent(int j) const { return exponents >> (8 * j) & 0xFF; }

  // Zeros where there is nothing. Bad scales are counted. Whole warps.
  __device__ __forceinline__ void load(const Params& p, TokenBlock tokens, int tile) {
    const int lane = threadIdx.x % 8, token = threadIdx.x / 8 * 4 + lane % 4;
    int row = -1;  // of one token of the four; the others' come from the lanes beside
    if (token < tokens.tokens) {
      row = tokens.first_row + token;
      if (p.gather) row = p.plan.token_of_row[row];
    }
    float scale = 0.0f;
    if (row >= 0) scale = __ldg(p.scale_inv + row * p.scale_row + tile * p.scale_tile);
    const int channel = 128 * tile + 16 * lane;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int of_token = __shfl_sync(kFullWarp, row, j, 8);
      uint4 codes = {};
      if (of_token >= 0 && channel < p.channels)
        codes = load_once<uint4>(p.codes + of_token * p.stride + channel);
      code[j][0] = codes.x, code[j][1] = codes.y, code[j][2] = codes.z, code[j][3] = codes.w;
    }
    const int field = exponent_or_poison(scale);
    if (field == kPoison && lane < 4) atomicAdd(p.plan.status + kBadScale, 1);
    exponents = static_cast<uint32_t>(field) << (8 * (lane % 4));
    exponents |= __shfl_xor_sync(kFullWarp, exponents, 1);
    exponents |= __shfl_xor_sync(kFullWarp, exponents, 2);
  }
  // What was made of the rows so far is made again, not kept: registers are scarcer.
  __device__ __forceinline__ void make_again() {
    asm volatile("" : "+r"(exponents));
#pragma unroll
    for (uint32_t (&of_token)[4] : code)
#pragma unroll
      for (uint32_t& codes : of_token) asm volatile("" : "+r"(codes));
  }
};

}  // namespace fp8moe::cuda::shift
