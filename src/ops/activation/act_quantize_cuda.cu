// h = Q(silu(gate) * up * prob) of z = [gate | up] [R, 2I], and Q(z).
//
// bf16 z, I % 128 == 0 and power-of-two scales have a kernel of their own: quantize_rows. The rest,
// and Q(z), takes the general tile kernel.
#include "common/dispatch.h"
#include "device/runtime.h"
#include "ops/activation/swiglu_rows.cuh"
#include "ops/backends.h"

namespace fp8moe::cuda {
namespace {

constexpr const char* kOp = "act_quantize";
constexpr int kRowsPerBlock = 16;  // 32 take 0.3 to 1.9% longer
constexpr int kTilesPerBlock = 4;

struct RowsParams {
  const uint16_t* z;   // [R, 2I] bf16
  const float* probs;  // [R] or nullptr
  float limit;
  int rows, intermediate, tiles;
  PlanView plan;
  RowsOut h;
  uint64_t read_policy;
  Pow2Scaling scaling;
};

// h without prob, which the scale of the codes takes in.
template <bool kClamp, int N>
__device__ __forceinline__ void hidden(const float (&gate)[N], const float (&up)[N], float limit,
                                       float (&h)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const SwigluInput in = clamp_swiglu(gate[i], up[i], kClamp ? limit : 0.0f);
    h[i] = swiglu(in, pinned_sigmoid(in.gate), 1.0f);
  }
}

// 16 rows x 4 tiles per block, the next tile loaded while one is computed.
template <bool kClamp>
__global__ __launch_bounds__(8 * kRowsPerBlock,
                             8) void quantize_rows(const __grid_constant__ RowsParams p) {
  const int groups = (p.tiles + kTilesPerBlock - 1) / kTilesPerBlock;
  const int64_t row = int64_t{kRowsPerBlock} * (blockIdx.x / groups) + threadIdx.x / 8;
  const int first = blockIdx.x % groups * kTilesPerBlock;
  const RowKind kind = row_kind(p.plan, row, p.rows);
  const float prob = p.probs != nullptr && kind.token ? p.probs[row] : 1.0f;
  const int64_t column = 128 * int64_t{first} + Tile<8>::column(0);
  const uint16_t* gates = p.z + 2 * row * p.intermediate + column;
  const uint16_t* ups = gates + p.intermediate;
  uint8_t* codes = p.h.data + row * p.h.ld + column;
  float* scale = p.h.scale + row * p.h.scale_row + first * p.h.scale_tile;

  uint4 packed[kTilesPerBlock][4];  // two of them at a time, once unrolled
  const auto bring = [&](int tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      packed[tile][half] = packed[tile][2 + half] = uint4{0, 0, 0, 0};
      if (!kind.token || first + tile >= p.tiles) continue;
      packed[tile][half] = load<uint4>(gates + 128 * tile + 64 * half, p.read_policy);
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
    unpack16(packed[tile][2], packed[tile][3], up);
    hidden<kClamp>(gate, up, p.limit, h);
    const TileScale s = p.scaling.of<E4M3>(lanes_max<8>(weighted_amax(h, prob)));
    if (!kind.written) continue;
    Tile<8>::store_codes<E4M3>(codes + 128 * tile, h, s.scale * prob);
    if (Tile<8>::lane() == 0) scale[tile * p.h.scale_tile] = kind.token ? s.scale_inv : 0.0f;
  }
}

void launch_bf16(const Tensor& z, const RoutingPlan& plan, const Tensor& probs, float limit,
                 const Fp8Tensor& h, float eps, cudaStream_t stream) {
  const int64_t rows = h.data.shape[0], intermediate = h.data.shape[1],
                tiles = intermediate / kTile;
  const RowsParams params = {.z = z.as<uint16_t>(),
                             .probs = probs.as<float>(),
                             .limit = limit,
                             .rows = static_cast<int>(rows),
                             .intermediate = static_cast<int>(intermediate),
                             .tiles = static_cast<int>(tiles),
                             .plan = view_of(plan),
                             .h = rows_out(h),
                             .read_policy = read_once_policy(h.data),
                             .scaling = {eps}};
  const int64_t blocks = cdiv(rows, kRowsPerBlock) * cdiv(tiles, kTilesPerBlock);
  launch(kOp, limit > 0.0f ? quantize_rows<true> : quantize_rows<false>,
         static_cast<unsigned>(blocks), 8 * kRowsPerBlock, 0, stream, params);
}

}  // namespace

template <>
void run(const ActQuantize& p, Stream stream) {
  const int64_t rows = p.z.shape[0], intermediate = p.z.shape[1] / 2;
  if (rows == 0 || intermediate == 0) return;
  const DeviceGuard guard(p.z.device);
  const HiddenSource source = {.z = float_source(p.z),
                               .probs = p.probs.as<float>(),
                               .limit = p.limit,
                               .intermediate = static_cast<int>(intermediate)};
  if (p.z.dtype == DType::bf16 && intermediate % kTile == 0 && p.rule.kind == ScaleKind::pow2)
    launch_bf16(p.z, p.plan, p.probs, p.limit, p.h, p.rule.eps, stream_of(stream));
  else
    quantize_rows_from<E4M3>(kOp, source, p.plan, rows, intermediate, p.h, p.rule, kMaxFloat,
                             stream_of(stream));
  if (!p.z_q.defined()) return;
  const float overflow = p.z.dtype == DType::f16    ? 65504.0f
                         : p.z.dtype == DType::bf16 ? 0x1.fep127f
                                                    : kMaxFloat;
  quantize_rows_from<E4M3>(kOp, ZSource{source.z}, p.plan, rows, 2 * intermediate, p.z_q, p.rule,
                           overflow, stream_of(stream));
}

}  // namespace fp8moe::cuda
