// What quantization and the FP8-domain transpose lost, counted over every stride-th row: a warp a
// run of 1x128 tiles of a row, four codes a lane, sums kept in registers and added to `counts` once
// a block.
#include <algorithm>

#include "common/backends.h"
#include "common/dispatch.h"
#include "common/fp8.h"
#include "common/scale.h"
#include "device/memory.cuh"
#include "device/plan.cuh"
#include "device/runtime.h"

namespace fp8moe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerSm = 5;
constexpr int kRun = 8;  // tiles: a row's column tiles are found once for each run of it
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
  int ld;
  bool per_channel;
};

// 0x80 in each byte of v whose code's magnitude is over `limit` (at most 127).
__device__ __forceinline__ uint32_t bytes_over(uint32_t v, uint32_t limit) {
  return ((v & 0x7F7F7F7Fu) + (127u - limit) * 0x01010101u) & 0x80808080u;
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

// The least bits of a scale S that make this code zero when it comes from a scale of exponent field
// `from`: S is a positive power of two, and its bits rank as it does.
template <typename F>
__device__ __forceinline__ uint32_t flushed_from(uint32_t magnitude, int from) {
  const int shift = fp8_flushing_shift<F>(magnitude);
  return shift == 0 ? 0xFFFFFFFFu : static_cast<uint32_t>(min(from + shift, 511)) << 23;
}

// Bins and sums are 32 bits a block: 64 in shared memory are compare-and-swap loops. grid_of keeps
// what a block counts within them.
template <typename F>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    count_rows(const __grid_constant__ Rows q, const __grid_constant__ PlanView plan, int slots,
               const __grid_constant__ Scales columns, unsigned long long* counts) {
  __shared__ unsigned sums[kCodeCounts];
  for (int i = threadIdx.x; i < kCodeCounts; i += kThreads) sums[i] = 0;
  __syncthreads();

  const int lane = threadIdx.x % 32;
  const int tiles = (q.c + 127) / 128, runs = (tiles + kRun - 1) / kRun;
  const int64_t end = q.of_tokens ? q.rows : min(q.rows, int64_t{plan.row_offsets[plan.experts]});
  const int64_t work = (end + q.stride - 1) / q.stride * runs;
  unsigned live = 0, zero = 0, moved = 0, flushed = 0;  // of this lane
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < work;
       i += int64_t{gridDim.x} * kWarps) {
    const int64_t r = i / runs * q.stride;
    const int begin = static_cast<int>(i % runs) * kRun;
    if (!q.of_tokens && plan.token_of_row[r] < 0) continue;
    const int last = min(begin + kRun, tiles);
    const auto load = [&](int block) {
      const int first = 128 * block + 4 * lane;  // c is a multiple of 4
      return block < last && first < q.c ? cuda::load<uint32_t>(q.data + r * q.ld + first) : 0;
    };
    for (int s0 = 0; s0 == 0 || s0 < slots; s0 += 32) {
      // A lane finds a slot's column tile, then all lanes count their codes for each slot.
      const int row = s0 + lane < slots ? plan.row_of[r * slots + s0 + lane] : -1;
      const int at = row < 0 ? -1 : tile_of(plan, row);
      const unsigned kept = __ballot_sync(kAll, at >= 0);
      uint32_t next = load(begin);
#pragma unroll 1
      for (int block = begin; block < last; ++block) {
        const int first = 128 * block + 4 * lane;
        const uint32_t codes = next, nonzero = bytes_over(codes, 0);
        next = load(block + 1);
        if (!__any_sync(kAll, nonzero != 0)) continue;
        if (s0 == 0 && first < q.c) live += 4, zero += 4 - __popc(nonzero);
        if (kept == 0) continue;
        moved += __popc(nonzero) * __popc(kept);
        const int from = exponent_field(__ldg(q.scale + r * q.scale_row + block * q.scale_tile));
        int shift = 0;  // of this lane's slot
        if (!columns.per_channel) {
          if (at >= 0)
            shift = exponent_field(__ldg(columns.data + int64_t{block} * columns.ld + at)) - from;
          const uint32_t limit = fp8_flushed_by<F>(shift);
          for (unsigned left = __ballot_sync(kAll, limit != 0); left != 0; left &= left - 1) {
            const uint32_t up_to = __shfl_sync(kAll, limit, __ffs(left) - 1);
            flushed += __popc(nonzero & ~bytes_over(codes, up_to));
          }
        } else {
          uint32_t least[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) least[j] = flushed_from<F>(codes >> (8 * j) & 0x7Fu, from);
          for (unsigned left = kept; left != 0; left &= left - 1) {
            const int s = __ffs(left) - 1;
            const float* scales =
                columns.data + first + int64_t{__shfl_sync(kAll, at, s)} * columns.ld;
            uint32_t largest = 0;
#pragma unroll
            for (int j = 0; first < q.c && j < 4; ++j) {
              const uint32_t scale = __float_as_uint(__ldg(scales + j));
              flushed += scale >= least[j];
              largest = max(largest, scale);
            }
            largest = __reduce_max_sync(kAll, largest);
            if (lane == s) shift = static_cast<int>(largest >> 23) - from;
          }
        }
        if (at >= 0) atomicAdd(&sums[kFirstShift + max(0, min(shift, 16))], 1u);
      }
    }
  }
  const unsigned own[] = {live, zero, moved, flushed};
  for (int i = 0; i < 4; ++i) {
    const unsigned sum = __reduce_add_sync(kAll, own[i]);
    if (lane == 0 && sum) atomicAdd(&sums[i], sum);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kCodeCounts; i += kThreads)
    if (sums[i]) atomicAdd(counts + i, static_cast<unsigned long long>(sums[i]));
}

// Enough blocks that what one counts, at most its codes for each slot, fits in 32 bits.
unsigned grid_of(Device device, int64_t runs, int64_t slots) {
  const int64_t fit = std::max<int64_t>(0xFFFFFFFF / (128 * kRun * kWarps * slots), 1);
  const int64_t rounds = cdiv(runs, kWarps);
  return std::max(persistent_grid(device, rounds, kBlocksPerSm),
                  static_cast<unsigned>(cdiv(rounds, fit)));
}

}  // namespace

template <>
void run(const CountCodes& p, Stream stream) {
  static_assert(kLive == 0 && kUnderflowed == 1 && kMoved == 2 && kFlushed == 3);
  const DeviceGuard guard(p.q.data.device);
  const bool of_tokens = p.q.layout == ScaleLayout::row;
  const int64_t c = p.q.data.shape[1];
  const Rows rows{.data = p.q.data.as<const uint8_t>(),
                  .scale = p.q.scale_inv.as<const float>(),
                  .ld = p.q.data.stride(),
                  .scale_row = of_tokens ? p.q.scale_inv.stride() : 1,
                  .scale_tile = of_tokens ? 1 : p.q.scale_inv.shape[1],
                  .rows = p.q.data.shape[0],
                  .stride = p.stride,
                  .c = static_cast<int>(c),
                  .of_tokens = of_tokens};
  Scales scales{};
  if (p.columns.defined())
    scales = {.data = p.columns.scale_inv.as<const float>(),
              .ld = static_cast<int>(p.columns.scale_inv.shape[1]),
              .per_channel = p.columns.layout == ScaleLayout::gemm};
  const int64_t slots = p.columns.defined() ? p.plan.slots : 0;
  const int64_t runs = cdiv(p.q.data.shape[0], p.stride) * cdiv(c, kTile * kRun);
  const unsigned grid = grid_of(p.q.data.device, runs, std::max<int64_t>(slots, 1));
  dispatch_fp8(p.q.data.dtype, [&]<typename F>() {
    launch("count_codes", count_rows<F>, grid, kThreads, 0, stream_of(stream), rows,
           view_of(p.plan), static_cast<int>(slots), scales, p.counts.as<unsigned long long>());
  });
}

}  // namespace fp8moe::cuda
