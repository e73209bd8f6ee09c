// What quantization and the FP8-domain transpose lost, counted over every stride-th row: a warp a
// 1x128 tile, four codes a lane, sums kept in registers and added to `counts` once a block.
#include "common/fp8.h"
#include "common/scale.h"
#include "core/backends.h"
#include "core/dispatch.h"
#include "cuda/device/memory.cuh"
#include "cuda/device/plan.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Rows {
  const uint8_t* data;
  const float* scale;
  int64_t ld, scale_row, scale_tile;  // of data; of scales from row to row, from tile to tile
  int64_t rows, stride;               // rows stride apart are looked at
  int c;
  bool of_tokens;  // else rows of the plan
};

struct Scales {
  const float* data;  // nullptr: no columns
  int64_t ld;
  bool per_channel;
};

// 0x01 in each byte of v whose code is not zero, and at most `limit` (1 to 127) in magnitude.
__device__ __forceinline__ uint32_t nonzero_bytes(uint32_t v) {
  return __vsetne4(v & 0x7F7F7F7Fu, 0u);
}
__device__ __forceinline__ uint32_t bytes_up_to(uint32_t v, uint32_t limit) {
  return nonzero_bytes(v) & __vsetleu4(v & 0x7F7F7F7Fu, limit * 0x01010101u);
}

// The column tile of a row of the plan.
__device__ __forceinline__ int tile_of(const PlanView& plan, int row) {
  int low = 0, high = plan.experts;  // the last expert that begins at or before the row
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (__ldg(plan.row_offsets + middle) <= row ? low : high) = middle;
  }
  return (__ldg(plan.col_offsets + low) + row - __ldg(plan.row_offsets + low)) / 128;
}

template <typename F>
__global__ void __launch_bounds__(kThreads)
    count_rows(const __grid_constant__ Rows q, const __grid_constant__ PlanView plan, int slots,
               const __grid_constant__ Scales columns, unsigned long long* counts) {
  __shared__ unsigned long long sums[kCodeCounts];
  for (int i = threadIdx.x; i < kCodeCounts; i += kThreads) sums[i] = 0;
  __syncthreads();

  const int lane = threadIdx.x % 32;
  const int tiles = (q.c + 127) / 128;
  const int64_t end = q.of_tokens ? q.rows : min(q.rows, int64_t{plan.row_offsets[plan.experts]});
  const int64_t work = (end + q.stride - 1) / q.stride * tiles;
  unsigned live = 0, zero = 0, moved = 0, flushed = 0;  // of this lane
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < work;
       i += int64_t{gridDim.x} * kWarps) {
    const int64_t r = i / tiles * q.stride;
    const int block = static_cast<int>(i % tiles), first = block * 128 + lane * 4;
    if (!q.of_tokens && plan.token_of_row[r] < 0) continue;
    const bool here = first < q.c;  // c is a multiple of 4
    const uint32_t codes = here ? load_once<uint32_t>(q.data + r * q.ld + first) : 0;
    const unsigned nonzero = __popc(nonzero_bytes(codes));
    if (__reduce_add_sync(kAll, nonzero) == 0) continue;
    live += here ? 4 : 0;
    zero += here ? 4 - nonzero : 0;
    if (columns.data == nullptr) continue;

    const int from = exponent_field(__ldg(q.scale + r * q.scale_row + block * q.scale_tile));
    for (int s0 = 0; s0 < slots; s0 += 32) {
      // A lane finds a slot's column tile, then all lanes count their codes for each slot.
      const int row = s0 + lane < slots ? plan.row_of[r * slots + s0 + lane] : -1;
      const int tile = row < 0 ? -1 : tile_of(plan, row);
      if (!columns.per_channel && tile >= 0) {
        const int k = exponent_field(__ldg(columns.data + block * columns.ld + tile)) - from;
        atomicAdd(&sums[kFirstShift + max(0, min(k, 16))], 1ull);
      }
      for (int s = 0; s < min(32, slots - s0); ++s) {
        const int at = __shfl_sync(kAll, tile, s);
        if (at < 0) continue;
        moved += nonzero;
        if (!columns.per_channel) {
          const int k = exponent_field(__ldg(columns.data + block * columns.ld + at)) - from;
          if (const uint32_t limit = fp8_flushed_by<F>(k))
            flushed += __popc(bytes_up_to(codes, limit));
          continue;
        }
        int largest = -255;
        for (int j = 0; here && j < 4; ++j) {
          const int k = exponent_field(__ldg(columns.data + at * columns.ld + first + j)) - from;
          largest = max(largest, k);
          const uint32_t code = (codes >> (8 * j)) & 0x7Fu;
          flushed += code != 0 && code <= fp8_flushed_by<F>(k);
        }
        largest = __reduce_max_sync(kAll, largest);
        if (lane == 0) atomicAdd(&sums[kFirstShift + max(0, min(largest, 16))], 1ull);
      }
    }
  }
  const unsigned own[] = {live, zero, moved, flushed};
  for (int i = 0; i < 4; ++i) {
    const unsigned sum = __reduce_add_sync(kAll, own[i]);
    if (lane == 0 && sum) atomicAdd(&sums[i], static_cast<unsigned long long>(sum));
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kCodeCounts; i += kThreads)
    if (sums[i]) atomicAdd(counts + i, sums[i]);
}

}  // namespace

void count_codes(const Fp8Tensor& q, const RoutingPlan& plan, const Fp8Tensor& columns,
                 int64_t stride, const Tensor& counts, Stream stream) {
  static_assert(kLive == 0 && kUnderflowed == 1 && kMoved == 2 && kFlushed == 3);
  const DeviceGuard guard(q.data.device);
  const bool of_tokens = q.layout == ScaleLayout::row;
  const int64_t c = q.data.shape[1];
  const Rows rows{.data = q.data.as<const uint8_t>(),
                  .scale = q.scale_inv.as<const float>(),
                  .ld = q.data.stride(),
                  .scale_row = of_tokens ? q.scale_inv.stride() : 1,
                  .scale_tile = of_tokens ? 1 : q.scale_inv.shape[1],
                  .rows = q.data.shape[0],
                  .stride = stride,
                  .c = static_cast<int>(c),
                  .of_tokens = of_tokens};
  Scales scales{};
  if (columns.defined())
    scales = {.data = columns.scale_inv.as<const float>(),
              .ld = columns.scale_inv.shape[1],
              .per_channel = columns.layout == ScaleLayout::gemm};
  const int64_t tiles = cdiv(q.data.shape[0], stride) * cdiv(c, kTile);
  const unsigned grid = persistent_grid(q.data.device, cdiv(tiles, kWarps), 8);
  dispatch_fp8(q.data.dtype, [&]<typename F>() {
    launch("count_codes", count_rows<F>, grid, kThreads, 0, stream_of(stream), rows, view_of(plan),
           static_cast<int>(plan.slots), scales, counts.as<unsigned long long>());
  });
}

}  // namespace fp8moe::cuda
