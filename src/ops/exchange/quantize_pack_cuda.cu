// quantize_pack writes packed rows, unpack reads them.
#include "common/backends.h"
#include "common/check.h"
#include "common/dispatch.h"
#include "device/bulk.cuh"
#include "device/eight.cuh"
#include "device/runtime.h"
#include "device/tile.cuh"
#include "ops/exchange/wire.h"

namespace fp8moe::cuda {

// ---- quantize_pack ------------------------------------------------------------------------------
// quantize_pack: a block per token (and some that mark the rows without one). It quantizes the
// token into shared memory, as the packed row is, and from there one copy per rank brings
// codes and scales to their rows; the few vectors behind them, which differ between ranks, are
// stored by the thread of the rank. With peers the links set the time, and few blocks keep them
// busy: each takes many tokens, and leaves its SM to what runs beside it.

namespace {

template <typename T>
constexpr int kInFlight = 8 / sizeof(T);  // tiles of half a warp: 64 bytes per lane
template <typename T>
constexpr int kWarpTiles = 2 * kInFlight<T>;
constexpr int kMaxWarps = 8;
constexpr int kRowsToMark = 1024;  // of a block
constexpr int kPeerThreads = 512;  // of an SM, with peers

template <typename T, typename Rule>
struct Params {
  const T* x;                   // [T, H]
  const void* topk_idx;         // [T, S] or null
  const float* probs;           // [T, S]
  uint8_t* packed;              // [R, row_bytes]
  const int64_t* peers;         // [ranks]: where the rows of each rank go, or null: to packed
  int most;                     // with peers: rows that find a place there
  int32_t first[kMostPeers];    // with peers: rows behind them; zero where more ranks are
  const int32_t* row_of;        // [T, ranks]
  const int32_t* token_of_row;  // [R]
  const int32_t* row_offsets;   // [ranks + 1]
  int64_t tokens;
  int64_t packers;  // blocks that take tokens
  int hidden, tiles;
  int ranks;
  int experts;  // of a rank
  int slots;    // 0: no ids
  bool wide;    // 64-bit ids
  int row_bytes;
  int ids_at;  // bytes; probs follow
  Rule scaling;
};

// Codes and scales of `token`.
template <typename F, typename T, typename Rule>
__device__ __forceinline__ void quantize_token(const Params<T, Rule>& p, int64_t token,
                                               uint8_t* row) {
  const int warp = threadIdx.x / 32, half = threadIdx.x % 32 / 16, lane = threadIdx.x % 16;
  const int step = static_cast<int>(blockDim.x) / 32 * kWarpTiles<T>;
  for (int first = warp * kWarpTiles<T>; first < p.tiles; first += step) {
    Vec8<T> x[kInFlight<T>];
#pragma unroll
    for (int j = 0; j < kInFlight<T>; ++j) {
      const int column = 128 * (first + 2 * j + half) + 8 * lane;
      x[j].clear();
      if (column < p.hidden) x[j].load(p.x + token * p.hidden + column);
    }
#pragma unroll
    for (int j = 0; j < kInFlight<T>; ++j) {
      const int tile = first + 2 * j + half, column = 128 * tile + 8 * lane;
      float v[8];
      x[j].values(v);
      const TileScale s = p.scaling.template of<F>(lanes_max<16>(amax(v)));
      const uint2 codes = fp8_encode8<F, Rule::kDivides>(v, s.scale);
      if (column < p.hidden) store(row + column, codes);
      if (lane == 0 && tile < p.tiles)
        store(row + p.hidden + 4 * tile, __float_as_uint(s.scale_inv));
    }
  }
}

// Word i behind the scales of `token`'s row: ids (of all experts; -1 for what names none), probs,
// and the zeros of the row's end.
template <typename T, typename Rule>
__device__ __forceinline__ uint32_t word_of(const Params<T, Rule>& p, int64_t token, int i) {
  if (i >= 2 * p.slots) return 0;
  const int64_t at = token * p.slots + i;
  if (i >= p.slots) return __float_as_uint(__ldg(p.probs + at - p.slots));
  const int64_t id = p.wide ? __ldg(static_cast<const int64_t*>(p.topk_idx) + at)
                            : int64_t{__ldg(static_cast<const int32_t*>(p.topk_idx) + at)};
  const bool named = id >= 0 && id < int64_t{p.experts} * p.ranks;
  return static_cast<uint32_t>(named ? static_cast<int>(id) : -1);
}

// Word `at` (bytes) of the row as rank `rank` gets it: its own experts alone.
template <typename T, typename Rule>
__device__ __forceinline__ uint32_t word_for(const Params<T, Rule>& p, const uint8_t* row, int at,
                                             int rank) {
  const auto word_at = [&](int byte) { return *reinterpret_cast<const uint32_t*>(row + byte); };
  const int i = (at - p.ids_at) / 4;  // of ids, then probs
  if (at < p.ids_at || i >= 2 * p.slots) return word_at(at);
  const bool is_id = i < p.slots;
  const int local = static_cast<int>(word_at(is_id ? at : at - 4 * p.slots)) - rank * p.experts;
  const bool here = local >= 0 && local < p.experts;
  if (is_id) return static_cast<uint32_t>(here ? local : -1);
  return here ? word_at(at) : 0;
}

// Where row `at` of the plan, which `rank` gets, is stored; null: nowhere.
template <typename T, typename Rule>
__device__ __forceinline__ uint8_t* place(const Params<T, Rule>& p, int rank, int at) {
  if (at < 0) return nullptr;
  if (p.peers == nullptr) return p.packed + int64_t{at} * p.row_bytes;
  const int before = rank < kMostPeers ? p.first[rank] : 0;
  const int within = before + at - __ldg(p.row_offsets + rank);
  if (within >= p.most) return nullptr;
  return reinterpret_cast<uint8_t*>(__ldg(p.peers + rank)) + int64_t{within} * p.row_bytes;
}

// Rows of a segment that have no token have no ids; `block` of those that look for them.
template <typename T, typename Rule>
__device__ __forceinline__ void mark_missing(const Params<T, Rule>& p, int64_t block) {
  const int64_t first = block * kRowsToMark;
  const int64_t last = min(first + kRowsToMark, int64_t{__ldg(p.row_offsets + p.ranks)});
  for (int64_t at = first + threadIdx.x; at < last; at += blockDim.x) {
    if (__ldg(p.token_of_row + at) >= 0) continue;
    int rank = 0;
    while (p.peers != nullptr && at >= __ldg(p.row_offsets + rank + 1)) ++rank;
    uint8_t* row = place(p, rank, static_cast<int>(at));
    if (row == nullptr) continue;
    auto* words = reinterpret_cast<uint32_t*>(row + p.ids_at);
    for (int i = 0; i < 2 * p.slots; ++i) words[i] = i < p.slots ? 0xFFFFFFFFu : 0u;
  }
}

template <typename F, typename T, typename Rule>
__global__ void __launch_bounds__(32 * kMaxWarps)
    pack_rows(const __grid_constant__ Params<T, Rule> p) {
  extern __shared__ __align__(128) uint8_t row[];  // [row_bytes]
  if (blockIdx.x >= p.packers) return mark_missing(p, blockIdx.x - p.packers);
  const int thread = threadIdx.x, threads = blockDim.x;
  for (int64_t token = blockIdx.x; token < p.tokens; token += p.packers) {
    // These loads overlap the quantization; their values are used after it.
    uint8_t* to =
        thread < p.ranks ? place(p, thread, __ldg(p.row_of + token * p.ranks + thread)) : nullptr;
    const uint32_t word = word_of(p, token, thread);
    if (token != blockIdx.x) {  // the row before has left
      bulk_wait_read();
      __syncthreads();
    }
    quantize_token<F>(p, token, row);
    const int words = (p.row_bytes - p.ids_at) / 4;
    for (int i = thread; i < words; i += threads)
      store(row + p.ids_at + 4 * i, i == thread ? word : word_of(p, token, i));
    bulk_fence();
    __syncthreads();
    const int same = p.slots > 0 ? p.ids_at / 16 * 16 : p.row_bytes;  // for every rank
    for (int rank = thread; rank < p.ranks; rank += threads) {
      if (rank != thread) to = place(p, rank, __ldg(p.row_of + token * p.ranks + rank));
      if (to == nullptr) continue;
      if (same > 0) bulk_store(to, row, same);
      for (int byte = same; byte < p.row_bytes; byte += 16)
        store(to + byte,
              uint4{word_for(p, row, byte, rank), word_for(p, row, byte + 4, rank),
                    word_for(p, row, byte + 8, rank), word_for(p, row, byte + 12, rank)});
    }
  }
  p.peers == nullptr ? bulk_wait_read() : bulk_wait();
}

}  // namespace

template <>
void run(const QuantizePack& p, Stream stream) {
  const Wire wire{.hidden = p.x.shape[1], .slots = p.topk_idx.defined() ? p.topk_idx.shape[1] : 0};
  FP8MOE_CHECK(wire.bytes() <= device_info(p.x.device).shared_per_block,
               "[quantize_pack] on CUDA a row has at most ",
               device_info(p.x.device).shared_per_block, " bytes; got ", wire.bytes());
  const int64_t markers = wire.slots > 0 ? cdiv(p.plan.rows(), kRowsToMark) : 0;
  if (p.plan.tokens + markers == 0) return;
  const DeviceGuard guard(p.x.device);
  const int64_t tiles = cdiv(wire.hidden, kTile);
  dispatch_fp8(p.fp8_dtype, [&]<typename F>() {
    dispatch_float(p.x.dtype, [&]<typename T>() {
      dispatch_scaling(p.rule, max_finite(p.x.dtype), [&]<typename Rule>(Rule scaling) {
        const int64_t warps = std::clamp<int64_t>(cdiv(tiles, kWarpTiles<T>), 1, kMaxWarps);
        const int64_t few = kPeerThreads / (32 * warps) * device_info(p.x.device).sm_count;
        const int64_t packers = p.peers.defined() ? std::min(p.plan.tokens, few) : p.plan.tokens;
        Params<T, Rule> params = {.x = p.x.as<const T>(),
                                  .topk_idx = p.topk_idx.data,
                                  .probs = p.probs.as<const float>(),
                                  .packed = p.packed.as<uint8_t>(),
                                  .peers = p.peers.as<const int64_t>(),
                                  .most = static_cast<int>(p.packed.shape[0]),
                                  .first = {},
                                  .row_of = p.plan.row_of(),
                                  .token_of_row = p.plan.token_of_row(),
                                  .row_offsets = p.plan.row_offsets(),
                                  .tokens = p.plan.tokens,
                                  .packers = packers,
                                  .hidden = static_cast<int>(wire.hidden),
                                  .tiles = static_cast<int>(tiles),
                                  .ranks = static_cast<int>(p.plan.experts),
                                  .experts = static_cast<int>(p.num_experts / p.plan.experts),
                                  .slots = static_cast<int>(wire.slots),
                                  .wide = p.topk_idx.dtype == DType::i64,
                                  .row_bytes = static_cast<int>(wire.bytes()),
                                  .ids_at = static_cast<int>(wire.ids()),
                                  .scaling = scaling};
        if (p.first.defined()) std::copy_n(p.first.as<const int32_t>(), p.plan.slots, params.first);
        launch("quantize_pack", pack_rows<F, T, Rule>, static_cast<unsigned>(packers + markers),
               static_cast<unsigned>(32 * warps), static_cast<size_t>(wire.bytes()),
               stream_of(stream), params);
      });
    });
  });
}

// ---- unpack -------------------------------------------------------------------------------------
// unpack: a thread an id and a prob.

namespace {

constexpr int kUnpackThreads = 256;

struct UnpackParams {
  const uint8_t* ids;  // of row 0; probs follow
  int64_t row_bytes;
  int64_t entries;  // R S
  int slots;
  int32_t* topk_idx;  // [R, S]
  float* probs;       // [R, S]
};

__global__ void __launch_bounds__(kUnpackThreads) copy_ids(const __grid_constant__ UnpackParams p) {
  const int64_t i = int64_t{blockIdx.x} * kUnpackThreads + threadIdx.x;
  if (i >= p.entries) return;
  const uint8_t* ids = p.ids + i / p.slots * p.row_bytes;
  const int64_t slot = i % p.slots;
  p.topk_idx[i] = __ldg(reinterpret_cast<const int32_t*>(ids) + slot);
  p.probs[i] = __ldg(reinterpret_cast<const float*>(ids) + p.slots + slot);
}

}  // namespace

template <>
void run(const Unpack& p, Stream stream) {
  const int64_t entries = p.topk_idx.numel();
  if (entries == 0) return;
  const DeviceGuard guard(p.packed.device);
  const Wire wire{.hidden = p.hidden, .slots = p.topk_idx.shape[1]};
  const UnpackParams params{.ids = p.packed.as<const uint8_t>() + wire.ids(),
                            .row_bytes = wire.bytes(),
                            .entries = entries,
                            .slots = static_cast<int>(wire.slots),
                            .topk_idx = p.topk_idx.as<int32_t>(),
                            .probs = p.probs.as<float>()};
  launch("unpack", copy_ids, static_cast<unsigned>(cdiv(entries, kUnpackThreads)), kUnpackThreads,
         0, stream_of(stream), params);
}

}  // namespace fp8moe::cuda
