// rows = Q(x) by 1x128 tiles and columns = Q(x^T) per expert, from one read of x: one block a tile
// of 128 tokens and 128 channels, x packed in registers between the two quantizations.
#include "core/backends.h"
#include "core/dispatch.h"
#include "cuda/device/eight.cuh"
#include "cuda/device/outputs.cuh"
#include "cuda/device/plan.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/transposed_codes.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {
namespace {

template <typename T>
struct Params {
  const T* x;  // [R, C]
  int channels, tiles;
  PlanView plan;
  RowsOut rows;        // [R, C]
  ColumnsOut columns;  // [C, Kcap]
  Scaling scaling;
};

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
template <typename T>
constexpr int kBlocksPerSm = sizeof(T) == 4 ? 2 : 3;

struct Shared {
  union {
    TransposedCodes codes;
    alignas(16) float channel_top[kWarps][128];  // of each warp's tokens
  };
  alignas(16) float scale[128];  // of channels
  float top[kWarps];
};

// 16 lanes share a token: a warp stores whole lines of 128 codes. A thread holds tokens
// 64 half + 4 group + j at channels 8 lane, 8 of them.
template <typename T>
using Values = Eight<T>[2][4];

__device__ __forceinline__ int lane() { return threadIdx.x % 16; }
__device__ __forceinline__ int group() { return threadIdx.x / 16; }

// The rows' codes and scales. The largest |x| of the thread.
template <typename F, typename T>
__device__ __forceinline__ float quantize_rows(const Params<T>& p, const Values<T>& x,
                                               TokenBlock tokens, int tile) {
  float top = 0.0f, token_top[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float v[8];
    x[i / 4][i % 4].values(v);
    token_top[i] = amax(v);
    top = fmaxf(top, token_top[i]);
  }
  // Two lanes find the scale of a token. Padding rows: data 0 from zeros, scale 0.
  const TileScale of_token = p.scaling.template of<F>(lanes_max_each<16>(token_top));
  const int mine = 64 * (lane() / 8) + 4 * group() + lane() / 2 % 4;
  if (lane() % 2 == 0 && mine < tokens.rows)
    p.rows.scale[(tokens.first_row + int64_t{mine}) * p.rows.scale_row + tile * p.rows.scale_tile] =
        mine < tokens.tokens ? of_token.scale_inv : 0.0f;
  const int channel = 128 * tile + 8 * lane();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float scale = __shfl_sync(kFullWarp, of_token.scale, 2 * i, 16);
    const int token = 64 * (i / 4) + 4 * group() + i % 4;
    if (token >= tokens.rows || channel >= p.channels) continue;
    float v[8];
    x[i / 4][i % 4].values(v);
    store(p.rows.data + int64_t{tokens.first_row + token} * p.channels + channel,
          fp8_encode8<F>(v, scale));
  }
  return top;
}

// The largest |x| of the warp's tokens at each channel: a thread's 8.
template <typename T>
__device__ __forceinline__ void channel_tops(const Values<T>& x, float (&top)[8]) {
  if constexpr (sizeof(T) == 2) {
    uint32_t most[4] = {};  // of pairs
#pragma unroll
    for (int i = 0; i < 32; ++i)
      most[i % 4] = most_packed<T>(most[i % 4], x[i / 16][i / 4 % 4].word[i % 4]);
#pragma unroll
    for (uint32_t& m : most) m = most_packed<T>(m, __shfl_xor_sync(kFullWarp, m, 16));
    unpack<T>(most, top);
  } else {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      top[c] = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        top[c] = fmaxf(top[c], fabsf(__uint_as_float(x[i / 4][i % 4].word[c])));
      top[c] = fmaxf(top[c], __shfl_xor_sync(kFullWarp, top[c], 16));
    }
  }
}

template <typename F, typename T, ColumnKind kKind>
__global__ __launch_bounds__(kThreads, kBlocksPerSm<T>) void quantize_both(
    const __grid_constant__ Params<T> p) {
  __shared__ Shared shared;
  const int tile = blockIdx.x % p.tiles, block = blockIdx.x / p.tiles, warp = threadIdx.x / 32;
  const TokenBlock tokens = token_block(p.plan, block);
  if (tokens.expert < 0) return;
  const int channel = 128 * tile + 8 * lane();
  Values<T> x;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int token = 64 * half + 4 * group() + j;
      x[half][j].clear();
      if (token < tokens.tokens && channel < p.channels)
        x[half][j].load(p.x + int64_t{tokens.first_row + token} * p.channels + channel);
    }

  float scale[8];
  float* scale_inv = p.columns.scale + tile * p.columns.scale_tile + block * p.columns.scale_block;
  if constexpr (kKind == ColumnKind::block) {
    float top = lanes_max<32>(quantize_rows<F>(p, x, tokens, tile));
    if (threadIdx.x % 32 == 0) shared.top[warp] = top;
    __syncthreads();
#pragma unroll
    for (float m : shared.top) top = fmaxf(top, m);
    const TileScale s = p.scaling.template of<F>(top);
    if (threadIdx.x == 0) *scale_inv = s.scale_inv;
#pragma unroll
    for (float& of_channel : scale) of_channel = s.scale;
  } else {
    float top[8];
    channel_tops<T>(x, top);
    if (threadIdx.x % 32 < 16)
#pragma unroll
      for (int c = 0; c < 8; c += 4)
        *reinterpret_cast<float4*>(&shared.channel_top[warp][8 * lane() + c]) = {
            top[c], top[c + 1], top[c + 2], top[c + 3]};
    __syncthreads();
    if (threadIdx.x < 128) {
      float most = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) most = fmaxf(most, shared.channel_top[w][threadIdx.x]);
      const TileScale s = p.scaling.template of<F>(most);
      shared.scale[threadIdx.x] = s.scale;
      if (128 * tile + static_cast<int>(threadIdx.x) < p.channels)
        scale_inv[threadIdx.x] = s.scale_inv;
    }
    quantize_rows<F>(p, x, tokens, tile);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 8; ++c) scale[c] = shared.scale[8 * lane() + c];
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float v[4][8];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[half][j].values(v[j]);
#pragma unroll
    for (int first = 0; first < 8; first += 4) {
      uint32_t codes[4];  // of a channel at 4 tokens
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = first + i;
        codes[i] = fp8_encode4<F>(v[0][c] * scale[c], v[1][c] * scale[c], v[2][c] * scale[c],
                                  v[3][c] * scale[c]);
      }
      shared.codes.put_transposed(8 * lane() + first, 16 * half + group(), codes);
    }
  }
  __syncthreads();
  shared.codes.store_to(p.columns.data + int64_t{128} * tile * p.columns.ld + int64_t{128} * block,
                        p.columns.ld, p.channels - 128 * tile, 128);
}

}  // namespace

void quantize_dual(const Tensor& x, const RoutingPlan& plan, const Fp8Tensor& rows,
                   const Fp8Tensor& columns, ScaleRule rule, Stream stream) {
  const int64_t c = x.shape[1];
  const int64_t tiles = cdiv(c, kTile), blocks = plan.columns() / kTile;
  if (tiles == 0 || blocks == 0) return;
  const DeviceGuard guard(x.device);
  const Scaling scaling = {rule.pow2, rule.eps, max_finite(x.dtype)};
  dispatch_fp8(rows.data.dtype, [&]<typename F>() {
    dispatch_float(x.dtype, [&]<typename T>() {
      const Params<T> params = {.x = x.as<T>(),
                                .channels = static_cast<int>(c),
                                .tiles = static_cast<int>(tiles),
                                .plan = view_of(plan),
                                .rows = rows_out(rows),
                                .columns = columns_out(columns),
                                .scaling = scaling};
      const auto kernel = kind_of(columns) == ColumnKind::block
                              ? quantize_both<F, T, ColumnKind::block>
                              : quantize_both<F, T, ColumnKind::column>;
      launch("quantize_dual", kernel, static_cast<unsigned>(blocks * tiles), kThreads, 0,
             stream_of(stream), params);
    });
  });
}

}  // namespace fp8moe::cuda
