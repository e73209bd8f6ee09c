// lora_project: u = scaling * rows factor^T of each expert's rows, from FP8 rows as they lie.
#include "common/backends.h"
#include "common/dispatch.h"
#include "common/lora.h"
#include "ops/lora/lora_rows.cuh"

namespace fp8moe::cuda {
namespace {

struct ProjectParams {
  LoraRows rows;
  const uint16_t* factor;  // [E, rank, C] or [E, C, rank]
  const int32_t *row_offsets, *tokens_per_expert;
  uint16_t* u;
  uint8_t* u_q;
  float* u_scale;
  int experts, rank;
  float scaling, eps;
  ScaleKind kind;
};

constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = 16 * kWarps, kStages = 3;

template <int kRanks, bool kRankFirst>
struct ProjectStage {
  // Of the factor's tile, [kRanks, 128] or [128, kRanks], in bytes from row to row.
  static constexpr int kFactorRows = kRankFirst ? kRanks : 128;
  static constexpr int kFactorStride = 2 * (kRankFirst ? 128 + 16 : kRanks + 8);
  static constexpr int kCodes = kRows * 128;
  static constexpr int kBytes = kCodes + kFactorRows * kFactorStride;
};

// A block per 128 rows of one expert, a warp per 16 of them. Of K-blocks of 128, the first of three
// stages is multiplied while the other two are on their way. Within 16 of C a thread takes four
// codes that lie together: products of both operands in another order of k are the same sums.
template <typename F, int kRanks, bool kRankFirst>
__global__ __launch_bounds__(kThreads) void project(const __grid_constant__ ProjectParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Stage = ProjectStage<kRanks, kRankFirst>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;

  // Expert e's blocks begin at index row_offsets[e] / kRows + e; some have no rows.
  const int index = static_cast<int>(blockIdx.x);
  int begun = 0;
  for (int e = lane; e < p.experts; e += 32) begun += __ldg(p.row_offsets + e) / kRows + e <= index;
  const int expert = static_cast<int>(__reduce_add_sync(kFullWarp, begun)) - 1;
  const int begin = __ldg(p.row_offsets + expert), end = __ldg(p.row_offsets + expert + 1);
  const int first = begin + (index - begin / kRows - expert) * kRows;
  const int last_token = begin + __ldg(p.tokens_per_expert + expert);
  if (first >= end) return;

  // What this thread brings: pieces of 16 bytes at column 16 (thread % 8) of rows thread / 8 + 16
  // i.
  const int piece = static_cast<int>(threadIdx.x) % 8 * 16;
  const uint8_t* from[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first + static_cast<int>(threadIdx.x) / 8 + 32 * i;
    const int at = p.rows.at(row, row < last_token);
    from[i] = at < 0 ? nullptr : p.rows.codes + at * p.rows.stride;
  }
  const uint16_t* const factor = p.factor + int64_t{expert} * p.rank * p.rows.c;
  const auto bring = [&](int block) {
    uint8_t* const stage = shared + block % kStages * Stage::kBytes;
    const int k = 128 * block + piece;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool wanted = from[i] != nullptr && k < p.rows.c;
      copy_async(stage + code_at(static_cast<int>(threadIdx.x) / 8 + 32 * i, piece),
                 wanted ? from[i] + k : p.rows.codes, wanted ? 16 : 0);
    }
    uint8_t* const tile = stage + Stage::kCodes;
    constexpr int kPieces = kRankFirst ? 16 : kRanks / 8;  // of a row of the factor's tile
    for (int i = threadIdx.x; i < Stage::kFactorRows * kPieces; i += kThreads) {
      const int row = i / kPieces, column = i % kPieces * 8;
      const int rank = kRankFirst ? row : column, at = 128 * block + (kRankFirst ? column : row);
      const bool wanted = rank < p.rank && at < p.rows.c;
      const int64_t offset =
          kRankFirst ? int64_t{rank} * p.rows.c + at : int64_t{at} * p.rank + rank;
      copy_async(tile + row * Stage::kFactorStride + 2 * column, factor + (wanted ? offset : 0),
                 wanted ? 16 : 0);
    }
  };

  // The rows of this thread's sums, and their scales.
  const int row = first + 16 * warp + g;
  const int at[2] = {p.rows.at(row, row < last_token), p.rows.at(row + 8, row + 8 < last_token)};
  const auto scale_of = [&](int half, int block) {
    return at[half] < 0 ? 0.0f : __ldg(p.rows.scale(at[half], block));
  };
  const bool idle = first + 16 * warp >= last_token;  // a warp whose rows are all zero
  const int blocks = (p.rows.c + 127) / 128;
  float sums[kRanks / 8][4] = {};
  float next[2] = {scale_of(0, 0), scale_of(1, 0)};
#pragma unroll
  for (int block = 0; block < kStages - 1; ++block) {
    if (block < blocks) bring(block);
    copy_commit();
  }
  for (int block = 0; block < blocks; ++block) {
    copy_wait<kStages - 2>();
    __syncthreads();
    if (block + kStages - 1 < blocks) bring(block + kStages - 1);
    copy_commit();
    const float scale[2] = {next[0], next[1]};
    if (block + 1 < blocks) next[0] = scale_of(0, block + 1), next[1] = scale_of(1, block + 1);

    const uint8_t* const stage = shared + block % kStages * Stage::kBytes;
    const uint8_t* const codes = stage + (16 * warp + g) * 128 + 4 * c;
    const uint8_t* const tile = stage + Stage::kCodes;
    if (idle) continue;
    float part[kRanks / 8][4] = {};
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const uint8_t* const four = codes + ((16 * step) ^ (16 * g));  // code_at of rows g and g + 8
      const uint32_t upper = *reinterpret_cast<const uint32_t*>(four);
      const uint32_t lower = *reinterpret_cast<const uint32_t*>(four + 8 * 128);
      const uint32_t a[4] = {to_bf16x2<F>(upper), to_bf16x2<F>(lower), to_bf16x2<F>(upper >> 16),
                             to_bf16x2<F>(lower >> 16)};
#pragma unroll
      for (int t = 0; t < kRanks / 8; t += 2) {
        uint32_t b[4];
        if constexpr (kRankFirst) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const auto four = *reinterpret_cast<const uint2*>(
                tile + (8 * (t + i) + g) * Stage::kFactorStride + 2 * (16 * step + 4 * c));
            b[2 * i] = four.x, b[2 * i + 1] = four.y;
          }
        } else {
          const int i = lane % 8, matrix = lane / 8;
          const int k = 16 * step + 4 * (i / 2) + i % 2 + 2 * (matrix % 2);
          load_transposed(b, tile + k * Stage::kFactorStride + 2 * (8 * (t + matrix / 2)));
        }
        multiply_add(part[t], a, b[0], b[1]);
        multiply_add(part[t + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int t = 0; t < kRanks / 8; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[t][i] = fmaf(part[t][i], scale[i / 2], sums[t][i]);
  }

  constexpr int kParts = static_cast<int>(lora_depth(kRanks)) / kRanks;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float v[kRanks / 4];
    uint32_t words[kRanks / 8];
#pragma unroll
    for (int t = 0; t < kRanks / 8; ++t) {
      words[t] = pack2<Bf16>(sums[t][2 * half] * p.scaling, sums[t][2 * half + 1] * p.scaling);
      const float2 rounded = unpack2<Bf16>(words[t]);
      v[2 * t] = rounded.x, v[2 * t + 1] = rounded.y;
    }
    const TileScale scale = lora_scale(lanes_max<4>(amax(v)), F::kMax, p.kind, p.eps);
    const int64_t to = row + 8 * half;
    if (to >= end) continue;
    if (c == 0) p.u_scale[to] = scale.scale_inv;
    uint8_t* const q = p.u_q + to * (kParts * kRanks) + 2 * c;
#pragma unroll
    for (int t = 0; t < kRanks / 8; ++t) {
      if (8 * t < p.rank)
        *reinterpret_cast<uint32_t*>(p.u + to * p.rank + 8 * t + 2 * c) = words[t];
      const auto by_scale = [&](float x) {
        return p.kind == ScaleKind::amax ? __fdiv_rn(x, scale.scale) : x * scale.scale;
      };
      const float x = by_scale(v[2 * t]), y = by_scale(v[2 * t + 1]);
      const uint32_t high = fp8_encode2<F>(x, y);
      const float2 got = fp8_decode2<F>(high);
      const uint32_t low = fp8_encode2<F>(x - got.x, y - got.y);
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        *reinterpret_cast<uint16_t*>(q + part * kRanks + 8 * t) =
            static_cast<uint16_t>(is_low(false, part) ? low : high);
    }
  }
}

}  // namespace

template <>
void run(const LoraProject& p, Stream stream) {
  const DeviceGuard guard(p.u.device);
  const int64_t rank = p.u.shape[1];
  const ProjectParams params = {.rows = LoraRows::of(p.rows, p.plan),
                                .factor = p.factor.as<const uint16_t>(),
                                .row_offsets = p.plan.row_offsets(),
                                .tokens_per_expert = p.plan.tokens_per_expert(),
                                .u = p.u.as<uint16_t>(),
                                .u_q = p.u_q.data.as<uint8_t>(),
                                .u_scale = p.u_q.scale_inv.as<float>(),
                                .experts = static_cast<int>(p.plan.experts),
                                .rank = static_cast<int>(rank),
                                .scaling = p.scaling,
                                .eps = p.rule.eps,
                                .kind = p.rule.kind};
  const auto blocks = static_cast<unsigned>(p.plan.rows() / kRows + p.plan.experts);
  dispatch_fp8(p.rows.data.dtype, [&]<typename F>() {
    with_ranks(rank, [&]<int kRanks>() {
      const auto go = [&]<bool kRankFirst>() {
        launch("lora_project", project<F, kRanks, kRankFirst>, blocks, kThreads,
               kStages * ProjectStage<kRanks, kRankFirst>::kBytes, stream_of(stream), params);
      };
      p.rank_first ? go.template operator()<true>() : go.template operator()<false>();
    });
  });
}

}  // namespace fp8moe::cuda
