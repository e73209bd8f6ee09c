// What the kernels of shift_columns.cu share: a block of 256 threads walks the channel tiles of a
// block of 128 tokens, a thread with 4 tokens at 16 channels of each.
#pragma once

#include "cuda/device/eight.cuh"
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
  int channels, tiles;
  int run;  // tiles
  PlanView plan;
  ColumnsOut out;  // [C, Kcap]
  int stride;      // of gathered rows
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

__device__ __forceinline__ float scale_of_field(int field) {
  return __uint_as_float(static_cast<uint32_t>(field) << 23);
}

__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// A thread's 4 tokens at 16 channels.
struct Rows {
  uint32_t code[4][4];  // [token][4 channels each]
  int exponent[4];      // field of the scale; 0: zero scale or no token; kPoison: a bad scale

  // From a vector of four.
  template <typename Four>
  __device__ __forceinline__ void take_exponents(const Four& of) {
    exponent[0] = of.x, exponent[1] = of.y, exponent[2] = of.z, exponent[3] = of.w;
  }
  // As Incoming left them.
  __device__ __forceinline__ void take_codes(const uint4 (&from)[4][kThreads]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 codes = from[j][threadIdx.x];
      code[j][0] = codes.x, code[j][1] = codes.y, code[j][2] = codes.z, code[j][3] = codes.w;
    }
  }
};

struct Run {
  int block;       // of tokens
  int begin, end;  // tiles of channels
};

// Where runs lie. kGather: neighbouring blocks take neighbouring tokens of one run of channels, so
// that the slice of the gathered rows stays in L2; else they share whole rows.
struct Runs {
  uint32_t blocks, runs;

  __device__ __forceinline__ explicit Runs(const Params& p)
      : blocks(p.plan.col_offsets[p.plan.experts] / 128), runs((p.tiles + p.run - 1) / p.run) {}
  __device__ __forceinline__ uint32_t count() const { return blocks * runs; }
  template <bool kGather>
  __device__ __forceinline__ Run at(uint32_t index, const Params& p) const {
    const int begin = static_cast<int>(kGather ? index / blocks : index % runs) * p.run;
    return {.block = static_cast<int>(kGather ? index % blocks : index / runs),
            .begin = begin,
            .end = min(begin + p.run, p.tiles)};
  }
};

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
  __device__ __forceinline__ void load_codes(const Params& p, int tile,
                                             uint4 (&to)[4][kThreads]) const {
    const int stride = kGather ? p.stride : p.channels;
    const int channel = 128 * tile + static_cast<int>(threadIdx.x) % 8 * 16;
    const uint8_t* from = p.codes + channel;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Zeros where there is nothing; the address is not used then.
      const bool there = row[j] >= 0 && channel < p.channels;
      copy_async(&to[j][threadIdx.x], from + int64_t{row[j]} * stride, there ? 16 : 0);
    }
    copy_commit();
  }
  __device__ __forceinline__ void load_scale(const Params& p, int tile) {
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

}  // namespace fp8moe::cuda::shift
