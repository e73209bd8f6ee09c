// act_quantize_backward, its kernels templates over the activations of common/activation.h.
//
// dz = Q([dgate | dup]), of z's shape, and dprob [R] of dh [R, I] and z [R, 2I], or [R, I] without
// a gate; optional columns of dz [2I, Kcap] and of h [I, Kcap], h recomputed.
//
// bf16 operands for which act_rows.cuh has a row kernel take one pass: backward_rows, or
// backward_tiles (act_backward_tiles.cuh) where the caller wants columns. Else each output takes
// its own pass, as it does where more of dup would have to wait than backward_tiles has place for.
#include <type_traits>

#include "common/backends.h"
#include "common/dispatch.h"
#include "device/runtime.h"
#include "ops/activation/act_backward.cuh"

namespace fp8moe::cuda {

namespace {

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

// left: columns of the row from this lane's first one on, where the last tile may be a part.
template <bool kPart, int kVectors>
__device__ __forceinline__ void stage_row(const uint16_t* gate, const uint16_t* up,
                                          const uint16_t* dh, int bytes, int left,
                                          uint4 (&vector)[kVectors][256]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int wanted = kPart && 64 * half >= left ? 0 : bytes;
    copy_async(&vector[half][threadIdx.x], gate + 64 * half, wanted);
    if constexpr (kVectors == 6) copy_async(&vector[2 + half][threadIdx.x], up + 64 * half, wanted);
    copy_async(&vector[kVectors - 2 + half][threadIdx.x], dh + 64 * half, wanted);
  }
}

// The same of pairs: of each 64 a lane l takes pairs 4 l ... 4 l + 3 and 32 more, so that lanes
// read and write neighbours. left: pairs from this lane's first one on.
__device__ __forceinline__ void stage_pairs(const uint16_t* z, const uint16_t* dh, int bytes,
                                            int left, uint4 (&vector)[6][256]) {
#pragma unroll
  for (int four = 0; four < 4; ++four) {  // 32 pairs further each
    const int half = four / 2, wanted = 32 * four < left ? bytes : 0;
    copy_async(&vector[2 * (four % 2) + half][threadIdx.x], z + 64 * four, wanted);
    auto* grads = reinterpret_cast<uint2*>(&vector[4 + half][threadIdx.x]);
    copy_async_half(grads + four % 2, dh + 32 * four, wanted / 2);
  }
}

// The same of SideBySide, whose places take columns of their own. Pointers are to the row.
__device__ __forceinline__ void stage_side(const SideBySide& side, int item, const uint16_t* z,
                                           const uint16_t* dh, int bytes, uint4 (&vector)[6][256]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = side.column(item, Tile<8>::column(half)), wanted = column < 0 ? 0 : bytes;
    copy_async(&vector[half][threadIdx.x], z + column, wanted);
    copy_async(&vector[2 + half][threadIdx.x], z + side.inner + column, wanted);
    copy_async(&vector[4 + half][threadIdx.x], dh + column, wanted);
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

// The same of a tile that may be a part. left: columns from this lane's first one on.
template <typename F>
__device__ __forceinline__ void store_part(uint8_t* codes, float* scale, const float (&v)[16],
                                           float prob, int left, bool written, bool token,
                                           Pow2Scaling scaling) {
  const TileScale s = scaling.of<F>(lanes_max<8>(weighted_amax(v, prob)));
  if (!written) return;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (64 * half < left) store(codes + 64 * half, fp8_encode8<F>(v + 8 * half, s.scale * prob));
  if (Tile<8>::lane() == 0 && left > 0) *scale = token ? s.scale_inv : 0.0f;
}

// The same of a tile of dup of SideBySide, which it takes from `waiting`, where it leaves what it
// has for the next one. `dz` and `scale` are those of the row's first column and tile.
template <typename F>
__device__ __forceinline__ void store_side(const SideBySide& side, int item, uint8_t* dz,
                                           float* scale, int64_t scale_tile, float (&dup)[16],
                                           float (&waiting)[16], float prob, bool written,
                                           bool token, Pow2Scaling scaling) {
  int column[2];
  float most = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int place = Tile<8>::column(half);
    const bool waits = side.waits(place);
    column[half] = side.up_column(item, place);
    float (&eight)[8] = *reinterpret_cast<float (*)[8]>(&dup[8 * half]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float now = eight[i];
      eight[i] = waits ? waiting[8 * half + i] : now;
      waiting[8 * half + i] = now;
    }
    most = fmaxf(most, column[half] < 0 ? 0.0f : weighted_amax(eight, prob));
  }
  const TileScale s = scaling.of<F>(lanes_max<8>(most));
  if (!written || item == 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (column[half] >= 0)
      store(dz + side.inner + column[half], fp8_encode8<F>(dup + 8 * half, s.scale * prob));
  if (Tile<8>::lane() == 0) scale[(side.whole + item) * scale_tile] = token ? s.scale_inv : 0.0f;
}

template <class Act, RowKernel kKernel>
constexpr int kBlocksOfRows = std::is_same_v<Act, Swiglu> && (kKernel == RowKernel::whole) ? 3 : 2;

// rows_per_block rows per block, all their tiles: 32 / rows_per_block sets of lanes take the tiles
// in turn, and their sums of dprob meet in shared memory, to be added in order. Of SideBySide one
// set takes all tiles of 32 rows.
template <typename F, class Act, RowKernel kKernel>
__global__ __launch_bounds__(256, kBlocksOfRows<Act, kKernel>) void backward_rows(
    const __grid_constant__ ActBackward<Act> p) {
  constexpr bool kTurns = kKernel == RowKernel::any && Act::kGated;
  constexpr bool kSide = kKernel == RowKernel::side;
  constexpr bool kAlone = kKernel == RowKernel::any && !kTurns;  // a z of I columns
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
  const int first_pair = 4 * Tile<8>::lane();  // of each 32
  const int64_t z_column = kTurns ? 256 * int64_t{mine} + 2 * first_pair : column;
  const uint16_t* gates = p.z + p.kParts * readable * p.intermediate + z_column;
  const uint16_t* grads =
      p.dh + readable * p.intermediate + (kTurns ? 128 * int64_t{mine} + first_pair : column);
  const int bytes_read = kind.token ? 16 : 0;
  const SideBySide side(p.intermediate);  // of kSide alone
  float waiting[16] = {};
  int staged = mine;  // the next tile to ask for
  const auto stage = [&](int at) {
    if (staged < p.tiles) {
      if constexpr (kTurns)
        stage_pairs(gates, grads, bytes_read, p.intermediate - (128 * staged + first_pair),
                    shared.vector[at]);
      else if constexpr (kSide)
        stage_side(side, staged, p.z + 2 * readable * p.intermediate,
                   p.dh + readable * p.intermediate, bytes_read, shared.vector[at]);
      else
        stage_row<kAlone>(gates, gates + p.intermediate, grads, bytes_read,
                          p.intermediate - (128 * staged + Tile<8>::column(0)), shared.vector[at]);
    }
    copy_commit();
    staged += step, gates += (kTurns ? 256 : 128) * step, grads += 128 * step;
  };
#pragma unroll
  for (int ahead = 0; ahead < kStages - 1; ++ahead) stage(ahead);
  uint8_t* codes = p.dz.data + row * p.dz.ld + z_column;
  float* scale = p.dz.scale + row * p.dz.scale_row + (kTurns ? 2 : 1) * mine * p.dz.scale_tile;
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
    if constexpr (kTurns) {
      uint4 gates[2], ups[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        split_pairs(vector[half][threadIdx.x], vector[2 + half][threadIdx.x], gates[half],
                    ups[half]);
      unpack16(gates[0], gates[1], gate);
      unpack16(ups[0], ups[1], up);
    } else {
      unpack16(vector[0][threadIdx.x], vector[1][threadIdx.x], gate);
      unpack16(vector[kVectors - 4][threadIdx.x], vector[kVectors - 3][threadIdx.x], up);
    }
    unpack16(vector[kVectors - 2][threadIdx.x], vector[kVectors - 1][threadIdx.x], dh);
    gradient(p.act, gate, up, dh, dgate, dup, term);
    const bool written = kind.written && tile < p.tiles;
    bool straddles[2] = {};
    if constexpr (kSide) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        straddles[i / 8] = side.straddles(tile, Tile<8>::column(i / 8));
        dgate[i] = straddles[i / 8] ? dup[i] : dgate[i];
      }
    }
    if constexpr (kTurns) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // of the 128 pairs: a tile of dz each
        float both[16];
#pragma unroll
        for (int i = 0; i < 8; ++i)
          both[2 * i] = dgate[8 * half + i], both[2 * i + 1] = dup[8 * half + i];
        const int left = 2 * (p.intermediate - (128 * tile + 64 * half + first_pair));
        store_part<F>(codes + 128 * half, scale + half * p.dz.scale_tile, both, prob, left, written,
                      kind.token, p.scaling);
      }
    } else if constexpr (kAlone || kSide) {
      const int end = kSide ? side.end() : p.intermediate;
      store_part<F>(codes, scale, dgate, prob, end - (128 * tile + Tile<8>::column(0)), written,
                    kind.token, p.scaling);
      if constexpr (kSide)
        store_side<F>(side, tile, p.dz.data + row * p.dz.ld, p.dz.scale + row * p.dz.scale_row,
                      p.dz.scale_tile, dup, waiting, prob, written, kind.token, p.scaling);
    } else {
      store_gradient<F>(codes, scale, dgate, prob, written, kind.token, p.scaling);
      if constexpr (Act::kGated)
        store_gradient<F>(codes + p.intermediate, scale + p.tiles * p.dz.scale_tile, dup, prob,
                          written, kind.token, p.scaling);
    }
    codes += (kTurns ? 256 : 128) * step, scale += (kTurns ? 2 : 1) * step * p.dz.scale_tile;
    if (p.dprobs != nullptr) {
      float (&low)[8] = *reinterpret_cast<float (*)[8]>(&term[0]);
      float (&high)[8] = *reinterpret_cast<float (*)[8]>(&term[8]);
      const auto of_64 = [&](const float (&terms)[8], int half) {
        if constexpr (!kTurns)
          return lanes_tree_sum<8>(straddles[half] ? 0.0f : tree_sum<8>(terms));
        return lanes_tree_sum<8>(tree_sum<4>(terms)) + lanes_tree_sum<8>(tree_sum<4>(terms + 4));
      };
      const float sum = of_64(low, 0) + of_64(high, 1);
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

template <typename F, class Act, RowKernel kKernel>
void launch_rows(ActBackward<Act> p, cudaStream_t stream) {
  p.rows_per_block = kKernel == RowKernel::side ? 32 : rows_per_block(p.tiles);
  const size_t shared = sizeof(BackwardRowsShared<Act>) +
                        static_cast<size_t>(p.rows_per_block * p.tiles) * sizeof(float);
  launch(kBackward, backward_rows<F, Act, kKernel>,
         static_cast<unsigned>(cdiv(p.rows, p.rows_per_block)), 256, shared, stream, p);
}

// dprob[row]: a warp per row, 16 lanes per tile of 128 terms; tiles in ascending order
// (common/reduce.h).
template <class Grad>
__global__ void __launch_bounds__(256)
    sum_dprobs(const __grid_constant__ Grad source, const __grid_constant__ PlanView plan, int rows,
               int intermediate, float* dprobs) {
  const int64_t row = int64_t{8} * blockIdx.x + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const RowKind kind = row_kind(plan, row, rows);
  if (!kind.written) return;
  float sum = 0.0f;
  for (int first = 0; kind.token && first < intermediate; first += 256) {
    const int column = first + 8 * lane;
    float term[8] = {};
    if (column < intermediate) source.terms(row, column, term);
    const float tile_sum = lanes_tree_sum<16>(tree_sum<8>(term));
    sum += __shfl_sync(kFullWarp, tile_sum, 0);
    if (first + 128 < intermediate) sum += __shfl_sync(kFullWarp, tile_sum, 16);
  }
  if (lane == 0) dprobs[row] = sum;
}

// By a source of dz, which has the terms of dprob, too, and one of h.
template <class Grad, class Hidden>
void launch_apart(const ActQuantizeBackward& p, const Grad& source, const Hidden& hidden,
                  cudaStream_t stream) {
  const int64_t rows = p.dh.shape[0], intermediate = p.dh.shape[1], width = p.z.shape[1];
  dispatch_fp8(p.dz.data.dtype, [&]<typename F>() {
    if (p.dz_columns.defined())
      quantize_columns_from<F>(kBackward, source, p.plan, rows, width, p.dz, p.dz_columns, p.rule,
                               kMaxFloat, stream);
    else
      quantize_rows_from<F>(kBackward, source, p.plan, rows, width, p.dz, p.rule, kMaxFloat,
                            stream);
  });
  if (p.h_columns.defined())
    quantize_columns_from<E4M3>(kBackward, hidden, p.plan, rows, intermediate, {}, p.h_columns,
                                p.rule, kMaxFloat, stream);
  if (p.dprobs.defined())
    launch(kBackward, sum_dprobs<Grad>, static_cast<unsigned>(cdiv(rows, 8)), 256, 0, stream,
           source, view_of(p.plan), static_cast<int>(rows), static_cast<int>(intermediate),
           p.dprobs.as<float>());
}

}  // namespace

template <>
void run(const ActQuantizeBackward& p, Stream stream) {
  const int64_t rows = p.dh.shape[0], intermediate = p.dh.shape[1];
  if (rows == 0 || intermediate == 0) return;
  const DeviceGuard guard(p.dh.device);
  const bool columns = p.dz_columns.defined() || p.h_columns.defined();
  const RowKernel kernel = row_kernel_of(p.z, p.activation, intermediate);
  const bool served =
      kernel != RowKernel::none && p.dh.dtype == DType::bf16 && p.rule.kind == ScaleKind::pow2 &&
      !(kernel == RowKernel::side && columns && intermediate % kTile > kMostWaiting);
  if (!served) {
    const PairSource pairs = pairs_of(p.z, p.activation, intermediate);
    const GradSource source = {pairs, float_source(p.dh), p.probs.as<float>()};
    return launch_apart(p, source, HiddenSource{pairs, source.probs}, stream_of(stream));
  }
  if (columns)
    return dispatch_fp8(p.dz.data.dtype, [&]<typename F>() {
      with_kernel(kernel,
                  [&]<RowKernel kKernel>() { launch_tiles<F, kKernel>(p, stream_of(stream)); });
    });
  with_activation(p.activation, [&]<class Act>(Act act) {
    dispatch_fp8(p.dz.data.dtype, [&]<typename F>() {
      with_kernel(kernel, [&]<RowKernel kKernel>() {
        if constexpr (kKernel != RowKernel::side || Act::kGated)
          launch_rows<F, Act, kKernel>(backward_of(p, items_of<kKernel>(intermediate), act),
                                       stream_of(stream));
      });
    });
  });
}

}  // namespace fp8moe::cuda
