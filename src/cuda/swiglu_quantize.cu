// h = Q(silu(gate) * up * prob) of z = [gate | up] [R, 2I]; optional columns of h [I, Kcap] from
// the same registers, and Q(z). One pass over z (two with Q(z)), whatever the outputs.
#include "core/backends.h"
#include "core/dispatch.h"
#include "cuda/device/swiglu_rows.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {
namespace {

constexpr const char* kOp = "swiglu_quantize";
constexpr int kRowsPerBlock = 32;
constexpr int kTilesPerBlock = 4;

struct RowsParams {
  const uint16_t* z;   // [R, 2I] bf16
  const float* probs;  // [R] or nullptr
  float clamp;
  int rows, intermediate, tiles;
  PlanView plan;
  RowsOut h;
  Scaling scaling;
};

template <bool kClamp>
__device__ __forceinline__ void hidden(const Packed16& gate, const Packed16& up, float prob,
                                       float clamp, float (&h)[16]) {
  float g[16], u[16];
  gate.unpack16(g);
  up.unpack16(u);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const SwigluInput in = clamp_swiglu(g[i], u[i], kClamp ? clamp : 0.0f);
    h[i] = swiglu(in, pinned_sigmoid(in.gate), prob);
  }
}

// bf16 z, I % 128 == 0, no columns: 32 rows x 4 tiles a block, the next tile loaded while one is
// computed.
template <typename F, bool kClamp>
__global__ __launch_bounds__(256, 4) void quantize_rows(const __grid_constant__ RowsParams p) {
  const int groups = (p.tiles + kTilesPerBlock - 1) / kTilesPerBlock;
  const int64_t row = int64_t{kRowsPerBlock} * (blockIdx.x / groups) + threadIdx.x / 8;
  const int first = blockIdx.x % groups * kTilesPerBlock;
  const int last = min(p.tiles, first + kTilesPerBlock);
  const RowKind kind = row_kind(p.plan, row, p.rows);
  const uint16_t* gates = p.z + row * 2 * p.intermediate;
  const float prob = p.probs != nullptr && kind.token ? p.probs[row] : 1.0f;
  RowsOut to = p.h;
  if (!kind.written) to.data = nullptr;

  Packed16 gate, up, next_gate, next_up;
  next_gate.clear(), next_up.clear();
  const auto load = [&](int tile) {
    if (!kind.token) return;
    next_gate.load(gates + 128 * tile);
    next_up.load(gates + p.intermediate + 128 * tile);
  };
  load(first);
#pragma unroll 1
  for (int tile = first; tile < last; ++tile) {
    gate = next_gate, up = next_up;
    if (tile + 1 < last) load(tile + 1);
    float h[16];
    hidden<kClamp>(gate, up, prob, p.clamp, h);
    Tile<8>::quantize_row<F>(to, row, tile, p.intermediate, h, !kind.token, p.scaling);
  }
}

template <typename F, typename Z>
void launch_any(const Z& z, const RoutingPlan& plan, const Tensor& probs, float clamp,
                const Fp8Tensor& h, const Fp8Tensor& h_columns, Scaling scaling,
                cudaStream_t stream) {
  const int64_t rows = h.data.shape[0], intermediate = h.data.shape[1];
  const HiddenSource<Z> source = {.z = z,
                                  .probs = probs.as<float>(),
                                  .clamp = clamp,
                                  .intermediate = static_cast<int>(intermediate)};
  launch_quantize_source<F>(kOp, source, plan, rows, intermediate, h, h_columns, scaling, stream);
}

template <typename F>
void launch_hidden(const Tensor& z, const RoutingPlan& plan, const Tensor& probs, float clamp,
                   const Fp8Tensor& h, const Fp8Tensor& h_columns, Scaling scaling,
                   cudaStream_t stream) {
  const int64_t rows = h.data.shape[0], intermediate = h.data.shape[1];
  if (z.dtype != DType::bf16)
    return launch_any<F>(pre_activation(z, {}), plan, probs, clamp, h, h_columns, scaling, stream);
  if (h_columns.defined() || intermediate % kTile != 0) {
    const Bf16PreActivation dense = {{z.data}, static_cast<int>(2 * intermediate)};
    return launch_any<F>(dense, plan, probs, clamp, h, h_columns, scaling, stream);
  }
  const int64_t tiles = intermediate / kTile;
  const RowsParams params = {.z = z.as<uint16_t>(),
                             .probs = probs.as<float>(),
                             .clamp = clamp,
                             .rows = static_cast<int>(rows),
                             .intermediate = static_cast<int>(intermediate),
                             .tiles = static_cast<int>(tiles),
                             .plan = view_of(plan),
                             .h = rows_out(h),
                             .scaling = scaling};
  const int64_t blocks = cdiv(rows, kRowsPerBlock) * cdiv(tiles, kTilesPerBlock);
  launch(kOp, clamp > 0.0f ? quantize_rows<F, true> : quantize_rows<F, false>,
         static_cast<unsigned>(blocks), 256, 0, stream, params);
}

}  // namespace

void swiglu_quantize(const Tensor& z, const RoutingPlan& plan, const Tensor& probs, float clamp,
                     const Fp8Tensor& h, const Fp8Tensor& h_columns, const Fp8Tensor& z_q,
                     ScaleRule rule, Stream stream) {
  const int64_t rows = z.shape[0], width = z.shape[1];
  if (rows == 0 || width == 0) return;
  const DeviceGuard guard(z.device);
  dispatch_fp8(h.data.dtype, [&]<typename F>() {
    launch_hidden<F>(z, plan, probs, clamp, h, h_columns, {rule.pow2, rule.eps, kMaxFloat},
                     stream_of(stream));
  });
  if (!z_q.defined()) return;
  const float overflow = z.dtype == DType::f16    ? 65504.0f
                         : z.dtype == DType::bf16 ? 0x1.fep127f
                                                  : kMaxFloat;
  dispatch_fp8(z_q.data.dtype, [&]<typename F>() {
    launch_quantize_source<F>(kOp, ZSource<PreActivation>{pre_activation(z, {})}, plan, rows, width,
                              z_q, {}, {rule.pow2, rule.eps, overflow}, stream_of(stream));
  });
}

}  // namespace fp8moe::cuda
