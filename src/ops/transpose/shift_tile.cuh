// What the kernels of transpose_cuda.cu share: a block of 128 threads for a tile of 128 tokens and
// 128 channels. Codes wait in shared memory, not in registers, so that 9 to 12 tiles of an SM are
// on their way.
#pragma once

#include "device/outputs.cuh"
#include "device/plan.cuh"
#include "device/reduce.cuh"
#include "device/transposed_codes.cuh"

namespace fp8moe::cuda::shift {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kMagnitudes = 0x7F7F7F7Fu;
constexpr int kPoison = 255;  // exponent field of infinity: what a bad scale counts as

struct Params {
  const uint8_t* codes;  // [rows, C]
  const float* scale_inv;
  const float* scale_end;
  int64_t scale_tile;
  uint32_t scale_row;
  uint32_t stride;  // of rows
  int channels;
  bool gather;
  int log_windows;  // of tokens, see block_in_windows
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

// One of two packed halves, twice: moves that a product takes in.
__device__ __forceinline__ uint32_t first_twice(uint32_t halves) {
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %0;\n mov.b32 %0, {l, l};\n}" : "+r"(halves));
  return halves;
}
__device__ __forceinline__ uint32_t second_twice(uint32_t halves) {
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %0;\n mov.b32 %0, {h, h};\n}" : "+r"(halves));
  return halves;
}

// Codes 2 kPair and the next of a word. A code of E5M2 is the upper half of its f16.
template <typename F, int kPair>
__device__ __forceinline__ uint32_t halves_of_codes(uint32_t codes) {
  if constexpr (F::kMantissa == 2) return __byte_perm(codes, 0, kPair == 0 ? 0x1404 : 0x3424);
  uint32_t halves;
  if constexpr (kPair == 0)
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n cvt.rn.f16x2.e4m3x2 %0, l;\n}"
        : "=r"(halves)
        : "r"(codes));
  else
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n cvt.rn.f16x2.e4m3x2 %0, h;\n}"
        : "=r"(halves)
        : "r"(codes));
  return halves;
}

// The codes of two pairs.
template <typename F>
__device__ __forceinline__ uint32_t codes_of_halves(uint32_t first, uint32_t second) {
  uint32_t codes;
  if constexpr (F::kMantissa == 3)
    asm("{\n .reg .b16 l, h;\n cvt.rn.satfinite.e4m3x2.f16x2 l, %1;\n"
        " cvt.rn.satfinite.e4m3x2.f16x2 h, %2;\n mov.b32 %0, {l, h};\n}"
        : "=r"(codes)
        : "r"(first), "r"(second));
  else
    asm("{\n .reg .b16 l, h;\n cvt.rn.satfinite.e5m2x2.f16x2 l, %1;\n"
        " cvt.rn.satfinite.e5m2x2.f16x2 h, %2;\n mov.b32 %0, {l, h};\n}"
        : "=r"(codes)
        : "r"(first), "r"(second));
  return codes;
}

// Two channels of 4 tokens -> a word of codes each.
template <typename F>
__device__ __forceinline__ void transposed_codes(const uint32_t (&halves)[4], uint32_t& first,
                                                 uint32_t& second) {
  first = codes_of_halves<F>(halves[0], halves[1]);
  second = codes_of_halves<F>(halves[2], halves[3]);
  transpose_pairs(first, second);
}

// [token][channel / 16], the vectors of a token swizzled by token / 16: no bank conflicts.
struct TileCodes {
  alignas(128) uint4 vector[kThreads * 8];
};

// The block of 128 tokens that a block of threads takes.
__device__ __forceinline__ int block_of_tokens(const Params& p) {
  const int index = static_cast<int>(blockIdx.x);
  return p.log_windows == 0 ? index : block_in_windows(p.plan, p.log_windows, index);
}

// What a thread has of its tile as codes arrive: one token's row and scale, 16 channels of the 8
// tokens of its lanes.
struct TokenOfTile {
  int row;    // -1: none
  int field;  // of its scale; 0: zero scale or no token; kPoison: a bad scale
  int own;    // the first of its vectors

  __device__ __forceinline__ uint4& vector(TileCodes& codes, int half, int i) const {
    return codes.vector[own + 32 * half + 8 * i];
  }

  // Zeros where there is nothing. Of 8 tokens the first four arrive by copy_wait<1>.
  __device__ __forceinline__ void copy_codes(const Params& p, int tile, TileCodes& codes) const {
    const int channel = 128 * tile + 16 * static_cast<int>(threadIdx.x % 8);
    const uint8_t* from = p.codes + channel;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int of_token = __shfl_sync(kFullWarp, row, 4 * half + j, 8);
        const bool wanted = of_token >= 0 && channel < p.channels;
        copy_async_of_pair(&vector(codes, half, j),
                           from + uint64_t{static_cast<uint32_t>(max(of_token, 0))} * p.stride,
                           wanted ? 16 : 0);
      }
      copy_commit();
    }
  }
  // kScalesByRow: those of neighbouring tokens are far apart, and loads of them would hold a line
  // of L1 each. The 16 bytes around one go by it instead; scale_inv is a multiple of 16. Bad scales
  // are counted.
  template <bool kScalesByRow>
  __device__ __forceinline__ void load(const Params& p, TokenBlock tokens, int tile,
                                       TileCodes& codes) {
    const int token = threadIdx.x, lane = token % 8, eight = token / 8;
    own = 64 * eight + (lane ^ (eight / 2));
    asm volatile("" : "+r"(own));  // kept, not made again
    row = -1;
    if (token < tokens.tokens) {
      row = tokens.first_row + token;
      if (p.gather) row = p.plan.token_of_row[row];
    }
    const float* from = p.scale_inv + strides(tile, p.scale_tile) +
                        uint64_t{static_cast<uint32_t>(max(row, 0))} * p.scale_row;
    float scale = 0.0f;
    if constexpr (kScalesByRow) {
      __shared__ float4 near[kThreads];
      const auto at = reinterpret_cast<uintptr_t>(from) & ~uintptr_t{15};
      // Less than 16 bytes can be asked for, but memcheck takes them for 16.
      const bool whole = at + 16 <= reinterpret_cast<uintptr_t>(p.scale_end);
      copy_async(&near[token], reinterpret_cast<const void*>(at), row >= 0 && whole ? 16 : 0);
      copy_commit();
      copy_codes(p, tile, codes);
      copy_wait<2>();
      scale =
          reinterpret_cast<const float*>(&near[token])[reinterpret_cast<uintptr_t>(from) / 4 % 4];
      if (row >= 0 && !whole) scale = __ldg(from);
    } else {
      if (row >= 0) scale = __ldg(from);
      copy_codes(p, tile, codes);
    }
    field = exponent_or_poison(scale);
    if (field == kPoison) atomicAdd(p.plan.status + kBadScale, 1);
  }
};

}  // namespace fp8moe::cuda::shift
