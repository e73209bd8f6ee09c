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
  static constexpr int kFactorStride = 2 * (kRankFirst ? 128 + 8 : kRanks + 8);
  static constexpr int kCodes = kRows * 128;
  static constexpr int kBytes = kCodes + kFactorRows * kFactorStride;

  // Where byte `column` of row `row` of the codes lies.
  __device__ static int code_at(int row, int column) { return row * 128 + (column ^ row % 2 * 64); }
  // Where row `row` of the factor's tile lies. Of a [128, kRanks] tile a product takes eight at
  // once that lie one behind the other.
  __device__ static constexpr int row_of(int row) {
    return kRankFirst ? row : row / 64 * 64 + row / 2 % 8 * 8 + row % 2 * 4 + row / 16 % 4;
  }
};

// A block per 128 rows of one expert, a warp per 16 of them. Of K-blocks of 128, the first of three
// stages is multiplied while the other two are on their way. Within 64 of C a thread takes 16 codes
// that lie together, four for a product: products of both operands in another order of k are the
// same sums.
template <typename F, int kRanks, bool kRankFirst>
__global__ __launch_bounds__(kThreads, kRanks == 16 ? 3 : 2) void project(
    const __grid_constant__ ProjectParams p) {
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

  // What this thread brings of a K-block: 16 codes of four rows, and pieces of eight of the factor.
  const int piece = static_cast<int>(threadIdx.x) % 8 * 16;
  const int code_to = Stage::code_at(static_cast<int>(threadIdx.x) / 8, piece);
  const uint8_t* codes[4];
  int bytes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first + static_cast<int>(threadIdx.x) / 8 + 32 * i;
    const int at = p.rows.at(row, row < last_token);
    codes[i] = p.rows.code(max(at, 0), piece);
    bytes[i] = at < 0 ? 0 : 16;
  }
  constexpr int kPieces = kRankFirst ? 16 : kRanks == 48 ? 8 : kRanks / 8;  // of a row of its tile
  constexpr int kAtOnce = kThreads / kPieces;                               // rows of it
  const int tile_row = static_cast<int>(threadIdx.x) / kPieces;
  const int tile_column = static_cast<int>(threadIdx.x) % kPieces * 8;
  const int rank = kRankFirst ? tile_row : tile_column, k = kRankFirst ? tile_column : tile_row;
  const int row_step = kRankFirst ? p.rows.c : p.rank;
  const uint16_t* factor =
      p.factor + (int64_t{expert} * p.rank * p.rows.c + tile_row * row_step + tile_column);
  const int factor_to =
      Stage::kCodes + Stage::row_of(tile_row) * Stage::kFactorStride + 2 * tile_column;
  int coming = 0;  // the first k of the K-block to bring
  uint8_t* next_stage = shared;
  const auto bring = [&] {
    const bool inside = coming + piece < p.rows.c;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      copy_async(next_stage + code_to + 32 * 128 * i, codes[i], inside ? bytes[i] : 0);
      codes[i] += 128;
    }
#pragma unroll
    for (int i = 0; i < Stage::kFactorRows / kAtOnce; ++i) {
      const int more = kAtOnce * i;
      const bool wanted =
          kRankFirst ? rank + more < p.rank && coming + k < p.rows.c : coming + k + more < p.rows.c;
      if (kRankFirst || kRanks / 8 == kPieces || rank < kRanks)
        copy_async(next_stage + factor_to + Stage::row_of(more) * Stage::kFactorStride,
                   factor + int64_t{more} * row_step, wanted && rank < p.rank ? 16 : 0);
    }
    factor += kRankFirst ? 128 : 128 * p.rank;
    coming += 128;
    next_stage =
        next_stage == shared + (kStages - 1) * Stage::kBytes ? shared : next_stage + Stage::kBytes;
  };

  // The rows of this thread's sums, and their scales.
  const int row = first + 16 * warp + g;
  const float* scales[2];
  bool there[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = p.rows.at(row + 8 * half, row + 8 * half < last_token);
    there[half] = at >= 0;
    scales[half] = p.rows.scale(max(at, 0), 0);
  }
  const bool idle = first + 16 * warp >= last_token;  // a warp whose rows are all zero
  float sums[kRanks / 8][4] = {};
  float next[2] = {there[0] ? __ldg(scales[0]) : 0.0f, there[1] ? __ldg(scales[1]) : 0.0f};
#pragma unroll
  for (int block = 0; block < kStages - 1; ++block) {
    if (coming < p.rows.c) bring();
    copy_commit();
  }
  const uint8_t* stage = shared;
  for (int done = 0; done < p.rows.c; done += 128) {
    copy_wait<kStages - 2>();
    __syncthreads();
    if (coming < p.rows.c) bring();
    copy_commit();
    const float scale[2] = {next[0], next[1]};
    if (done + 128 < p.rows.c) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scales[half] += p.rows.scale_tile;
        if (there[half]) next[half] = __ldg(scales[half]);
      }
    }
    const uint8_t* const now = stage;
    stage = stage == shared + (kStages - 1) * Stage::kBytes ? shared : stage + Stage::kBytes;
    if (idle) continue;
    float part[kRanks / 8][4] = {};
#pragma unroll
    for (int k = 0; k < 128; k += 64) {
      const uint8_t* const from = now + Stage::code_at(16 * warp + g, k + 16 * c);
      const auto upper = *reinterpret_cast<const uint4*>(from);
      const auto lower = *reinterpret_cast<const uint4*>(from + 8 * 128);
      const uint32_t words[4][2] = {
          {upper.x, lower.x}, {upper.y, lower.y}, {upper.z, lower.z}, {upper.w, lower.w}};
      const uint8_t* const tile = now + Stage::kCodes;
#pragma unroll
      for (int two = 0; two < 4; two += 2) {  // products, of which each takes four codes
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            to_bf16x2<F>(words[two + i][half], a[i][half], a[i][half + 2]);
#pragma unroll
        for (int t = 0; t < kRanks / 8; t += kRankFirst ? 1 : 2) {
          if constexpr (kRankFirst) {
            const auto b = *reinterpret_cast<const uint4*>(
                tile + (8 * t + g) * Stage::kFactorStride + 2 * (k + 16 * c + 4 * two));
            multiply_add(part[t], a[0], b.x, b.y);
            multiply_add(part[t], a[1], b.z, b.w);
          } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              uint32_t b[4];
              const int matrix = lane / 8;
              const int at = k + 8 * (2 * (two + i) + matrix % 2) + lane % 2 * 4 + lane / 2 % 4;
              load_transposed(b, tile + at * Stage::kFactorStride + 2 * (8 * (t + matrix / 2)));
              multiply_add(part[t], a[i], b[0], b[1]);
              multiply_add(part[t + 1], a[i], b[2], b[3]);
            }
          }
        }
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
    const int64_t at = row + 8 * half;
    if (at >= end) continue;
    if (c == 0) p.u_scale[at] = scale.scale_inv;
    uint8_t* const q = p.u_q + at * (kParts * kRanks) + 2 * c;
#pragma unroll
    for (int t = 0; t < kRanks / 8; ++t) {
      if (8 * t < p.rank)
        *reinterpret_cast<uint32_t*>(p.u + at * p.rank + 8 * t + 2 * c) = words[t];
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
