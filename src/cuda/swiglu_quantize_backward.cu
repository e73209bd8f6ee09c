// dz = Q([dgate | dup]) [R, 2I] and dprob [R] of dh [R, I] and z [R, 2I]; optional columns of dz
// [2I, Kcap] and of h [I, Kcap], h recomputed.
//
// bf16 operands and I % 128 == 0 take one pass: backward_rows (device/swiglu_backward.cuh), or
// backward_tiles (device/swiglu_backward_tiles.cuh) where columns are asked for. The rest takes a
// pass an output.
#include <algorithm>
#include <array>
#include <atomic>

#include "core/backends.h"
#include "core/dispatch.h"
#include "cuda/device/swiglu_backward_tiles.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {
namespace {

constexpr const char* kOp = "swiglu_quantize_backward";

// dprob[row]: a warp a row, 16 lanes a tile of 128 terms; tiles in ascending order
// (common/reduce.h).
__global__ void __launch_bounds__(256)
    sum_dprobs(const __grid_constant__ GradSource source, const __grid_constant__ PlanView plan,
               int rows, float* dprobs) {
  const int64_t row = int64_t{8} * blockIdx.x + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const RowKind kind = row_kind(plan, row, rows);
  if (!kind.written) return;
  float sum = 0.0f;
  for (int first = 0; kind.token && first < source.intermediate; first += 256) {
    const int column = first + 8 * lane;
    float term[8] = {};
    if (column < source.intermediate) source.terms(row, column, term);
    const float tile_sum = lanes_tree_sum<16>(tree_sum<8>(term));
    sum += __shfl_sync(kFullWarp, tile_sum, 0);
    if (first + 128 < source.intermediate) sum += __shfl_sync(kFullWarp, tile_sum, 16);
  }
  if (lane == 0) dprobs[row] = sum;
}

void launch_any(const GradSource& source, const RoutingPlan& plan, int64_t rows,
                const Fp8Tensor& dz, const Tensor& dprobs, const Fp8Tensor& dz_columns,
                const Fp8Tensor& h_columns, Scaling scaling, cudaStream_t stream) {
  const int64_t intermediate = source.intermediate;
  quantize_from(kOp, source, plan, rows, 2 * intermediate, dz, dz_columns, scaling, stream);
  if (h_columns.defined()) {
    const HiddenSource hidden = {source.z, source.probs, source.clamp, source.intermediate};
    quantize_from(kOp, hidden, plan, rows, intermediate, {}, h_columns, scaling, stream);
  }
  if (dprobs.defined())
    launch(kOp, sum_dprobs, static_cast<unsigned>(cdiv(rows, 8)), 256, 0, stream, source,
           view_of(plan), static_cast<int>(rows), dprobs.as<float>());
}

// Rows a block of backward_rows takes: 8 where its 4 sets of tile lanes find work, else 16 or 32.
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

template <typename F>
void launch_rows(SwigluBackward p, cudaStream_t stream) {
  p.rows_per_block = rows_per_block(p.tiles);
  const size_t shared =
      sizeof(BackwardRowsShared) + static_cast<size_t>(p.rows_per_block * p.tiles) * sizeof(float);
  launch(kOp, p.clamp > 0.0f ? backward_rows<F, true> : backward_rows<F, false>,
         static_cast<unsigned>(cdiv(p.rows, p.rows_per_block)), 256, shared, stream, p);
}

// Clusters of 1, 2, 4 or 8 blocks of backward_tiles that the device runs at a time: its SMs come in
// groups that no cluster straddles. Asked for once per device.
int clusters_at_a_time(Device device, int ranks) {
  constexpr size_t kDevices = 64;                                        // device_info's limit
  static std::array<std::array<std::atomic<int>, 9>, kDevices> known{};  // and one; 0: not yet
  std::atomic<int>& entry =
      known[static_cast<size_t>(device.index) % kDevices][static_cast<size_t>(ranks)];
  if (const int clusters = entry.load(std::memory_order_relaxed); clusters > 0) return clusters - 1;
  const auto kernel = backward_tiles<E4M3, ColumnKind::block, false>;
  FP8MOE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(sizeof(BackwardTilesShared))));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(ranks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(ranks);
  config.blockDim = BackwardTile::kThreads;
  config.dynamicSmemBytes = sizeof(BackwardTilesShared);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  FP8MOE_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  entry.store(clusters + 1, std::memory_order_relaxed);
  return clusters;
}

// Blocks a cluster of backward_tiles: of the sizes whose sums of dprob fit, the one whose busiest
// block has the fewest tiles, and of those the largest, which splits a block of tokens finest. 0:
// none.
int cluster_size(const SwigluBackward& p, int64_t blocks, Device device) {
  int best = 0;
  int64_t fewest = 0;
  for (int ranks = 1; ranks <= 8; ranks *= 2) {
    const int64_t clusters = clusters_at_a_time(device, ranks);
    if (clusters == 0 || blocks_of_sums(ranks, p.tiles) == 0) continue;
    const int64_t tiles = cdiv(cdiv(blocks, clusters) * p.tiles, ranks);
    if (best == 0 || tiles <= fewest) best = ranks, fewest = tiles;
  }
  return best;
}

// What backward_tiles makes: columns of one kind, dz's in dz's format and h's in e4m3.
bool usual_columns(const Fp8Tensor& dz, const Fp8Tensor& dz_columns, const Fp8Tensor& h_columns) {
  const bool one_kind =
      !dz_columns.defined() || !h_columns.defined() || dz_columns.layout == h_columns.layout;
  return one_kind && (!dz_columns.defined() || dz_columns.data.dtype == dz.data.dtype) &&
         (!h_columns.defined() || h_columns.data.dtype == DType::e4m3);
}

template <typename F>
void launch_tiles(const SwigluBackward& p, int ranks, const Fp8Tensor& dz_columns,
                  const Fp8Tensor& h_columns, int64_t blocks, Device device, cudaStream_t stream) {
  const SwigluBackwardColumns to = {columns_out(dz_columns), columns_out(h_columns)};
  const int64_t clusters = std::min<int64_t>(blocks, clusters_at_a_time(device, ranks));
  const auto go = [&]<ColumnKind kKind>() {
    launch_clusters(
        kOp, p.clamp > 0.0f ? backward_tiles<F, kKind, true> : backward_tiles<F, kKind, false>,
        static_cast<unsigned>(clusters * ranks), BackwardTile::kThreads, ranks,
        sizeof(BackwardTilesShared), stream, p, to);
  };
  const ColumnKind kind = kind_of(dz_columns.defined() ? dz_columns : h_columns);
  kind == ColumnKind::block ? go.template operator()<ColumnKind::block>()
                            : go.template operator()<ColumnKind::column>();
}

}  // namespace

void swiglu_quantize_backward(const Tensor& dh, const Tensor& z, const Fp8Tensor& z_q,
                              const RoutingPlan& plan, const Tensor& probs, float clamp,
                              const Fp8Tensor& dz, const Tensor& dprobs,
                              const Fp8Tensor& dz_columns, const Fp8Tensor& h_columns,
                              ScaleRule rule, Stream stream) {
  const int64_t rows = dh.shape[0], intermediate = dh.shape[1];
  if (rows == 0 || intermediate == 0) return;
  const DeviceGuard guard(dh.device);
  const SwigluBackward params = {.z = z.as<uint16_t>(),
                                 .dh = dh.as<uint16_t>(),
                                 .probs = probs.as<float>(),
                                 .clamp = clamp,
                                 .sigmoid_of_clamp = pinned_sigmoid(clamp),
                                 .rows = static_cast<int>(rows),
                                 .intermediate = static_cast<int>(intermediate),
                                 .tiles = static_cast<int>(intermediate / kTile),
                                 .plan = view_of(plan),
                                 .dz = rows_out(dz),
                                 .dprobs = dprobs.as<float>(),
                                 .scaling = {rule.eps}};
  const bool columns = dz_columns.defined() || h_columns.defined();
  const bool one_pass = z.defined() && z.dtype == DType::bf16 && dh.dtype == DType::bf16 &&
                        intermediate % kTile == 0 && rule.pow2;
  if (one_pass && !columns)
    return dispatch_fp8(dz.data.dtype,
                        [&]<typename F>() { launch_rows<F>(params, stream_of(stream)); });
  if (one_pass && usual_columns(dz, dz_columns, h_columns)) {
    const int64_t blocks = plan.columns() / kTile;
    if (blocks == 0) return;
    if (const int ranks = cluster_size(params, blocks, dh.device))
      return dispatch_fp8(dz.data.dtype, [&]<typename F>() {
        launch_tiles<F>(params, ranks, dz_columns, h_columns, blocks, dh.device, stream_of(stream));
      });
  }
  const GradSource source = {.z = pre_activation(z, z_q),
                             .dh = {dh.data, dh.dtype},
                             .probs = probs.as<float>(),
                             .clamp = clamp,
                             .intermediate = static_cast<int>(intermediate)};
  launch_any(source, plan, rows, dz, dprobs, dz_columns, h_columns,
             {rule.pow2, rule.eps, kMaxFloat}, stream_of(stream));
}

}  // namespace fp8moe::cuda
