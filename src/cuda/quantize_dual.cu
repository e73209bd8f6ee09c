// rows = Q(x) by 1x128 tiles and columns = Q(x^T) per expert, from one read of x: one block a tile
// of 128 tokens and 128 channels, x packed in registers between the two quantizations.
#include "core/backends.h"
#include "core/dispatch.h"
#include "cuda/device/eight.cuh"
#include "cuda/device/staged_tiles.cuh"
#include "cuda/device/swiglu.cuh"
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
  ColumnsOut columns;  // [C, Kcap], one scale a tile
  Scaling scaling;
};

constexpr int kThreads = 256;

struct Shared {
  TransposedCodes<16> codes;
  float amax[kThreads / 32];
};

// Columns by 128x128 tiles. 16 lanes share a token: a warp stores whole lines of 128 codes. A
// thread holds tokens 64 half + 4 group + j at channels 8 lane, 8 of them.
template <typename F, typename T>
__global__ __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 3) void quantize_both(
    const __grid_constant__ Params<T> p) {
  __shared__ Shared shared;
  const int tile = blockIdx.x % p.tiles, block = blockIdx.x / p.tiles;
  const TokenBlock tokens = token_block_of_warp(p.plan, block);
  if (tokens.expert < 0) return;
  const int lane = threadIdx.x % 16, group = threadIdx.x / 16;
  const int channel = 128 * tile + 8 * lane;

  Eight<T> x[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int token = 64 * half + 4 * group + j;
      x[half][j].clear();
      if (token < tokens.tokens && channel < p.channels)
        x[half][j].load(p.x + int64_t{tokens.first_row + token} * p.channels + channel);
    }

  float top = 0.0f, token_top[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float v[8];
    x[i / 4][i % 4].values(v);
    token_top[i] = amax(v);
    top = fmaxf(top, token_top[i]);
  }
  // Two lanes find the scale of a token. Padding rows: data 0 from the zeros above, scale 0.
  const TileScale of_token = p.scaling.template of<F>(lanes_max_each<16>(token_top));
  const int mine = 64 * (lane / 8) + 4 * group + lane / 2 % 4;
  if (lane % 2 == 0 && mine < tokens.rows)
    p.rows.scale[(tokens.first_row + int64_t{mine}) * p.rows.scale_row + tile * p.rows.scale_tile] =
        mine < tokens.tokens ? of_token.scale_inv : 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float scale = __shfl_sync(kFullWarp, of_token.scale, 2 * i, 16);
    const int token = 64 * (i / 4) + 4 * group + i % 4;
    if (token >= tokens.rows || channel >= p.channels) continue;
    float v[8];
    x[i / 4][i % 4].values(v);
    const uint2 codes = fp8_encode8<F>(v, scale);
    store(p.rows.data + int64_t{tokens.first_row + token} * p.channels + channel, codes);
  }

  top = lanes_max<32>(top);
  if (threadIdx.x % 32 == 0) shared.amax[threadIdx.x / 32] = top;
  __syncthreads();
#pragma unroll
  for (float m : shared.amax) top = fmaxf(top, m);
  const TileScale s = p.scaling.template of<F>(top);
  if (threadIdx.x == 0)
    p.columns.scale[tile * p.columns.scale_tile + block * p.columns.scale_block] = s.scale_inv;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t codes[2][4];  // [four channels][token]
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float v[8];
      x[half][j].values(v);
      const uint2 eight = fp8_encode8<F>(v, s.scale);
      codes[0][j] = eight.x, codes[1][j] = eight.y;
    }
#pragma unroll
    for (int four = 0; four < 2; ++four)
      shared.codes.put(8 * lane + 4 * four, 16 * half + group, codes[four]);
  }
  __syncthreads();
  shared.codes.store_to(p.columns.data + int64_t{128} * tile * p.columns.ld + int64_t{128} * block,
                        p.columns.ld, p.channels - 128 * tile, 128);
}

// For columns with a scale a channel. 16-bit x in whole tiles, power-of-two scales:
template <typename T>
struct StagedDense {
  static constexpr int kPlanes = 1, kTeams = 1;
  using Plain = T;
  using Table = NoTable;
  const uint16_t* x;  // [R, C]
  int64_t channels;

  __device__ __forceinline__ const uint16_t* row(int, int64_t row) const {
    return x + row * channels;
  }
  __device__ __forceinline__ int64_t stride() const { return channels; }
  __device__ __forceinline__ void values(const NoTable&, const uint4 (&packed)[1],
                                         float (&v)[8]) const {
    unpack<T>(&packed[0].x, v);
  }
};

// Anything else, eight values at a time.
template <typename T>
struct DenseSource {
  const T* x;  // [R, C]
  int64_t channels;

  __device__ __forceinline__ void operator()(int64_t row, int column, float (&v)[8]) const {
    Eight<T> packed;
    packed.load(x + row * channels + column);
    packed.values(v);
  }
};

}  // namespace

void quantize_dual(const Tensor& x, const RoutingPlan& plan, const Fp8Tensor& rows,
                   const Fp8Tensor& columns, ScaleRule rule, Stream stream) {
  const int64_t r = x.shape[0], c = x.shape[1];
  const int64_t tiles = cdiv(c, kTile), blocks = plan.columns() / kTile;
  if (tiles == 0 || blocks == 0) return;
  const DeviceGuard guard(x.device);
  const Scaling scaling = {rule.pow2, rule.eps, max_finite(x.dtype)};
  dispatch_fp8(rows.data.dtype, [&]<typename F>() {
    dispatch_float(x.dtype, [&]<typename T>() {
      if (columns.layout == ScaleLayout::gemm) {
        if constexpr (sizeof(T) == 2)
          if (rule.pow2 && c % kTile == 0)
            return launch_staged_tiles<F>("quantize_dual", x.device,
                                          StagedDense<T>{x.as<uint16_t>(), c}, nullptr, plan, rows,
                                          columns, rule.eps, stream_of(stream));
        return launch_quantize_source<F>("quantize_dual", DenseSource<T>{x.as<T>(), c}, plan, r, c,
                                         rows, columns, scaling, stream_of(stream));
      }
      const Params<T> params = {.x = x.as<T>(),
                                .channels = static_cast<int>(c),
                                .tiles = static_cast<int>(tiles),
                                .plan = view_of(plan),
                                .rows = rows_out(rows),
                                .columns = columns_out(columns),
                                .scaling = scaling};
      launch("quantize_dual", quantize_both<F, T>, static_cast<unsigned>(blocks * tiles), kThreads,
             0, stream_of(stream), params);
    });
  });
}

}  // namespace fp8moe::cuda
