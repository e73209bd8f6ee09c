// What the kernels of low-rank terms share: FP8 rows where they lie, and bf16 tensor core products.
#pragma once

#include "device/convert.cuh"
#include "device/memory.cuh"
#include "device/reduce.cuh"
#include "device/runtime.h"
#include "fp8moe/ops.h"

namespace fp8moe::cuda {

// Where byte `column` of row `row` lies in a tile of kColumns codes per row: pieces of 16 bytes
// change places by the row, so that what a warp reads or writes at once lies in all banks.
template <int kColumns>
__device__ __forceinline__ int code_at(int row, int column) {
  static_assert(kColumns == 128 || kColumns == 64);
  const int at = row * kColumns + column;
  return kColumns == 128 ? at ^ (row % 8 * 16) : at ^ (row / 2 % 4 * 32);
}

// Rows [R, C] in gemm layout, or [T, C] in row layout by their tokens.
struct LoraRows {
  const uint8_t* codes;
  const float* scales;
  int stride;                   // bytes between rows
  int scale_row, scale_tile;    // between the scales of rows, and of tiles
  const int32_t* token_of_row;  // nullptr: row r lies at r
  int c;

  static LoraRows of(const Fp8Tensor& rows, const RoutingPlan& plan) {
    const bool gemm = rows.layout == ScaleLayout::gemm;
    const int64_t scale_row = gemm ? 1 : rows.scale_inv.stride();
    const int64_t scale_tile = gemm ? rows.scale_inv.shape[1] : 1;
    return {.codes = rows.data.as<const uint8_t>(),
            .scales = rows.scale_inv.as<const float>(),
            .stride = static_cast<int>(rows.data.stride()),
            .scale_row = static_cast<int>(scale_row),
            .scale_tile = static_cast<int>(scale_tile),
            .token_of_row = gemm ? nullptr : plan.token_of_row(),
            .c = static_cast<int>(rows.data.shape[1])};
  }

  // Where row r lies; -1 for one that is not `wanted`.
  __device__ __forceinline__ int at(int r, bool wanted) const {
    if (!wanted) return -1;
    return token_of_row == nullptr ? r : __ldg(token_of_row + r);
  }
  __device__ __forceinline__ const uint8_t* code(int at, int column) const {
    return codes + int64_t{at} * stride + column;
  }
  __device__ __forceinline__ const float* scale(int at, int tile) const {
    return scales + int64_t{at} * scale_row + int64_t{tile} * scale_tile;
  }
};

// The same product as mul of f32 rounded to bf16, where both are bf16.
__device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// d += a b: a [16, 16] and b [16, 8] in bf16. With g = lane / 4 and c = lane % 4, a thread has a of
// rows g, g + 8 and g, g + 8 again, at k 2c, 2c + 1 and at 8 more; b of column g at the same k;
// and d of rows g and g + 8 at columns 2c, 2c + 1.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of 16-bit values, lane l having the address of row l % 8 of matrix l / 8. A
// thread gets of each the values of column g in rows 2c and 2c + 1.
__device__ __forceinline__ void load_transposed(uint32_t (&v)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// The lower (upper) two of four codes as bf16, exactly.
template <typename F>
__device__ __forceinline__ void to_bf16x2(uint32_t codes, uint32_t& lower, uint32_t& upper) {
  uint32_t low, high;
  if constexpr (F::kMantissa == 3)
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e4m3x2 %0, l;\n"
        " cvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
  else
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e5m2x2 %0, l;\n"
        " cvt.rn.f16x2.e5m2x2 %1, h;\n}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
  const float2 a = unpack2<Fp16>(low), b = unpack2<Fp16>(high);
  lower = pack2<Bf16>(a.x, a.y), upper = pack2<Bf16>(b.x, b.y);
}

// f.operator()<r'>() of a rank rounded up to 16.
template <typename F>
void with_ranks(int64_t rank, F&& f) {
  switch (cdiv(rank, 16)) {
    case 1: return f.template operator()<16>();
    case 2: return f.template operator()<32>();
    case 3: return f.template operator()<48>();
    default: return f.template operator()<64>();
  }
}

}  // namespace fp8moe::cuda
