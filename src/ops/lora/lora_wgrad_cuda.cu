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

constexpr int kThreads = 128, kRows = 32, kStages = 4;

template <int kRanks>
struct WgradStage {
  static constexpr int kUStride = 2 * kRanks + 16;  // bytes from row to row
  static constexpr int kUAt = kRows * 128;
  static constexpr int kScalesAt = kUAt + kRows * kUStride;
  static constexpr int kBytes = kScalesAt + 4 * kRows;
};

// Floats from a column to the next of the tile [128, kRanks] on its way out as [C, rank].
template <int kRanks>
inline constexpr int kOutStride = kRanks + 1;

template <int kRanks>
inline constexpr int kShared =
    std::max(kStages * WgradStage<kRanks>::kBytes, 4 * 128 * kOutStride<kRanks>);

// A block per expert and 128 columns, a warp per 32 of them. It sums over all rows of the expert,
// in ascending order. A thread takes four columns that lie together, one for each of four products.
template <typename F, int kRanks>
__global__ __launch_bounds__(kThreads, kRanks == 16
                                           ? 8
                                           : 1) void wgrad(const __grid_constant__ WgradParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Stage = WgradStage<kRanks>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const int tile = static_cast<int>(blockIdx.x), expert = static_cast<int>(blockIdx.y);
  const int begin = __ldg(p.row_offsets + expert);
  const int tokens = __ldg(p.tokens_per_expert + expert);
  const int stages = (tokens + kRows - 1) / kRows;

  const int piece = static_cast<int>(threadIdx.x) % 8 * 16, column = 128 * tile + piece;
  // Where the rows of a stage lie that this thread brings codes of (0 and 1), or the scale of (2).
  int at[3];
  const auto find = [&](int stage) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int row = kRows * stage + (i < 2 ? static_cast<int>(threadIdx.x) / 8 + 16 * i
                                             : static_cast<int>(threadIdx.x));
      at[i] = p.rows.at(begin + row, row < tokens && (i < 2 || threadIdx.x < kRows));
    }
  };
  const auto bring = [&](int index) {
    uint8_t* const stage = shared + index % kStages * Stage::kBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool wanted = at[i] >= 0 && column < p.rows.c;
      copy_async(stage + code_at(static_cast<int>(threadIdx.x) / 8 + 16 * i, piece),
                 wanted ? p.rows.codes + at[i] * p.rows.stride + column : p.rows.codes,
                 wanted ? 16 : 0);
    }
    if (threadIdx.x < kRows)
      copy_async_word(stage + Stage::kScalesAt + 4 * threadIdx.x,
                      at[2] >= 0 ? p.rows.scale(at[2], tile) : p.rows.scales, at[2] >= 0 ? 4 : 0);
    constexpr int kPieces = kRanks / 8;
    for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
      const int row = i / kPieces, rank = i % kPieces * 8, from = kRows * index + row;
      const bool wanted = rank < p.rank && from < tokens;
      copy_async(stage + Stage::kUAt + row * Stage::kUStride + 2 * rank,
                 p.u + (wanted ? int64_t{begin + from} * p.rank + rank : 0), wanted ? 16 : 0);
    }
  };

  float sums[kRanks / 16][4][4] = {};  // [16 ranks][column of four][of the product]
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < stages) find(s), bring(s);
    copy_commit();
  }
  if (kStages - 1 < stages) find(kStages - 1);
  for (int s = 0; s < stages; ++s) {
    copy_wait<kStages - 2>();
    __syncthreads();
    if (s + kStages - 1 < stages) bring(s + kStages - 1);
    copy_commit();
    if (s + kStages < stages) find(s + kStages);

    const uint8_t* const stage = shared + s % kStages * Stage::kBytes;
    const float* const scales = reinterpret_cast<const float*>(stage + Stage::kScalesAt);
    // Scales that bf16 can hold, as powers of two are: the product is rounded once either way.
    const bool exact = !__any_sync(kFullWarp, (__float_as_uint(scales[lane]) & 0xFFFF) != 0);
#pragma unroll
    for (int step = 0; step < kRows / 16; ++step) {
      const int k = 16 * step + 2 * c;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = *reinterpret_cast<const uint32_t*>(
            stage + code_at(k + i % 2 + i / 2 * 8, 32 * warp + 4 * g));
      const float2 first = *reinterpret_cast<const float2*>(scales + k);
      const float2 second = *reinterpret_cast<const float2*>(scales + k + 8);
      uint32_t a[kRanks / 16][4];
#pragma unroll
      for (int m = 0; m < kRanks / 16; ++m) {
        const int row = 16 * step + lane % 8 + lane / 16 * 8, rank = 16 * m + lane / 8 % 2 * 8;
        load_transposed(a[m], stage + Stage::kUAt + row * Stage::kUStride + 2 * rank);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 scale = i < 2 ? first : second;
          if (exact) {
            a[m][i] = multiply2(
                a[m][i], __byte_perm(__float_as_uint(scale.x), __float_as_uint(scale.y), 0x7632));
          } else {
            const float2 u = unpack2<Bf16>(a[m][i]);
            a[m][i] = pack2<Bf16>(u.x * scale.x, u.y * scale.y);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t two = j | (4 + j) << 4;  // byte j of both words
        const uint32_t b0 = to_bf16x2<F>(__byte_perm(words[0], words[1], two));
        const uint32_t b1 = to_bf16x2<F>(__byte_perm(words[2], words[3], two));
#pragma unroll
        for (int m = 0; m < kRanks / 16; ++m) multiply_add(sums[m][j], a[m], b0, b1);
      }
    }
  }

  // This thread's eight columns from 32 warp + 8 c on, of ranks g and g + 8 of each 16.
  const auto values = [&](int m, int half, float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = sums[m][j][2 * half], v[4 + j] = sums[m][j][2 * half + 1];
  };
  const auto put = [&](int64_t at, const float (&v)[8]) {
    if (p.bf16) {
      store(static_cast<uint16_t*>(p.dfactor) + at, pack<Bf16>(v));
    } else {
      float* const d = static_cast<float*>(p.dfactor) + at;
      store(d, float4{v[0], v[1], v[2], v[3]});
      store(d + 4, float4{v[4], v[5], v[6], v[7]});
    }
  };
  const int64_t base = int64_t{expert} * p.rank * p.rows.c;
  const int to = 32 * warp + 8 * c;
  if (p.rank_first) {
    if (128 * tile + to >= p.rows.c) return;
#pragma unroll
    for (int m = 0; m < kRanks / 16; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int rank = 16 * m + 8 * half + g;
        if (rank >= p.rank) continue;
        float v[8];
        values(m, half, v);
        put(base + int64_t{rank} * p.rows.c + 128 * tile + to, v);
      }
    return;
  }
  float* const staged = reinterpret_cast<float*>(shared);
  copy_wait<0>();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kRanks / 16; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float v[8];
      values(m, half, v);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        staged[(to + i) * kOutStride<kRanks> + 16 * m + 8 * half + g] = v[i];
    }
  __syncthreads();
  const int count = min(128, p.rows.c - 128 * tile) * p.rank / 8;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int column = 8 * i / p.rank, rank = 8 * i % p.rank;
    const float* const from = staged + column * kOutStride<kRanks> + rank;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = from[j];
    put(base + int64_t{128} * tile * p.rank + 8 * i, v);
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
      launch("lora_wgrad", wgrad<F, kRanks>, blocks, kThreads, kShared<kRanks>, stream_of(stream),
             params);
    });
  });
}

}  // namespace fp8moe::cuda
