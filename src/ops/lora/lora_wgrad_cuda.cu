// lora_wgrad: dfactor[e] = u[rows of e]^T rows[rows of e], from FP8 rows as they lie.
#include <algorithm>

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
  const int mine = tokens - first;  // rows from this warp's first one on
  const int steps = mine <= 0 ? 0 : (mine + W::kDown * kRows - 1) / (W::kDown * kRows);
  uint8_t* const own = shared + warp * (kStages * W::kStage);

  // This lane brings pieces of 16 codes, the scale of row lane % 16, and pieces of eight of u.
  constexpr int kPieces = W::kColumns / 16, kAtOnce = 32 / kPieces;
  const int column = 128 * tile + side + lane % kPieces * 16;
  const bool inside = column < p.rows.c;
  const uint8_t* const codes = p.rows.codes + (inside ? column : 0);
  const float* const scales = p.rows.scale(0, tile);
  const uint16_t* const u = p.u + int64_t{begin + first} * p.rank;
  const auto find = [&](int step) {
    const int row = W::kDown * kRows * step + lane % kRows;
    return p.rows.at(begin + first + row, row < mine);
  };
  const auto bring = [&](int step, int at) {
    uint8_t* const stage = own + step % kStages * W::kStage;
#pragma unroll
    for (int i = 0; i < kRows / kAtOnce; ++i) {
      const int row = lane / kPieces + kAtOnce * i, from = __shfl_sync(kFullWarp, at, row);
      copy_async(stage + code_at<W::kColumns>(row, lane % kPieces * 16),
                 codes + int64_t{max(from, 0)} * p.rows.stride, from >= 0 && inside ? 16 : 0);
    }
    if (lane < kRows)
      copy_async_word(stage + W::kScalesAt + 4 * lane,
                      scales + int64_t{max(at, 0)} * p.rows.scale_row, at >= 0 ? 4 : 0);
#pragma unroll
    for (int i = 0; i < kRanks / 16; ++i) {
      const int row = (lane + 32 * i) / (kRanks / 8), rank = (lane + 32 * i) % (kRanks / 8) * 8;
      const int from = W::kDown * kRows * step + row;
      const bool wanted = from < mine && rank < p.rank;
      copy_async(stage + W::kUAt + row * W::kUStride + 2 * rank,
                 u + (wanted ? int64_t{from} * p.rank + rank : 0), wanted ? 16 : 0);
    }
  };

  float sums[kRanks / 16][W::kMany][4] = {};  // [16 ranks][column of the thread's][of the product]
  int at[kStages];
#pragma unroll
  for (int s = 0; s < kStages; ++s) at[s] = find(s);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) bring(s, at[s]);
    copy_commit();
  }
  int next = at[kStages - 1];
  for (int s = 0; s < steps; ++s) {
    copy_wait<kStages - 2>();
    __syncwarp();
    if (s + kStages - 1 < steps) bring(s + kStages - 1, next);
    copy_commit();
    next = find(s + kStages);

    const uint8_t* const stage = own + s % kStages * W::kStage;
    uint32_t words[4][W::kMany / 4];  // this thread's columns of rows 2c, 2c + 1 and 8 more
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint8_t* const from =
          stage + code_at<W::kColumns>(2 * c + i % 2 + i / 2 * 8, W::kMany * g);
      if constexpr (W::kMany == 16) {
        const auto v = *reinterpret_cast<const uint4*>(from);
        words[i][0] = v.x, words[i][1] = v.y, words[i][2] = v.z, words[i][3] = v.w;
      } else {
        const auto v = *reinterpret_cast<const uint2*>(from);
        words[i][0] = v.x, words[i][1] = v.y;
      }
    }
    const float* const by = reinterpret_cast<const float*>(stage + W::kScalesAt);
    // Scales that bf16 can hold, as powers of two are: the product is rounded once either way.
    const bool exact = !__any_sync(kFullWarp, (__float_as_uint(by[lane % kRows]) & 0xFFFF) != 0);
    const float2 two[2] = {*reinterpret_cast<const float2*>(by + 2 * c),
                           *reinterpret_cast<const float2*>(by + 2 * c + 8)};
    uint32_t a[kRanks / 16][4];
#pragma unroll
    for (int m = 0; m < kRanks / 16; ++m) {
      const int row = lane % 8 + lane / 16 * 8, rank = 16 * m + lane / 8 % 2 * 8;
      load_transposed(a[m], stage + W::kUAt + row * W::kUStride + 2 * rank);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 scale = two[i / 2];
        if (exact) {
          a[m][i] = multiply2(
              a[m][i], __byte_perm(__float_as_uint(scale.x), __float_as_uint(scale.y), 0x7632));
        } else {
          const float2 v = unpack2<Bf16>(a[m][i]);
          a[m][i] = pack2<Bf16>(v.x * scale.x, v.y * scale.y);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < W::kMany; j += 2) {
      const uint32_t pairs = j % 4 == 0 ? 0x5140 : 0x7362;  // of both rows, columns j and j + 1
      uint32_t b0[2], b1[2];
      to_bf16x2<F>(__byte_perm(words[0][j / 4], words[1][j / 4], pairs), b0[0], b0[1]);
      to_bf16x2<F>(__byte_perm(words[2][j / 4], words[3][j / 4], pairs), b1[0], b1[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int m = 0; m < kRanks / 16; ++m) multiply_add(sums[m][j + i], a[m], b0[i], b1[i]);
    }
  }

  // This thread has 2 kMany columns from side + 2 kMany c on, of ranks g and g + 8 of each 16.
  copy_wait<0>();
  __syncthreads();
  float* const out = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int m = 0; m < kRanks / 16; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < W::kMany; j += 4) {
          const auto sum = [&](int n) { return sums[m][j + n][2 * half + i]; };
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
