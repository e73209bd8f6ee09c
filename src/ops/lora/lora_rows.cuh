// What the kernels of low-rank terms share: FP8 rows where they lie, and bf16 tensor core products.
#pragma once

#include <type_traits>

#include "device/convert.cuh"
#include "device/memory.cuh"
#include "device/reduce.cuh"
#include "device/runtime.h"
#include "fp8moe/ops.h"

namespace fp8moe::cuda {

// The same value, which stays in a register: the compiler would compute it anew at each use.
template <typename T>
__device__ __forceinline__ T pinned(T value) {
  if constexpr (sizeof(T) == 8)
    asm volatile("" : "+l"(value));
  else
    asm volatile("" : "+r"(value));
  return value;
}

// Shared memory by its address there.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return pinned(static_cast<uint32_t>(__cvta_generic_to_shared(p)));
}
// As those of memory.cuh.
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_async_word(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ float2 load_shared2(uint32_t at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at));
  return v;
}
template <int N>  // words that lie together
__device__ __forceinline__ void load_shared(uint32_t (&v)[N], uint32_t at) {
  if constexpr (N == 2)
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(at));
  else
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(at));
}

__device__ __forceinline__ void store_shared(uint32_t at, const uint32_t (&v)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3])
               : "memory");
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

  // Where row r lies.
  __device__ __forceinline__ int at(int r) const {
    return token_of_row == nullptr ? r : __ldg(token_of_row + r);
  }
  __device__ __forceinline__ const uint8_t* code(int at, int column) const {
    return codes + int64_t{at} * stride + column;
  }
  __device__ __forceinline__ const float* scale(int at, int tile) const {
    return scales + int64_t{at} * scale_row + int64_t{tile} * scale_tile;
  }
};

// d += a b: a [16, 16] and b [16, 8] in T. With g = lane / 4 and c = lane % 4, a thread has a of
// rows g, g + 8 and g, g + 8 again, at k 2c, 2c + 1 and at 8 more; b of column g at the same k;
// and d of rows g and g + 8 at columns 2c, 2c + 1.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (std::is_same_v<T, Bf16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of 16-bit values, lane l having the address of row l % 8 of matrix l / 8. A
// thread gets of each the values of column g in rows 2c and 2c + 1.
__device__ __forceinline__ void load_transposed(uint32_t (&v)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(row)
               : "memory");
}

// The lower and the upper two of four codes as T, exactly: f16 has all values of both formats.
template <typename F, typename T>
__device__ __forceinline__ void decode_pairs(uint32_t codes, uint32_t& lower, uint32_t& upper) {
  if constexpr (F::kMantissa == 3)
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e4m3x2 %0, l;\n"
        " cvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(lower), "=r"(upper)
        : "r"(codes));
  else
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e5m2x2 %0, l;\n"
        " cvt.rn.f16x2.e5m2x2 %1, h;\n}"
        : "=r"(lower), "=r"(upper)
        : "r"(codes));
  if constexpr (std::is_same_v<T, Bf16>) {
    const float2 a = unpack2<Fp16>(lower), b = unpack2<Fp16>(upper);
    lower = pack2<Bf16>(a.x, a.y), upper = pack2<Bf16>(b.x, b.y);
  }
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
