// Sums in wgmma's register layout to D, through shared memory and TMA. A warp stores its own 16
// rows, and so waits for no other.
#pragma once

#include <cuda_bf16.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "cuda/gemm/params.h"
#include "cuda/gemm/promote.cuh"
#include "cuda/gemm/stage.h"

namespace fp8moe::cuda::gemm {

// Where a warpgroup's [64, N] part of a tile goes in D.
struct Destination {
  int row = 0, column = 0, expert = 0;  // of the part's first element
  int rows = 0;                         // rows to write
  int columns = 0;                      // columns to write, a multiple of 16

  __device__ int64_t element(const Params& params) const {
    return (int64_t{expert} * params.m + row) * params.n + column;
  }
};

// A slab lies under TMA's 128-byte swizzle: the 16 bytes w of row r at w ^ r % 8. D is not read
// again while L2 holds it, hence the hint. One thread.
__device__ __forceinline__ void send_slab(const CUtensorMap& d, const uint8_t* slab, int column,
                                          int row, int expert, bool add) {
  constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
  const uint32_t from = cute::cast_smem_ptr_to_uint(slab);
  if (add)
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group.L2::cache_hint "
        "[%0, {%2, %3, %4}], [%1], %5;" ::"l"(&d),
        "r"(from), "r"(column), "r"(row), "r"(expert), "l"(kHint)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint "
        "[%0, {%2, %3, %4}], [%1], %5;" ::"l"(&d),
        "r"(from), "r"(column), "r"(row), "r"(expert), "l"(kHint)
        : "memory");
}

// Sends a warp's slabs [First, Last) of a tile's rows, of Columns columns each; the first one lies
// at `slabs`. Row by row where an expert's rows end within them: TMA would write the next expert's.
// Rows past those of tokens_* lie outside of D, and TMA leaves them out.
template <Kind kKind, int Columns, int First, int Last>
__device__ __forceinline__ void send(const Params& params, const Destination& to, int warp,
                                     const uint8_t* slabs) {
  const int row = to.row + kSlabRows * warp, rows = to.rows - kSlabRows * warp;
  if (kKind != Kind::rows || rows >= kSlabRows) {
    if (rows > 0 && cute::elect_one_sync()) {
#pragma unroll
      for (int s = First; s < Last; ++s)
        if (s * Columns < to.columns)
          send_slab(params.d_map, slabs + (s - First) * kSlabBytes, to.column + s * Columns, row,
                    to.expert, kKind != Kind::rows && params.add);
    }
  } else {
    constexpr int kBytes = 128 / Columns;  // of an element
    const int lane = threadIdx.x % 32, word = lane % 8;
    auto* d = static_cast<uint8_t*>(params.d) + (int64_t{row} * params.n + to.column) * kBytes +
              16 * word;
    for (int s = First; s < Last; ++s) {
      if (s * Columns + 16 / kBytes * word >= to.columns) break;
      for (int r = lane / 8; r < rows; r += 4)
        __stcs(reinterpret_cast<uint4*>(d + int64_t{r} * params.n * kBytes + 128 * s),
               *reinterpret_cast<const uint4*>(slabs + (s - First) * kSlabBytes + 128 * r +
                                               16 * (word ^ r % 8)));
    }
  }
}

// Waits until at most Pending of the warp's earlier stores still read their slabs.
template <int Pending>
__device__ __forceinline__ void await_slabs() {
  cute::tma_store_wait<Pending>();
  __syncwarp();
}

__device__ __forceinline__ void slabs_written() {
  cute::tma_store_fence();
  __syncwarp();
}

__device__ __forceinline__ uint32_t round_bf16(float2 pair) {
  const __nv_bfloat162 v = __float22bfloat162_rn(pair);
  return reinterpret_cast<const uint32_t&>(v);
}

// A thread of a warpgroup holds, of a [64, N] part: sums[2 g] of row r, columns 8 g + 2 q + 0, 1,
// and sums[2 g + 1] of row r + 8, with r = 16 warp + lane / 4, q = lane % 4.
template <Kind kKind, int N>
__device__ __forceinline__ void store_bf16(const SumPair<kKind> (&sums)[N / 4],
                                           const Params& params, const Destination& to, int warp,
                                           uint8_t* slabs) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t mine = cute::cast_smem_ptr_to_uint(slabs) + lane % 16 * 128;
  const uint32_t word = (lane / 16 ^ lane % 8) * 16;
  await_slabs<0>();
#pragma unroll
  for (int g = 0; g < N / 16; ++g) {
    const SumPair<kKind>* s = &sums[4 * g];
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     mine + g / 4 * kSlabBytes + (word ^ g % 4 * 32)),
                 "r"(round_bf16(columns(s[0]))), "r"(round_bf16(columns(s[1]))),
                 "r"(round_bf16(columns(s[2]))), "r"(round_bf16(columns(s[3])))
                 : "memory");
  }
  slabs_written();
  send<kKind, 64, 0, N / 64>(params, to, warp, slabs);
  cute::tma_store_arrive();
}

// Slab S of 32 columns and those after it. Words, the second one of a pair first in odd rows: no
// conflict of shared-memory banks.
template <Kind kKind, int N, int S = 0>
__device__ __forceinline__ void store_f32(const SumPair<kKind> (&sums)[N / 4], const Params& params,
                                          const Destination& to, int warp, uint8_t* slabs) {
  if constexpr (S < N / 32) {
    const uint32_t lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
    uint8_t* slab = slabs + S % kSlabs * kSlabBytes;
    const uint32_t mine = cute::cast_smem_ptr_to_uint(slab) + r * 128 + q % 2 * 8 + r % 2 * 4;
    const uint32_t word = (q / 2 ^ r) * 16;
    await_slabs<S == 0 ? 0 : kSlabs - 1>();  // the tile before may have ended with any slab
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int lower = i % 2;
      const float2 pair = columns(sums[2 * (4 * S + i / 2) + lower]);
      const uint32_t at = mine + lower * 1024 + (word ^ i / 2 * 32);
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(r % 2 ? pair.y : pair.x) : "memory");
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(at ^ 4), "f"(r % 2 ? pair.x : pair.y)
                   : "memory");
    }
    slabs_written();
    send<kKind, 32, S, S + 1>(params, to, warp, slab);
    cute::tma_store_arrive();
    store_f32<kKind, N, S + 1>(sums, params, to, warp, slabs);
  }
}

template <Kind kKind, int N, Output kOutput>
__device__ __forceinline__ void store(const SumPair<kKind> (&sums)[N / 4], const Params& params,
                                      const Destination& to, int warp, uint8_t* slabs) {
  if (kOutput == Output::bf16 || (kOutput == Output::either && params.bf16))
    store_bf16<kKind, N>(sums, params, to, warp, slabs);
  else
    store_f32<kKind, N>(sums, params, to, warp, slabs);
}

// Zeros, for an expert without tokens. One warpgroup.
__device__ inline void store_zeros(const Params& params, const Destination& to) {
  const int bytes = params.bf16 ? 2 : 4;
  const int per_row = to.columns * bytes / 16;  // 16-byte words
  for (int i = threadIdx.x % 128; i < 64 * per_row; i += 128) {
    const int row = i / per_row, word = i - row * per_row;
    if (row >= to.rows) break;
    const int64_t at = (to.element(params) + int64_t{row} * params.n) * bytes + 16 * word;
    __stcs(reinterpret_cast<uint4*>(static_cast<uint8_t*>(params.d) + at), make_uint4(0, 0, 0, 0));
  }
}

}  // namespace fp8moe::cuda::gemm
