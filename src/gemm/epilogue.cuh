// Sums in wgmma's register layout to D, through shared memory and TMA. A warp stores its own 16
// rows, and so waits for no other.
#pragma once

#include <cuda_bf16.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/params.h"
#include "gemm/promote.cuh"
#include "gemm/ring.cuh"
#include "gemm/stage.h"

namespace fp8moe::cuda::gemm {

// Where a warpgroup's [64, N] part of a tile goes in D.
struct Destination {
  int row = 0, column = 0, expert = 0;  // of the part's first element
  int rows = 0;                         // rows to write
  int columns = 0;                      // columns to write, a multiple of 16
  bool whole = false;                   // of a whole tile

  __device__ int64_t element(const Params& params) const {
    return (int64_t{expert} * params.m + row) * params.n + column;
  }
};

// D is not read again while L2 holds it.
inline constexpr auto kOutputHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);

// Sends a box of 128 bytes of columns (Params::d_box), which lies under TMA's swizzle: the 16 bytes
// w of row r at w ^ r % 8. One thread.
__device__ __forceinline__ void send_box(const Params& params, const uint8_t* box, int column,
                                         int row, int expert, bool add) {
  const uint32_t from = cute::cast_smem_ptr_to_uint(box);
  if (add)
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group.L2::cache_hint "
        "[%0, {%2, %3, %4}], [%1], %5;" ::"l"(&params.d_box),
        "r"(from), "r"(column), "r"(row), "r"(expert), "l"(kOutputHint)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint "
        "[%0, {%2, %3, %4}], [%1], %5;" ::"l"(&params.d_box),
        "r"(from), "r"(column), "r"(row), "r"(expert), "l"(kOutputHint)
        : "memory");
}

// Sends several such boxes side by side (Params::d_strip), the first one being D's box number
// `number`. An instruction takes TMA as long as 600 bytes do. One thread.
__device__ __forceinline__ void send_strip(const Params& params, const uint8_t* boxes, int number,
                                           int row, int expert, bool add) {
  const uint32_t from = cute::cast_smem_ptr_to_uint(boxes);
  if (add)
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group.L2::cache_hint "
        "[%0, {%2, %3, %4, %5}], [%1], %6;" ::"l"(&params.d_strip),
        "r"(from), "r"(0), "r"(row), "r"(number), "r"(expert), "l"(kOutputHint)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint "
        "[%0, {%2, %3, %4, %5}], [%1], %6;" ::"l"(&params.d_strip),
        "r"(from), "r"(0), "r"(row), "r"(number), "r"(expert), "l"(kOutputHint)
        : "memory");
}

// Sends a warp's staging buffers [First, Last) of a tile's rows, of Columns columns each; the first
// one lies at `staging`. Row by row where an expert's rows end within them: TMA would write the
// next expert's. Rows past those of wgrad lie outside of D, and TMA leaves them out.
template <Kind kKind, int Columns, int First, int Last>
__device__ __forceinline__ void send(const Params& params, const Destination& to, int warp,
                                     const uint8_t* staging) {
  const int row = to.row + kStagingRows * warp, rows = to.rows - kStagingRows * warp;
  if (kKind != Kind::fprop || rows >= kStagingRows) {
    if (rows > 0 && cute::elect_one_sync()) {
      const bool add = kKind != Kind::fprop && params.add;
      if (Columns == 64 && params.strips && to.whole) {
        send_strip(params, staging, to.column / 64, row, to.expert, add);
      } else {
#pragma unroll
        for (int s = First; s < Last; ++s)
          if (s * Columns < to.columns)
            send_box(params, staging + (s - First) * kStagingBytes, to.column + s * Columns, row,
                     to.expert, add);
      }
    }
  } else {
    constexpr int kBytes = 128 / Columns;  // of an element
    const int lane = threadIdx.x % 32, word = lane % 8;
    auto* d = static_cast<uint8_t*>(params.d) + (int64_t{row} * params.n + to.column) * kBytes +
              16 * word;
    for (int s = First; s < Last; ++s) {
      if (s * Columns + 16 / kBytes * word >= to.columns) break;
      for (int r = lane / 8; r < min(kStagingRows, rows); r += 4)
        __stcs(reinterpret_cast<uint4*>(d + int64_t{r} * params.n * kBytes + s * Columns * kBytes),
               *reinterpret_cast<const uint4*>(staging + (s - First) * kStagingBytes + 128 * r +
                                               16 * (word ^ r % 8)));
    }
  }
}

// Waits until at most Pending of the warp's earlier stores still read their staging buffers.
template <int Pending>
__device__ __forceinline__ void await_staging() {
  cute::tma_store_wait<Pending>();
  __syncwarp();
}

__device__ __forceinline__ void staging_written() {
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
                                           uint8_t* staging) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t mine = cute::cast_smem_ptr_to_uint(staging) + lane % 16 * 128;
  const uint32_t word = (lane / 16 ^ lane % 8) * 16;
  await_staging<0>();
#pragma unroll
  for (int g = 0; g < N / 16; ++g) {
    const SumPair<kKind>* s = &sums[4 * g];
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     mine + g / 4 * kStagingBytes + (word ^ g % 4 * 32)),
                 "r"(round_bf16(columns(s[0]))), "r"(round_bf16(columns(s[1]))),
                 "r"(round_bf16(columns(s[2]))), "r"(round_bf16(columns(s[3])))
                 : "memory");
  }
  staging_written();
  send<kKind, 64, 0, N / 64>(params, to, warp, staging);
  cute::tma_store_arrive();
}

__device__ __forceinline__ float read_shared(uint32_t at) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ void write_shared(uint32_t at, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}

// What staging buffer s of a warp's 16 rows of f32 holds. Of rows: 16 rows of 32 columns, as in
// store_bf16. Of wgrad: 8 rows of 64 columns in two boxes, first the upper 8 of all columns, then
// the lower: so a warp sends whole rows of its tile at a time, which are neighbours in memory.
struct StagingPlace {
  int row, column;
};

template <Kind kKind, int N>
constexpr StagingPlace staging_place(int s) {
  if (kKind == Kind::fprop) return {.row = 0, .column = 32 * s};
  return {.row = s / (N / 64) * kHalfStagingRows, .column = s % (N / 64) * 64};
}

// Sends a staging buffer of wgrad; TMA leaves out what lies outside of D.
template <Kind kKind>
__device__ __forceinline__ void send_staging(const Params& params, const Destination& to, int warp,
                                             StagingPlace place, const uint8_t* buffer,
                                             bool reduce) {
  if (!cute::elect_one_sync()) return;
  const int row = to.row + kStagingRows * warp + place.row, column = to.column + place.column;
  if (params.strips) return send_strip(params, buffer, column / 32, row, to.expert, reduce);
#pragma unroll
  for (int box = 0; box < 2; ++box)
    send_box(params, buffer + box * kHalfStagingBytes, column + 32 * box, row, to.expert, reduce);
}

// The sums of staging buffer S into it, or (Onto) onto what it holds. Words, the second one of a
// pair first in odd rows: no conflict of shared-memory banks.
template <Kind kKind, int N, bool Onto, int S>
__device__ __forceinline__ void fill_staging(const SumPair<kKind> (&sums)[N / 4], uint8_t* buffer) {
  constexpr bool kHalves = kKind != Kind::fprop;
  constexpr StagingPlace kPlace = staging_place<kKind, N>(S);
  const uint32_t lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
  const uint32_t mine = cute::cast_smem_ptr_to_uint(buffer) + r * 128 + q % 2 * 8 + r % 2 * 4;
  const uint32_t word = (q / 2 ^ r) * 16;
  // Of 8 rows of 8 columns each: which of a staging buffer's two boxes, which columns, whether the
  // lower rows.
  const auto at = [&](int i) {
    const int box = kHalves ? i / 4 : i % 2, group = kHalves ? i % 4 : i / 2;
    return mine + box * kHalfStagingBytes + (word ^ group * 32);
  };
  constexpr int kHeld = 4;  // with more ptxas spills
#pragma unroll
  for (int first = 0; first < 8; first += kHeld) {
    float2 held[kHeld];
    if constexpr (Onto) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j)
        held[j] = {read_shared(at(first + j)), read_shared(at(first + j) ^ 4)};
    }
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int i = first + j, group = kPlace.column / 8 + (kHalves ? i : i / 2);
      const int lower = kHalves ? kPlace.row / kHalfStagingRows : i % 2;
      const float2 pair = columns(sums[2 * group + lower]);
      float2 v{r % 2 ? pair.y : pair.x, r % 2 ? pair.x : pair.y};
      if constexpr (Onto) v = {held[j].x + v.x, held[j].y + v.y};
      write_shared(at(i), v.x);
      write_shared(at(i) ^ 4, v.y);
    }
  }
  staging_written();
}

// Staging buffer S of a tile and those after it, by way of Buffers places.
template <Kind kKind, int Buffers, int N, int S = 0>
__device__ __forceinline__ void store_f32(const SumPair<kKind> (&sums)[N / 4], const Params& params,
                                          const Destination& to, int warp, uint8_t* staging) {
  if constexpr (S < N / 32) {
    uint8_t* buffer = staging + S % Buffers * kStagingBytes;
    await_staging<S == 0 ? 0 : Buffers - 1>();  // the tile before may have ended with any staging
                                                // buffer
    fill_staging<kKind, N, false, S>(sums, buffer);
    if constexpr (kKind == Kind::fprop)
      send<kKind, 32, S, S + 1>(params, to, warp, buffer);
    else
      send_staging<kKind>(params, to, warp, staging_place<kKind, N>(S), buffer, params.add);
    cute::tma_store_arrive();
    store_f32<kKind, Buffers, N, S + 1>(sums, params, to, warp, staging);
  }
}

// Where D is loaded, half as many staging buffers as a tile has are in use, each twice: so `full`
// has the same phase at the start of every tile.
template <int N>
inline constexpr int kLoadedBuffers = N / 64;

// Brings what D holds for staging buffer s.
template <Kind kKind, int N>
__device__ __forceinline__ void load_d(const Params& params, const Destination& to, int warp, int s,
                                       uint8_t* staging, FullBarrier* full) {
  if (!cute::elect_one_sync()) return;
  const StagingPlace place = staging_place<kKind, N>(s);
  const int row = to.row + kStagingRows * warp + place.row, column = to.column + place.column;
  uint8_t* buffer = staging + s % kLoadedBuffers<N> * kStagingBytes;
  full[s % kLoadedBuffers<N>].arrive_and_expect_tx(kStagingBytes);
  auto* barrier = reinterpret_cast<uint64_t*>(&full[s % kLoadedBuffers<N>]);
  if (params.strips)
    return cute::SM90_TMA_LOAD_4D::copy(&params.d_strip, barrier, kOutputHint, buffer, 0, row,
                                        column / 32, to.expert);
#pragma unroll
  for (int box = 0; box < 2; ++box)
    cute::SM90_TMA_LOAD_3D::copy(&params.d_box, barrier, kOutputHint,
                                 buffer + box * kHalfStagingBytes, column + 32 * box, row,
                                 to.expert);
}

// Asks for the first half of what D holds, long before it is needed.
template <Kind kKind, int N>
__device__ __forceinline__ void load_d_first(const Params& params, const Destination& to, int warp,
                                             uint8_t* staging, FullBarrier* full) {
  await_staging<0>();
#pragma unroll
  for (int s = 0; s < kLoadedBuffers<N>; ++s) load_d<kKind, N>(params, to, warp, s, staging, full);
}

// The same onto what D holds, which comes into the staging buffers, is added to, and leaves again.
template <Kind kKind, int N, int S = 0>
__device__ __forceinline__ void add_f32(const SumPair<kKind> (&sums)[N / 4], const Params& params,
                                        const Destination& to, int warp, uint8_t* staging,
                                        FullBarrier* full) {
  constexpr int kAll = N / 32;
  if constexpr (S < kAll) {
    uint8_t* buffer = staging + S % kLoadedBuffers<N> * kStagingBytes;
    await(full[S % kLoadedBuffers<N>], S / kLoadedBuffers<N>);
    fill_staging<kKind, N, true, S>(sums, buffer);
    send_staging<kKind>(params, to, warp, staging_place<kKind, N>(S), buffer, false);
    cute::tma_store_arrive();
    // A staging buffer that has left is loaded into again, the first half's last one before any of
    // the second half is waited for.
    if constexpr (S > 0 && S < kLoadedBuffers<N>) {
      await_staging<1>();
      load_d<kKind, N>(params, to, warp, S - 1 + kLoadedBuffers<N>, staging, full);
    }
    if constexpr (S == kLoadedBuffers<N> - 1) {
      await_staging<0>();
      load_d<kKind, N>(params, to, warp, S + kLoadedBuffers<N>, staging, full);
    }
    add_f32<kKind, N, S + 1>(sums, params, to, warp, staging, full);
  }
}

template <Kind kKind, int Buffers, int N, Output kOutput>
__device__ __forceinline__ void store(const SumPair<kKind> (&sums)[N / 4], const Params& params,
                                      const Destination& to, int warp, uint8_t* staging,
                                      FullBarrier* staging_full) {
  static_assert(kLoadedBuffers<N> <= Buffers && N / 64 <= Buffers);
  if (kOutput == Output::bf16 || (kOutput == Output::either && params.bf16))
    store_bf16<kKind, N>(sums, params, to, warp, staging);
  else if (kKind != Kind::fprop && params.load_d)
    add_f32<kKind, N>(sums, params, to, warp, staging, staging_full);
  else
    store_f32<kKind, Buffers, N>(sums, params, to, warp, staging);
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
