// act_quantize and its gradient: the activation of z, quantized as it is computed. Every kernel is
// a template over the activations of common/activation.h.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common/backends.h"
#include "common/dispatch.h"
#include "device/activation.cuh"
#include "device/runtime.h"
#include "ops/activation/act_backward_tiles.cuh"

namespace fp8moe::cuda {

// ---- rows ---------------------------------------------------------------------------------------
// What the row kernels of both share. They are for bf16 operands and I a multiple of 128: a warp
// takes 4 rows of one tile, 8 lanes per row, 16 columns per lane (the lanes of tile.cuh).

namespace {

// What a row is to an op with or without a plan.
struct RowKind {
  bool written;  // below row_offsets[E], or below R without a plan
  bool token;    // and not padding
};

__device__ __forceinline__ RowKind row_kind(const PlanView& plan, int64_t row, int64_t rows) {
  if (plan.row_of == nullptr) return {row < rows, row < rows};
  const bool written = row < plan.row_offsets[plan.experts];
  return {written, written && plan.token_of_row[row] >= 0};
}

// 16 bf16 of a lane.
__device__ __forceinline__ void unpack16(const uint4& low, const uint4& high, float (&v)[16]) {
  const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  unpack<Bf16>(words, v);
}

}  // namespace

// ---- act_quantize -------------------------------------------------------------------------------
// h = Q(act(z) * prob) of z = [gate | up] [R, 2I], or z [R, I] without a gate, and Q(z).
//
// bf16 z that is not interleaved, I % 128 == 0 and power-of-two scales have a kernel of their own:
// quantize_rows. The rest, and Q(z), takes the general tile kernel.

namespace {

constexpr int kRowsPerBlock = 16;  // 32 take 0.3 to 1.9% longer
constexpr int kTilesPerBlock = 4;

template <class Act>
struct RowsParams {
  const uint16_t* z;   // [R, 2I] bf16, or [R, I]
  const float* probs;  // [R] or nullptr
  Act act;
  int rows, intermediate, tiles;
  PlanView plan;
  RowsOut h;
  uint64_t read_policy;
  Pow2Scaling scaling;
};

// h without prob, which the scale of the codes takes in.
template <class Act, int N>
__device__ __forceinline__ void hidden(const Act& act, const float (&gate)[N], const float (&up)[N],
                                       float (&h)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) h[i] = act.value(gate[i], up[i], act.sigmoid(gate[i]));
}

// 16 rows x 4 tiles per block, the next tile loaded while one is computed.
template <class Act>
__global__ __launch_bounds__(8 * kRowsPerBlock,
                             8) void quantize_rows(const __grid_constant__ RowsParams<Act> p) {
  constexpr int kParts = Act::kGated ? 2 : 1;
  const int groups = (p.tiles + kTilesPerBlock - 1) / kTilesPerBlock;
  const int64_t row = int64_t{kRowsPerBlock} * (blockIdx.x / groups) + threadIdx.x / 8;
  const int first = blockIdx.x % groups * kTilesPerBlock;
  const RowKind kind = row_kind(p.plan, row, p.rows);
  const float prob = p.probs != nullptr && kind.token ? p.probs[row] : 1.0f;
  const int64_t column = 128 * int64_t{first} + Tile<8>::column(0);
  const uint16_t* gates = p.z + kParts * row * p.intermediate + column;
  const uint16_t* ups = gates + p.intermediate;
  uint8_t* codes = p.h.data + row * p.h.ld + column;
  float* scale = p.h.scale + row * p.h.scale_row + first * p.h.scale_tile;

  uint4 packed[kTilesPerBlock][2 * kParts];  // two of them at a time, once unrolled
  const auto bring = [&](int tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      packed[tile][half] = uint4{0, 0, 0, 0};
      if constexpr (Act::kGated) packed[tile][2 + half] = uint4{0, 0, 0, 0};
      if (!kind.token || first + tile >= p.tiles) continue;
      packed[tile][half] = load<uint4>(gates + 128 * tile + 64 * half, p.read_policy);
      if constexpr (Act::kGated)
        packed[tile][2 + half] = load<uint4>(ups + 128 * tile + 64 * half, p.read_policy);
    }
  };
  bring(0);
#pragma unroll
  for (int tile = 0; tile < kTilesPerBlock; ++tile) {
    if (first + tile >= p.tiles) break;
    if (tile + 1 < kTilesPerBlock) bring(tile + 1);
    float gate[16], up[16], h[16];
    unpack16(packed[tile][0], packed[tile][1], gate);
    unpack16(packed[tile][2 * kParts - 2], packed[tile][2 * kParts - 1], up);
    hidden(p.act, gate, up, h);
    const TileScale s = p.scaling.template of<E4M3>(lanes_max<8>(weighted_amax(h, prob)));
    if (!kind.written) continue;
    Tile<8>::store_codes<E4M3>(codes + 128 * tile, h, s.scale * prob);
    if (Tile<8>::lane() == 0) scale[tile * p.h.scale_tile] = kind.token ? s.scale_inv : 0.0f;
  }
}

template <class Act>
void launch_bf16(const Tensor& z, const RoutingPlan& plan, const Tensor& probs, const Act& act,
                 const Fp8Tensor& h, float eps, cudaStream_t stream) {
  const int64_t rows = h.data.shape[0], intermediate = h.data.shape[1],
                tiles = intermediate / kTile;
  const RowsParams<Act> params = {.z = z.as<uint16_t>(),
                                  .probs = probs.as<float>(),
                                  .act = act,
                                  .rows = static_cast<int>(rows),
                                  .intermediate = static_cast<int>(intermediate),
                                  .tiles = static_cast<int>(tiles),
                                  .plan = view_of(plan),
                                  .h = rows_out(h),
                                  .read_policy = read_once_policy(h.data),
                                  .scaling = {eps}};
  const int64_t blocks = cdiv(rows, kRowsPerBlock) * cdiv(tiles, kTilesPerBlock);
  launch("act_quantize", quantize_rows<Act>, static_cast<unsigned>(blocks), 8 * kRowsPerBlock, 0,
         stream, params);
}

PairSource pairs_of(const Tensor& z, const Activation& activation, int64_t intermediate) {
  return {float_source(z), activation, activation.traits().gated, static_cast<int>(intermediate)};
}

// Whether rows of these operands have kernels of their own.
bool whole_tiles(const Tensor& z, const Activation& activation, int64_t intermediate,
                 ScaleRule rule) {
  return z.dtype == DType::bf16 && !activation.interleaved && intermediate % kTile == 0 &&
         rule.kind == ScaleKind::pow2;
}

}  // namespace

template <>
void run(const ActQuantize& p, Stream stream) {
  const int64_t rows = p.z.shape[0], width = p.z.shape[1], intermediate = p.h.data.shape[1];
  if (rows == 0 || intermediate == 0) return;
  const DeviceGuard guard(p.z.device);
  const HiddenSource source = {pairs_of(p.z, p.activation, intermediate), p.probs.as<float>()};
  if (whole_tiles(p.z, p.activation, intermediate, p.rule))
    with_activation(p.activation, [&](auto act) {
      launch_bf16(p.z, p.plan, p.probs, act, p.h, p.rule.eps, stream_of(stream));
    });
  else
    quantize_rows_from<E4M3>("act_quantize", source, p.plan, rows, intermediate, p.h, p.rule,
                             kMaxFloat, stream_of(stream));
  if (!p.z_q.defined()) return;
  const float overflow = p.z.dtype == DType::f16    ? 65504.0f
                         : p.z.dtype == DType::bf16 ? 0x1.fep127f
                                                    : kMaxFloat;
  quantize_rows_from<E4M3>("act_quantize", ZSource{source.pairs.z}, p.plan, rows, width, p.z_q,
                           p.rule, overflow, stream_of(stream));
}

// ---- act_quantize_backward ----------------------------------------------------------------------
// dz = Q([dgate | dup]), of z's shape, and dprob [R] of dh [R, I] and z [R, 2I], or [R, I] without
// a gate; optional columns of dz [2I, Kcap] and of h [I, Kcap], h recomputed.
//
// bf16 operands, not interleaved, and I % 128 == 0 take one pass: backward_rows, or backward_tiles
// (act_backward_tiles.cuh) where columns are asked for. Else each output takes a pass of its own.

namespace {

constexpr const char* kBackward = "act_quantize_backward";

// dgate and dup without prob, which the scale of the codes takes in, and the terms of dprob.
template <class Act, int N>
__device__ __forceinline__ void gradient(const Act& act, const float (&gate)[N],
                                         const float (&up)[N], const float (&dh)[N],
                                         float (&dgate)[N], float (&dup)[N], float (&term)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const ActivationGrad g = act.grad(gate[i], up[i], act.sigmoid(gate[i]), dh[i]);
    dgate[i] = g.dgate, dup[i] = g.dup, term[i] = g.dprob;
  }
}

constexpr int kStages = 3;

// A lane's 6 vectors of a tile of its row (gate, up, dh), in a place of shared memory that is only
// its own: no barrier between the copy and the reads. Without a gate they are 4.
template <class Act>
struct BackwardRowsShared {
  static constexpr int kVectors = Act::kGated ? 6 : 4;
  uint4 vector[kStages][kVectors][256];
};

template <int kVectors>
__device__ __forceinline__ void stage_row(const uint16_t* gate, const uint16_t* up,
                                          const uint16_t* dh, int bytes,
                                          uint4 (&vector)[kVectors][256]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    copy_async(&vector[half][threadIdx.x], gate + 64 * half, bytes);
    if constexpr (kVectors == 6) copy_async(&vector[2 + half][threadIdx.x], up + 64 * half, bytes);
    copy_async(&vector[kVectors - 2 + half][threadIdx.x], dh + 64 * half, bytes);
  }
}

// A tile's row of dgate or dup, by the 8 lanes that share it.
template <typename F>
__device__ __forceinline__ void store_gradient(uint8_t* codes, float* scale, const float (&v)[16],
                                               float prob, bool written, bool token,
                                               Pow2Scaling scaling) {
  const TileScale s = scaling.of<F>(lanes_max<8>(weighted_amax(v, prob)));
  if (!written) return;
  Tile<8>::store_codes<F>(codes, v, s.scale * prob);
  if (Tile<8>::lane() == 0) *scale = token ? s.scale_inv : 0.0f;
}

// rows_per_block rows per block, all their tiles: 32 / rows_per_block sets of lanes take the tiles
// in turn, and their sums of dprob meet in shared memory, to be added in order.
template <typename F, class Act>
__global__ __launch_bounds__(256, std::is_same_v<Act, Swiglu> ? 3 : 2) void backward_rows(
    const __grid_constant__ ActBackward<Act> p) {
  using Shared = BackwardRowsShared<Act>;
  constexpr int kVectors = Shared::kVectors;
  extern __shared__ __align__(128) unsigned char bytes[];
  auto& shared = *reinterpret_cast<Shared*>(bytes);
  auto* tile_sums = reinterpret_cast<float*>(bytes + sizeof(Shared));  // [tiles][rows]
  const int group = threadIdx.x / 8, r = group % p.rows_per_block;
  const int64_t row = int64_t{blockIdx.x} * p.rows_per_block + r;
  const RowKind kind = row_kind(p.plan, row, p.rows);
  const float prob = p.probs != nullptr && kind.token ? p.probs[row] : 1.0f;
  const int step = 32 / p.rows_per_block, mine = group / p.rows_per_block;
  const int rounds = (p.tiles + step - 1) / step;  // the same for all lanes of a warp
  const int64_t readable = kind.token ? row : 0;
  const int64_t column = 128 * int64_t{mine} + Tile<8>::column(0);
  const uint16_t* gates = p.z + p.kParts * readable * p.intermediate + column;
  const uint16_t* grads = p.dh + readable * p.intermediate + column;
  const int bytes_read = kind.token ? 16 : 0;
  int staged = mine;  // the next tile to ask for
  const auto stage = [&](int at) {
    if (staged < p.tiles)
      stage_row(gates, gates + p.intermediate, grads, bytes_read, shared.vector[at]);
    copy_commit();
    staged += step, gates += 128 * step, grads += 128 * step;
  };
#pragma unroll
  for (int ahead = 0; ahead < kStages - 1; ++ahead) stage(ahead);
  uint8_t* codes = p.dz.data + row * p.dz.ld + column;
  float* scale = p.dz.scale + row * p.dz.scale_row + mine * p.dz.scale_tile;
  float* const sums = tile_sums + mine * p.rows_per_block + r;
  int at = 0;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const int tile = round * step + mine;
    const auto& vector = shared.vector[at];
    stage(at == 0 ? kStages - 1 : at - 1);
    at = at == kStages - 1 ? 0 : at + 1;
    copy_wait<kStages - 1>();
    float gate[16], up[16], dh[16], dgate[16], dup[16], term[16];
    unpack16(vector[0][threadIdx.x], vector[1][threadIdx.x], gate);
    unpack16(vector[kVectors - 4][threadIdx.x], vector[kVectors - 3][threadIdx.x], up);
    unpack16(vector[kVectors - 2][threadIdx.x], vector[kVectors - 1][threadIdx.x], dh);
    gradient(p.act, gate, up, dh, dgate, dup, term);
    const bool written = kind.written && tile < p.tiles;
    store_gradient<F>(codes, scale, dgate, prob, written, kind.token, p.scaling);
    if constexpr (Act::kGated)
      store_gradient<F>(codes + p.intermediate, scale + p.tiles * p.dz.scale_tile, dup, prob,
                        written, kind.token, p.scaling);
    codes += 128 * step, scale += step * p.dz.scale_tile;
    if (p.dprobs != nullptr) {
      float (&low)[8] = *reinterpret_cast<float (*)[8]>(&term[0]);
      float (&high)[8] = *reinterpret_cast<float (*)[8]>(&term[8]);
      const float sum = lanes_tree_sum<8>(tree_sum<8>(low)) + lanes_tree_sum<8>(tree_sum<8>(high));
      if (tile < p.tiles && Tile<8>::lane() == 0) sums[32 * round] = sum;
    }
  }
  if (p.dprobs == nullptr) return;
  __syncthreads();
  if (threadIdx.x < p.rows_per_block) {
    const int64_t last = int64_t{blockIdx.x} * p.rows_per_block + threadIdx.x;
    if (!row_kind(p.plan, last, p.rows).written) return;
    float sum = 0.0f;
    for (int tile = 0; tile < p.tiles; ++tile)
      sum += tile_sums[tile * p.rows_per_block + threadIdx.x];
    p.dprobs[last] = sum;
  }
}

// dprob[row]: a warp per row, 16 lanes per tile of 128 terms; tiles in ascending order
// (common/reduce.h).
__global__ void __launch_bounds__(256)
    sum_dprobs(const __grid_constant__ GradSource source, const __grid_constant__ PlanView plan,
               int rows, float* dprobs) {
  const int64_t row = int64_t{8} * blockIdx.x + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const RowKind kind = row_kind(plan, row, rows);
  if (!kind.written) return;
  float sum = 0.0f;
  for (int first = 0; kind.token && first < source.pairs.intermediate; first += 256) {
    const int column = first + 8 * lane;
    float term[8] = {};
    if (column < source.pairs.intermediate) source.terms(row, column, term);
    const float tile_sum = lanes_tree_sum<16>(tree_sum<8>(term));
    sum += __shfl_sync(kFullWarp, tile_sum, 0);
    if (first + 128 < source.pairs.intermediate) sum += __shfl_sync(kFullWarp, tile_sum, 16);
  }
  if (lane == 0) dprobs[row] = sum;
}

void launch_dprobs(const GradSource& source, const RoutingPlan& plan, int64_t rows,
                   const Tensor& dprobs, cudaStream_t stream) {
  launch(kBackward, sum_dprobs, static_cast<unsigned>(cdiv(rows, 8)), 256, 0, stream, source,
         view_of(plan), static_cast<int>(rows), dprobs.as<float>());
}

void launch_any(const GradSource& source, const RoutingPlan& plan, int64_t rows,
                const Fp8Tensor& dz, const Tensor& dprobs, const Fp8Tensor& dz_columns,
                const Fp8Tensor& h_columns, ScaleRule rule, cudaStream_t stream) {
  const int64_t intermediate = source.pairs.intermediate, width = source.pairs.z.width;
  dispatch_fp8(dz.data.dtype, [&]<typename F>() {
    if (dz_columns.defined())
      quantize_columns_from<F>(kBackward, source, plan, rows, width, dz, dz_columns, rule,
                               kMaxFloat, stream);
    else
      quantize_rows_from<F>(kBackward, source, plan, rows, width, dz, rule, kMaxFloat, stream);
  });
  if (h_columns.defined()) {
    const HiddenSource hidden = {source.pairs, source.probs};
    quantize_columns_from<E4M3>(kBackward, hidden, plan, rows, intermediate, {}, h_columns, rule,
                                kMaxFloat, stream);
  }
  if (dprobs.defined()) launch_dprobs(source, plan, rows, dprobs, stream);
}

// Rows that a block of backward_rows takes: 8 where its 4 sets of tile lanes find work, else 16 or
// 32.
int rows_per_block(int64_t tiles) {
  int best = 8;
  double best_use = 0.0;
  for (int rows = 8; rows <= 32; rows *= 2) {
    const int64_t lanes = 32 / rows;
    const double use = static_cast<double>(tiles) / static_cast<double>(lanes * cdiv(tiles, lanes));
    if (use > best_use + 0.05) best = rows, best_use = use;
  }
  return best;
}

template <typename F, class Act>
void launch_rows(ActBackward<Act> p, cudaStream_t stream) {
  p.rows_per_block = rows_per_block(p.tiles);
  const size_t shared = sizeof(BackwardRowsShared<Act>) +
                        static_cast<size_t>(p.rows_per_block * p.tiles) * sizeof(float);
  launch(kBackward, backward_rows<F, Act>, static_cast<unsigned>(cdiv(p.rows, p.rows_per_block)),
         256, shared, stream, p);
}

// Tiles that a range of backward_tiles has at least. Where sums of dprob are handed on, a block of
// tokens takes as long as a range of it and a wait, of about half a tile's time, a range.
int64_t fewest_tiles(int64_t tiles, bool dprobs) {
  return dprobs ? std::lround(std::sqrt(static_cast<double>(tiles))) : 1;
}

template <typename F, class Act>
void launch_tiles(const ActBackward<Act>& p, int64_t tiles, const Fp8Tensor& dz_columns,
                  const Fp8Tensor& h_columns, Device device, cudaStream_t stream) {
  const ActBackwardColumns to = {columns_out(dz_columns), columns_out(h_columns)};
  const int64_t ranges =
      std::min<int64_t>(cdiv(tiles, fewest_tiles(p.tiles, p.dprobs != nullptr)), kMostRanges);
  const unsigned grid = persistent_grid(device, ranges, 1);
  const auto go = [&]<ColumnKind kKind>() {
    launch(kBackward, backward_tiles<F, kKind, Act>, grid, BackwardTile::kThreads,
           sizeof(BackwardTilesShared<Act>), stream, p, to);
  };
  const ColumnKind kind = kind_of(dz_columns.defined() ? dz_columns : h_columns);
  kind == ColumnKind::block ? go.template operator()<ColumnKind::block>()
                            : go.template operator()<ColumnKind::column>();
}

}  // namespace

template <>
void run(const ActQuantizeBackward& p, Stream stream) {
  const int64_t rows = p.dh.shape[0], intermediate = p.dh.shape[1];
  if (rows == 0 || intermediate == 0) return;
  const DeviceGuard guard(p.dh.device);
  const bool columns = p.dz_columns.defined() || p.h_columns.defined();
  if (p.dh.dtype != DType::bf16 || !whole_tiles(p.z, p.activation, intermediate, p.rule)) {
    const GradSource source = {pairs_of(p.z, p.activation, intermediate), float_source(p.dh),
                               p.probs.as<float>()};
    return launch_any(source, p.plan, rows, p.dz, p.dprobs, p.dz_columns, p.h_columns, p.rule,
                      stream_of(stream));
  }
  const int64_t tiles = columns ? p.plan.columns() / kTile * (intermediate / kTile) : 0;
  if (columns && tiles == 0) return;
  with_activation(p.activation, [&]<class Act>(Act act) {
    const ActBackward<Act> params = {.z = p.z.as<uint16_t>(),
                                     .dh = p.dh.as<uint16_t>(),
                                     .probs = p.probs.as<float>(),
                                     .rows = static_cast<int>(rows),
                                     .intermediate = static_cast<int>(intermediate),
                                     .tiles = static_cast<int>(intermediate / kTile),
                                     .plan = view_of(p.plan),
                                     .dz = rows_out(p.dz),
                                     .dprobs = p.dprobs.as<float>(),
                                     .scaling = {p.rule.eps},
                                     .act = act,
                                     .carry_ready = p.workspace.as<unsigned>()};
    dispatch_fp8(p.dz.data.dtype, [&]<typename F>() {
      if (columns)
        launch_tiles<F>(params, tiles, p.dz_columns, p.h_columns, p.dh.device, stream_of(stream));
      else
        launch_rows<F>(params, stream_of(stream));
    });
  });
}

}  // namespace fp8moe::cuda
