// act_quantize_backward, its kernels templates over the activations of common/activation.h.
//
// dz = Q([dgate | dup]), of z's shape, and dprob [R] of dh [R, I] and z [R, 2I], or [R, I] without
// a gate; optional columns of dz [2I, Kcap] and of h [I, Kcap], h recomputed.
//
// bf16 operands for which act_rows.cuh has a row kernel take one pass: backward_rows, or
// backward_tiles (act_backward_tiles.cuh) where the caller wants columns. Else each output takes
// its own pass.
#include <type_traits>

#include "common/backends.h"
#include "common/dispatch.h"
#include "device/runtime.h"
#include "ops/activation/act_backward_apart.cuh"

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

// left: columns of the row from this lane's first one on, of kAny.
template <bool kAny, int kVectors>
__device__ __forceinline__ void stage_row(const uint16_t* gate, const uint16_t* up,
                                          const uint16_t* dh, int bytes, int left,
                                          uint4 (&vector)[kVectors][256]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int wanted = kAny && 64 * half >= left ? 0 : bytes;
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

// rows_per_block rows per block, all their tiles: 32 / rows_per_block sets of lanes take the tiles
// in turn, and their sums of dprob meet in shared memory, to be added in order.
template <typename F, class Act, bool kAny>
__global__ __launch_bounds__(256, std::is_same_v<Act, Swiglu> && !kAny ? 3 : 2) void backward_rows(
    const __grid_constant__ ActBackward<Act> p) {
  constexpr bool kTurns = kAny && Act::kGated;
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
  int staged = mine;  // the next tile to ask for
  const auto stage = [&](int at) {
    if (staged < p.tiles) {
      if constexpr (kTurns)
        stage_pairs(gates, grads, bytes_read, p.intermediate - (128 * staged + first_pair),
                    shared.vector[at]);
      else
        stage_row<kAny>(gates, gates + p.intermediate, grads, bytes_read,
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
    } else if constexpr (kAny) {
      store_part<F>(codes, scale, dgate, prob, p.intermediate - (128 * tile + Tile<8>::column(0)),
                    written, kind.token, p.scaling);
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
      const auto of_64 = [](const float (&terms)[8]) {
        if constexpr (!kTurns) return lanes_tree_sum<8>(tree_sum<8>(terms));
        return lanes_tree_sum<8>(tree_sum<4>(terms)) + lanes_tree_sum<8>(tree_sum<4>(terms + 4));
      };
      const float sum = of_64(low) + of_64(high);
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

template <typename F, class Act, bool kAny>
void launch_rows(ActBackward<Act> p, cudaStream_t stream) {
  p.rows_per_block = rows_per_block(p.tiles);
  const size_t shared = sizeof(BackwardRowsShared<Act>) +
                        static_cast<size_t>(p.rows_per_block * p.tiles) * sizeof(float);
  launch(kBackward, backward_rows<F, Act, kAny>,
         static_cast<unsigned>(cdiv(p.rows, p.rows_per_block)), 256, shared, stream, p);
}

}  // namespace

template <>
void run(const ActQuantizeBackward& p, Stream stream) {
  const int64_t rows = p.dh.shape[0], intermediate = p.dh.shape[1];
  if (rows == 0 || intermediate == 0) return;
  const DeviceGuard guard(p.dh.device);
  const bool columns = p.dz_columns.defined() || p.h_columns.defined();
  const RowKernel kernel = row_kernel_of(p.z, p.activation, intermediate);
  if (p.dh.dtype != DType::bf16 || p.rule.kind != ScaleKind::pow2 || kernel == RowKernel::none) {
    if (has_side_kernels(p)) return launch_side_by_side(p, stream_of(stream));
    const PairSource pairs = pairs_of(p.z, p.activation, intermediate);
    const GradSource source = {pairs, float_source(p.dh), p.probs.as<float>()};
    return launch_apart(p, source, HiddenSource{pairs, source.probs}, stream_of(stream));
  }
  if (columns)
    return dispatch_fp8(p.dz.data.dtype, [&]<typename F>() {
      with_kind(kernel, [&]<bool kAny>() { launch_tiles<F, kAny>(p, stream_of(stream)); });
    });
  with_activation(p.activation, [&]<class Act>(Act act) {
    dispatch_fp8(p.dz.data.dtype, [&]<typename F>() {
      with_kind(kernel, [&]<bool kAny>() {
        launch_rows<F, Act, kAny>(backward_of(p, act), stream_of(stream));
      });
    });
  });
}

}  // namespace fp8moe::cuda
