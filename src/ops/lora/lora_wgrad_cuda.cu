// lora_wgrad: dfactor[e] = u[rows of e]^T rows[rows of e], from FP8 rows as they lie.
#include <algorithm>
#include <cmath>

#include "common/backends.h"
#include "common/dispatch.h"
#include "ops/lora/lora_rows.cuh"

namespace fp8moe::cuda {
namespace {

struct WgradParams {
  LoraRows rows;
  const uint16_t* u;  // [R, rank]
  const int32_t *row_offsets, *tokens_per_expert;
  void* dfactor;  // [E, rank, C] or [E, C, rank]
  int rank;
  bool rank_first, bf16;
};

constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16, kStages = 4;

template <int kRanks>
struct Wgrad {
  static constexpr int kColumns = kRanks == 16 ? 128 : 64;  // of a warp
  static constexpr int kAcross = 128 / kColumns;            // warps side by side
  static constexpr int kDown = kWarps / kAcross;            // warps that share the rows
  static constexpr int kMany = kColumns / 8;                // columns of a thread that lie together
  // A warp's stage: codes of 16 rows, their rows of u, their scales; in bytes.
  static constexpr int kUStride = 2 * kRanks + 16;
  static constexpr int kUAt = kRows * kColumns;
  static constexpr int kScalesAt = kUAt + kRows * kUStride;
  static constexpr int kStage = kScalesAt + 4 * kRows;
  // Sums on their way out, [kDown, kRanks, 128] floats; four more behind each 32 columns.
  static constexpr int kOutRank = 128 + 16, kOut = kRanks * kOutRank;
  static constexpr int kShared = std::max(kWarps * kStages * kStage, 4 * kDown * kOut);

  // Where byte `column` of row `row` of the codes lies: pieces of 16 change places by the row, so
  // that what a warp reads or writes at once lies in all banks.
  __device__ static int code_at(int row, int column) {
    const int at = row * kColumns + column;
    return kColumns == 128 ? at ^ (row % 8 * 16) : at ^ (row / 2 % 4 * 32);
  }
  // Of the same column `more` rows on, if they are the next four of eight, or eights.
  __device__ static int rows_on(int at, int more) {
    return (kColumns == 128 ? at ^ (more % 8 * 16) : at) + more * kColumns;
  }
  __device__ static int out_at(int rank, int column) {
    return rank * kOutRank + column + column / 32 * 4;
  }
};

// A block per expert and 128 columns. A warp sums over every kDown-th 16 of the expert's rows,
// which it brings itself, in ascending order; then the warps' sums are added in order. A thread
// takes kMany columns that lie together, one for each of as many products.
template <typename F, int kRanks>
__global__ __launch_bounds__(kThreads, kRanks <= 32
                                           ? 4
                                           : 2) void wgrad(const __grid_constant__ WgradParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  using W = Wgrad<kRanks>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const int tile = static_cast<int>(blockIdx.x), expert = static_cast<int>(blockIdx.y);
  const int begin = __ldg(p.row_offsets + expert);
  const int tokens = __ldg(p.tokens_per_expert + expert);
  const int first = kRows * (warp / W::kAcross), side = warp % W::kAcross * W::kColumns;
  constexpr int kStride = W::kDown * kRows;  // rows from a step to the next
  const int steps = max(tokens - first + kStride - 1, 0) / kStride;

  // What this lane brings: pieces of 16 codes of rows from `row` on, the scale of row lane % 16,
  // pieces of eight of u. Rows past the last token are that one again, with zeros of u.
  constexpr int kPieces = W::kColumns / 16, kAtOnce = 32 / kPieces;
  constexpr int kUPieces = kRanks == 48 ? 8 : kRanks / 8, kUAtOnce = 32 / kUPieces;
  const int column = 128 * tile + side + lane % kPieces * 16;
  const int u_row = lane / kUPieces, u_rank = lane % kUPieces * 8;
  const uint8_t* const codes = pinned(p.rows.codes + (column < p.rows.c ? column : 0));
  const float* const scales = pinned(p.rows.scale(0, tile));
  const uint16_t* u = p.u + (int64_t{begin + first + u_row} * p.rank + min(u_rank, p.rank - 8));
  int u_left = u_rank < p.rank ? tokens - first - u_row : 0;
  const uint32_t own = shared_address(shared + warp * (kStages * W::kStage));
  const int codes_to = pinned(W::code_at(lane / kPieces, lane % kPieces * 16));
  const int u_to = pinned(W::kUAt + u_row * W::kUStride + 2 * u_rank);
  int row = first + lane % kRows;
  const auto find = [&] {
    const int at = p.rows.at(begin + min(row, tokens - 1));
    row += kStride;
    return at;
  };
  uint32_t coming = own;  // the stage to bring
  const auto bring = [&](int at) {
#pragma unroll
    for (int i = 0; i < kRows / kAtOnce; ++i)
      copy_async(coming + W::rows_on(codes_to, kAtOnce * i),
                 codes + int64_t{__shfl_sync(kFullWarp, at, lane / kPieces + kAtOnce * i)} *
                             p.rows.stride);
    if (lane < kRows)
      copy_async_word(coming + W::kScalesAt + 4 * lane, scales + int64_t{at} * p.rows.scale_row);
#pragma unroll
    for (int i = 0; i < kRows / kUAtOnce; ++i)
      if (kUPieces == kRanks / 8 || u_rank < kRanks)
        copy_async(coming + u_to + i * kUAtOnce * W::kUStride,
                   u_left > kUAtOnce * i ? u + int64_t{kUAtOnce * i} * p.rank : p.u,
                   u_left > kUAtOnce * i ? 16 : 0);
    u += int64_t{kStride} * p.rank;
    u_left -= kStride;
    coming = coming == own + (kStages - 1) * W::kStage ? own : coming + W::kStage;
  };

  // Where a stage has this thread's columns of rows 2c and 2c + 1, and what it multiplies them by.
  const int codes_at[2] = {pinned(W::code_at(2 * c, W::kMany * g)),
                           pinned(W::code_at(2 * c + 1, W::kMany * g))};
  const int u_at = pinned(W::kUAt + (lane % 8 + lane / 16 * 8) * W::kUStride + lane / 8 % 2 * 16);
  float sums[kRanks / 16][W::kMany][4] = {};  // [16 ranks][column of the thread's][of the product]
  float down = 1, limit = 0;                  // u times its scale is multiplied by `down`

  if (steps > 0) {
    int at[kStages];
#pragma unroll
    for (int s = 0; s < kStages; ++s) at[s] = find();
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < steps) bring(at[s]);
      copy_commit();
    }
    int next = at[kStages - 1];
    uint32_t stage = own;
    for (int s = 0; s < steps; ++s) {
      copy_wait<kStages - 2>();
      __syncwarp();
      if (s + kStages - 1 < steps) bring(next);
      copy_commit();
      next = find();

      uint32_t words[4][W::kMany / 4];  // of rows 2c, 2c + 1 and 8 more
#pragma unroll
      for (int i = 0; i < 4; ++i)
        load_shared(words[i], stage + codes_at[i % 2] + i / 2 * (8 * W::kColumns));
      const float2 by[2] = {load_shared2(stage + W::kScalesAt + 8 * c),
                            load_shared2(stage + W::kScalesAt + 8 * c + 32)};
      uint32_t a[kRanks / 16][4];
      float2 v[kRanks / 16][4];
      float top = 0;
#pragma unroll
      for (int m = 0; m < kRanks / 16; ++m) {
        load_transposed(a[m], stage + u_at + 32 * m);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          v[m][i] = unpack2<Bf16>(a[m][i]);
          v[m][i].x *= by[i / 2].x, v[m][i].y *= by[i / 2].y;
          top = fmaxf(top, fmaxf(fabsf(v[m][i].x), fabsf(v[m][i].y)));
        }
      }
      stage = stage == own + (kStages - 1) * W::kStage ? own : stage + W::kStage;
      top = __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(top)));
      if (top >
          limit) {  // f16 would not hold it: 256 is what the largest becomes, or somewhat more
        const auto finite = [](float x) { return fabsf(x) < INFINITY ? fabsf(x) : 0.0f; };
        top = 0;
#pragma unroll
        for (int m = 0; m < kRanks / 16; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) top = fmaxf(top, fmaxf(finite(v[m][i].x), finite(v[m][i].y)));
        const auto power = [](int biased) { return __int_as_float(biased << 23); };
        const unsigned bits = __reduce_max_sync(kFullWarp, __float_as_uint(top));
        const int biased = min(127 + 8 + 127 - static_cast<int>(bits >> 23), 253);
        if (bits != 0 && (limit == 0 || power(biased) < down)) {
          const float change = power(biased) / down;
#pragma unroll
          for (int m = 0; m < kRanks / 16; ++m)
#pragma unroll
            for (int j = 0; j < W::kMany; ++j)
#pragma unroll
              for (int i = 0; i < 4; ++i) sums[m][j][i] *= change;
          down = power(biased), limit = power(min(127 + 15 + 127 - biased, 254));
        }
      }
#pragma unroll
      for (int m = 0; m < kRanks / 16; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = pack2<Fp16>(v[m][i].x * down, v[m][i].y * down);
#pragma unroll
      for (int j = 0; j < W::kMany; j += 2) {
        const uint32_t pairs = j % 4 == 0 ? 0x5140 : 0x7362;  // of both rows, columns j and j + 1
        uint32_t b0[2], b1[2];
        decode_pairs<F, Fp16>(__byte_perm(words[0][j / 4], words[1][j / 4], pairs), b0[0], b0[1]);
        decode_pairs<F, Fp16>(__byte_perm(words[2][j / 4], words[3][j / 4], pairs), b1[0], b1[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int m = 0; m < kRanks / 16; ++m)
            multiply_add<Fp16>(sums[m][j + i], a[m], b0[i], b1[i]);
      }
    }
  }

  // This thread has 2 kMany columns from side + 2 kMany c on, of ranks g and g + 8 of each 16.
  copy_wait<0>();
  __syncthreads();
  const float up = 1 / down;
  float* const out = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int m = 0; m < kRanks / 16; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < W::kMany; j += 4) {
          const auto sum = [&](int n) { return sums[m][j + n][2 * half + i] * up; };
          float* const to = out + warp / W::kAcross * W::kOut +
                            W::out_at(16 * m + 8 * half + g, side + W::kMany * (2 * c + i) + j);
          *reinterpret_cast<float4*>(to) = {sum(0), sum(1), sum(2), sum(3)};
        }
  __syncthreads();
  const int columns = min(128, p.rows.c - 128 * tile);
  const int64_t base = int64_t{expert} * p.rank * p.rows.c;
  for (int i = threadIdx.x; i < 16 * p.rank; i += kThreads) {  // eight values each
    const int rank = p.rank_first ? i / 16 : 8 * i % p.rank;
    const int of = p.rank_first ? i % 16 * 8 : 8 * i / p.rank;
    if (of >= columns) continue;
    float v[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int from = p.rank_first ? W::out_at(rank, of + n) : W::out_at(rank + n, of);
      v[n] = out[from];
#pragma unroll
      for (int other = 1; other < W::kDown; ++other) v[n] += out[other * W::kOut + from];
    }
    const int64_t to = base + (p.rank_first ? int64_t{rank} * p.rows.c + 128 * tile + of
                                            : int64_t{128 * tile + of} * p.rank + rank);
    if (p.bf16) {
      store(static_cast<uint16_t*>(p.dfactor) + to, pack<Bf16>(v));
    } else {
      float* const d = static_cast<float*>(p.dfactor) + to;
      store(d, float4{v[0], v[1], v[2], v[3]});
      store(d + 4, float4{v[4], v[5], v[6], v[7]});
    }
  }
}

}  // namespace

template <>
void run(const LoraWgrad& p, Stream stream) {
  const DeviceGuard guard(p.dfactor.device);
  const int64_t rank = p.u.shape[1], c = p.rows.data.shape[1];
  const WgradParams params = {.rows = LoraRows::of(p.rows, p.plan),
                              .u = p.u.as<const uint16_t>(),
                              .row_offsets = p.plan.row_offsets(),
                              .tokens_per_expert = p.plan.tokens_per_expert(),
                              .dfactor = p.dfactor.data,
                              .rank = static_cast<int>(rank),
                              .rank_first = p.rank_first,
                              .bf16 = p.dfactor.dtype == DType::bf16};
  const dim3 blocks(static_cast<unsigned>(cdiv(c, kTile)), static_cast<unsigned>(p.plan.experts));
  dispatch_fp8(p.rows.data.dtype, [&]<typename F>() {
    with_ranks(rank, [&]<int kRanks>() {
      launch("lora_wgrad", wgrad<F, kRanks>, blocks, kThreads, Wgrad<kRanks>::kShared,
             stream_of(stream), params);
    });
  });
}

}  // namespace fp8moe::cuda
