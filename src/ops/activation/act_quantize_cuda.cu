// act_quantize: the activation of z, quantized as it is computed. Its kernels are templates over
// the activations of common/activation.h.
//
// h = Q(act(z) * prob) of z = [gate | up] [R, 2I], or z [R, I] without a gate, and Q(z).
//
// bf16 z has a kernel of its own, quantize_rows. It multiplies the scale by prob, which is exact
// for a power of two, and where there is no prob. The rest, and Q(z), takes the general tile
// kernel.
#include "common/backends.h"
#include "common/dispatch.h"
#include "device/runtime.h"
#include "ops/activation/act_rows.cuh"

namespace fp8moe::cuda {

namespace {

constexpr int kRowsPerBlock = 16;  // 32 take 0.3 to 1.9% longer
constexpr int kTilesPerBlock = 4;

template <class Act, class Rule>
struct RowsParams {
  const uint16_t* z;   // [R, 2I] bf16, or [R, I]
  const float* probs;  // [R] or nullptr
  Act act;
  int rows, intermediate, tiles;
  PlanView plan;
  RowsOut h;
  uint64_t read_policy;
  Rule scaling;
};

// h without prob, which the scale of the codes takes in.
template <class Act, int N>
__device__ __forceinline__ void hidden(const Act& act, const float (&gate)[N], const float (&up)[N],
                                       float (&h)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) h[i] = act.value(gate[i], up[i], act.sigmoid(gate[i]));
}

// 16 rows x 4 tiles per block, the next tile loaded while one is computed.
template <class Act, bool kAny, bool kTurns, class Rule>
__global__ __launch_bounds__(8 * kRowsPerBlock, 8) void quantize_rows(
    const __grid_constant__ RowsParams<Act, Rule> p) {
  constexpr int kParts = Act::kGated ? 2 : 1;
  const int groups = (p.tiles + kTilesPerBlock - 1) / kTilesPerBlock;
  const int64_t row = int64_t{kRowsPerBlock} * (blockIdx.x / groups) + threadIdx.x / 8;
  const int first = blockIdx.x % groups * kTilesPerBlock;
  const RowKind kind = row_kind(p.plan, row, p.rows);
  const float prob = p.probs != nullptr && kind.token ? p.probs[row] : 1.0f;
  const int64_t column = 128 * int64_t{first} + Tile<8>::column(0);
  const uint16_t* gates = p.z + kParts * row * p.intermediate + (kTurns ? 2 * column : column);
  const uint16_t* ups = kTurns ? gates + 8 : gates + p.intermediate;
  const auto inside = [&](int tile, int half) {
    return !kAny || column + 128 * tile + 64 * half < p.intermediate;
  };
  uint8_t* codes = p.h.data + row * p.h.ld + column;
  float* scale = p.h.scale + row * p.h.scale_row + first * p.h.scale_tile;

  uint4 packed[kTilesPerBlock][2 * kParts];  // two of them at a time, once unrolled
  const auto bring = [&](int tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      packed[tile][half] = uint4{0, 0, 0, 0};
      if constexpr (Act::kGated) packed[tile][2 + half] = uint4{0, 0, 0, 0};
      if (!kind.token || first + tile >= p.tiles || !inside(tile, half)) continue;
      const int at = (128 * tile + 64 * half) * (kTurns ? 2 : 1);
      packed[tile][half] = load<uint4>(gates + at, p.read_policy);
      if constexpr (Act::kGated) packed[tile][2 + half] = load<uint4>(ups + at, p.read_policy);
    }
  };
  bring(0);
#pragma unroll
  for (int tile = 0; tile < kTilesPerBlock; ++tile) {
    if (first + tile >= p.tiles) break;
    if (tile + 1 < kTilesPerBlock) bring(tile + 1);
    float gate[16], up[16], h[16];
    if constexpr (kTurns) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        split_pairs(packed[tile][half], packed[tile][2 + half], packed[tile][half],
                    packed[tile][2 + half]);
    }
    unpack16(packed[tile][0], packed[tile][1], gate);
    unpack16(packed[tile][2 * kParts - 2], packed[tile][2 * kParts - 1], up);
    hidden(p.act, gate, up, h);
    const TileScale s = p.scaling.template of<E4M3>(lanes_max<8>(weighted_amax(h, prob)));
    if (!kind.written) continue;
    if constexpr (kAny) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (inside(tile, half))
          store(codes + 128 * tile + 64 * half, fp8_encode8<E4M3>(h + 8 * half, s.scale * prob));
    } else {
      Tile<8>::store_codes<E4M3>(codes + 128 * tile, h, s.scale * prob);
    }
    if (Tile<8>::lane() == 0) scale[tile * p.h.scale_tile] = kind.token ? s.scale_inv : 0.0f;
  }
}

template <class Act, bool kAny, bool kTurns, class Rule>
void launch_bf16(const Tensor& z, const RoutingPlan& plan, const Tensor& probs, const Act& act,
                 const Fp8Tensor& h, Rule scaling, cudaStream_t stream) {
  const int64_t rows = h.data.shape[0], intermediate = h.data.shape[1],
                tiles = cdiv(intermediate, kTile);
  const RowsParams<Act, Rule> params = {.z = z.as<uint16_t>(),
                                        .probs = probs.as<float>(),
                                        .act = act,
                                        .rows = static_cast<int>(rows),
                                        .intermediate = static_cast<int>(intermediate),
                                        .tiles = static_cast<int>(tiles),
                                        .plan = view_of(plan),
                                        .h = rows_out(h),
                                        .read_policy = read_once_policy(h.data),
                                        .scaling = scaling};
  const int64_t blocks = cdiv(rows, kRowsPerBlock) * cdiv(tiles, kTilesPerBlock);
  launch("act_quantize", quantize_rows<Act, kAny, kTurns, Rule>, static_cast<unsigned>(blocks),
         8 * kRowsPerBlock, 0, stream, params);
}

}  // namespace

template <>
void run(const ActQuantize& p, Stream stream) {
  const int64_t rows = p.z.shape[0], width = p.z.shape[1], intermediate = p.h.data.shape[1];
  if (rows == 0 || intermediate == 0) return;
  const DeviceGuard guard(p.z.device);
  const HiddenSource source = {pairs_of(p.z, p.activation, intermediate), p.probs.as<float>(),
                               p.rounding};
  const ScaleKind kind = p.rule.kind;
  const bool whole = !p.activation.interleaved && intermediate % kTile == 0;
  const auto by_rows = [&]<bool kAny, bool kTurns>(auto scaling) {
    with_rounding(p.activation, p.rounding, [&]<class Act>(Act act) {
      launch_bf16<Act, kAny, kTurns && Act::kGated>(p.z, p.plan, p.probs, act, p.h, scaling,
                                                    stream_of(stream));
    });
  };
  if (p.z.dtype == DType::bf16 && kind == ScaleKind::pow2) {
    const Pow2Scaling scaling = {p.rule.eps};
    if (p.activation.interleaved)
      by_rows.template operator()<true, true>(scaling);
    else
      whole ? by_rows.template operator()<false, false>(scaling)
            : by_rows.template operator()<true, false>(scaling);
  } else if (p.z.dtype == DType::bf16 && kind != ScaleKind::amax && whole && !p.probs.defined()) {
    by_rows.template operator()<false, false>(Scaling{kind, p.rule.eps, kMaxFloat});
  } else {
    quantize_rows_from<E4M3>("act_quantize", source, p.plan, rows, intermediate, p.h, p.rule,
                             kMaxFloat, stream_of(stream));
  }
  if (!p.z_q.defined()) return;
  const float overflow = p.z.dtype == DType::f16    ? 65504.0f
                         : p.z.dtype == DType::bf16 ? 0x1.fep127f
                                                    : kMaxFloat;
  quantize_rows_from<E4M3>("act_quantize", ZSource{source.pairs.z}, p.plan, rows, width, p.z_q,
                           p.rule, overflow, stream_of(stream));
}

}  // namespace fp8moe::cuda
