// act_quantize_backward with columns, in one pass: bf16 z and dh, power-of-two scales, of all kinds
// of act_rows.cuh. What is said of dgate and dup is, of an interleaved z, of the first and the
// second tile of dz: a thread's eight values of h are then those of columns 4 l ... 4 l + 3 and 64
// more. Where gate and up lie side by side and dup waits for the next tile, it does in shared
// memory, for which three rows are on their way, not four.
//
// One block an SM takes a range of the tiles, in which those of a block of 128 tokens follow one
// another. A thread asks for a vector of the next tile as soon as it has read that of this one, so
// a whole tile is always on its way. dgate, dup and h are held as f32 (96 registers a thread) until
// the maxima of the tile are known, so every output is a single quantization. A tile's columns
// leave while the next one is computed.
//
// dprob is added up in the order of the tiles. Where a range ends inside a block of tokens its last
// sums are handed on, warp by warp, to the next range. Ranges begin with these tiles and end with
// those whose sums take over the range before, so that nobody waits but where ranges are shorter
// than a block of tokens; and they wait for lower blocks of the grid alone, which started earlier.
#pragma once

#include <algorithm>
#include <cmath>
#include <cuda/atomic>

#include "ops/activation/act_backward.cuh"
#include "ops/activation/sigmoid_table.cuh"
#include "ops/activation/split_barrier.cuh"
#include "ops/activation/tile_item.cuh"

namespace fp8moe::cuda {

using BackwardTile = Tile<16>;

// Ranges of one launch: words of carry_ready. Bit w of word i: warp w of range i - 1 has left its
// rows' sums in dprobs for range i, which takes it back: all are zero between launches.
constexpr int kMostRanges = 144;
static_assert(kMostRanges * sizeof(unsigned) <= kZeroWorkspaceBytes);

// A range of the tiles: [begin, whole) of a block of tokens that the range before began, [whole,
// last) of whole ones, [last, end) of its last one. Any but the last may be empty.
struct BackwardRange {
  int begin, whole, last, end;

  // The tile to take after another, `last` being the first: the last block of tokens, the whole
  // ones, and then the one begun before.
  __device__ __forceinline__ int after(int tile) const {
    if (++tile == end) tile = whole;
    return tile == last ? begin : tile;
  }
};

template <class Act, bool kSide>
struct BackwardTilesShared {
  using T = BackwardTile;
  static constexpr int kSums = kSide ? 16 : 48;
  static constexpr int kOuts = ActBackward<Act>::kParts + 1;
  static constexpr int kSlots = kSide ? 3 : 4;

  // Of rows on their way: gate, up, dh; only a thread's own.
  uint4 operand[kSlots][kOuts][T::kThreads];
  T::Shared codes[kOuts];  // of dgate, dup, h
  // Where each column has its scale. 8 more, and fours of neighbours and of four warps have banks
  // of their own.
  static constexpr int kMaxima = kOuts * 128 + 8;
  alignas(16) float maxima[T::kWarps][kMaxima];
  alignas(16) float scale[kOuts][128];
  float most[kOuts][T::kWarps];
  alignas(16) float prob[128];  // a warp's own 8
  SigmoidTable<Act> sigmoids;
  float sums[kSums][128];  // of dprob, of tiles not yet added up
  BackwardRange range;
  SplitBarrier maxima_done, scales_done, codes_done;
  // Dup for the next tile; a thread's own: of row j fours 2 j and 2 j + 1.
  float4 waiting[kSide ? 8 : 0][kMostWaiting / 8 * T::kThreads / 16];
};
static_assert(sizeof(BackwardTilesShared<SwigluScaled, false>) <= 227 * 1024);
static_assert(sizeof(BackwardTilesShared<SwigluScaled, true>) <= 227 * 1024);

struct ActBackwardColumns {
  ColumnsOut dz;  // [2I, Kcap] of dz's format, or none
  ColumnsOut h;   // [I, Kcap] e4m3, or none; of the same kind
};

template <class Act>
__device__ __forceinline__ BackwardRange backward_range(const ActBackward<Act>& p) {
  const int all = p.plan.col_offsets[p.plan.experts] / 128 * p.tiles;
  const auto [begin, count] = share_of(all, gridDim.x, blockIdx.x);
  const int end = begin + count;
  const int last = max(begin, (end - 1) / p.tiles * p.tiles);
  const int whole = min((begin + p.tiles - 1) / p.tiles * p.tiles, last);
  return {begin, of_warp(whole), of_warp(last), end};
}

template <class Act>
__device__ __forceinline__ int index_of(const ActBackward<Act>& p, const TileItem& item) {
  return item.block * p.tiles + item.tile;
}

template <class Act>
__device__ __forceinline__ TileItem item_after(const ActBackward<Act>& p,
                                               const BackwardRange& range, TileItem item) {
  const int index = index_of(p, item), next = of_warp(range.after(index));
  int count = 1;
  if (next != index + 1) {  // one call of what follows, or two would spill registers
    item = {.block = next / p.tiles - 1};
    count = p.tiles + next % p.tiles;
  }
  return item_after(p.plan, p.tiles, item, count);
}

// The column of h, of an interleaved z, that stands in a tile's place.
__device__ __forceinline__ int column_of_place(int place) {
  return 4 * (place / 8) + place % 4 + place % 8 / 4 * 64;
}

// Asks for row j of this thread in an item. With row 0 come the probs of the warp's rows.
template <RowKernel kKernel, class Act, class Shared>
__device__ __forceinline__ void load_row(const ActBackward<Act>& p, const TileItem& item, int j,
                                         int slot, Shared& shared) {
  using T = BackwardTile;
  constexpr bool kAny = kKernel != RowKernel::whole,
                 kTurns = kKernel == RowKernel::any && Act::kGated;
  const int r = T::row() + j;
  int column = 128 * item.tile + T::column(0);
  bool inside = !kAny || column < p.intermediate;
  if constexpr (kKernel == RowKernel::side) {
    column = SideBySide(p.intermediate).column(item.tile, T::column(0));
    inside = column >= 0;
  }
  const int bytes = r < item.tokens ? 16 : 0;  // rows past the last token are not read
  const int64_t at = strides(item.first_row + r, p.intermediate);
  constexpr int kParts = ActBackward<Act>::kParts;
  if constexpr (kTurns) {
    const int pair = 128 * item.tile + 4 * T::lane();  // of z, and 64 more
    auto* dh = reinterpret_cast<uint2*>(&shared.operand[slot][2][threadIdx.x]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool inside = pair + 64 * half < p.intermediate;
      copy_async(&shared.operand[slot][half][threadIdx.x], p.z + 2 * (at + pair + 64 * half),
                 inside ? bytes : 0);
      copy_async_half(dh + half, p.dh + at + pair + 64 * half, inside ? bytes / 2 : 0);
    }
  } else {
    const int wanted = inside ? bytes : 0;
    const uint16_t* gate = p.z + kParts * at + column;
    copy_async(&shared.operand[slot][0][threadIdx.x], gate, wanted);
    if constexpr (Act::kGated)
      copy_async(&shared.operand[slot][1][threadIdx.x], gate + p.intermediate, wanted);
    copy_async(&shared.operand[slot][kParts][threadIdx.x], p.dh + at + column, wanted);
  }
  if (j > 0 || p.probs == nullptr || threadIdx.x % 32 >= 8) return;
  const int of_prob = 8 * (threadIdx.x / 32) + threadIdx.x % 32;
  const bool token = of_prob < item.tokens;
  copy_async_word(&shared.prob[of_prob], p.probs + (item.first_row + (token ? of_prob : 0)),
                  token ? 4 : 0);
}

// dgate, dup, h of a thread's row without prob, which their scales take in (where each column has
// its scale, kMultiplied, with it). Returns the sum of the terms of dprob, of an interleaved z of
// both fours.
template <bool kTurns, bool kMultiplied, class Act, int kOuts>
__device__ __forceinline__ auto row_gradient(const Act& act, const uint4 (&operand)[kOuts][512],
                                             const SigmoidTable<Act>& sigmoids, float prob,
                                             float (&v)[kOuts][4][8], int j) {
  constexpr int kH = kOuts - 1;  // h, and dh
  float gate[8], up[8], dh[8], of_gate[8], term[8];
  uint4 g = operand[0][threadIdx.x], u = operand[kH - 1][threadIdx.x];
  const uint4 d = operand[kH][threadIdx.x];
  if constexpr (kTurns) split_pairs(g, u, g, u);
  unpack<Bf16>(&g.x, gate), unpack<Bf16>(&u.x, up), unpack<Bf16>(&d.x, dh);
  sigmoids.eight(g, of_gate);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const ActivationGrad grad = act.grad(gate[i], up[i], of_gate[i], dh[i]);
    term[i] = grad.dprob;
    if constexpr (kTurns) {
      v[i / 4][j][2 * i % 8] = grad.dgate, v[i / 4][j][2 * i % 8 + 1] = grad.dup;
    } else {
      v[0][j][i] = grad.dgate;
      if (Act::kGated) v[1][j][i] = grad.dup;
    }
    v[kH][j][i] = act.value(gate[i], up[i], of_gate[i]);
    if (kMultiplied && !kTurns)
#pragma unroll
      for (int o = 0; o < kOuts; ++o) v[o][j][i] *= prob;
  }
  if constexpr (kTurns) {
    if (kMultiplied)
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int o = 0; o < kOuts; ++o) v[o][j][i] *= prob;
    return float2{tree_sum<4>(term), tree_sum<4>(term + 4)};
  } else {
    return tree_sum<8>(term);
  }
}

// This thread's place for dup that waits, for lanes of which it does.
template <class Shared>
__device__ __forceinline__ float4* waiting_place(int rest, Shared& shared) {
  using T = BackwardTile;
  return &shared.waiting[0][kMostWaiting / 8 * T::group() + T::lane() - (16 - rest / 8)];
}

// What waits where a range begins inside a block of tokens: dup of the tile before.
template <bool kMultiplied, class Act, class Shared>
__device__ __forceinline__ void find_waiting(const ActBackward<Act>& p, const TileItem& item,
                                             const float (&prob)[4], Shared& shared) {
  using T = BackwardTile;
  const SideBySide side(p.intermediate);
  const int column = 128 * (item.tile - 1) + T::column(0);
  if (!side.waits(T::column(0)) || column >= p.intermediate) return;
  float4* const waiting = waiting_place(side.rest, shared);
  constexpr int kFour = sizeof(shared.waiting[0]) / sizeof(float4);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint4 vector[3] = {};
    if (T::row() + j < item.tokens) {
      const int64_t at = strides(item.first_row + T::row() + j, p.intermediate);
      vector[0] = load<uint4>(p.z + 2 * at + column);
      vector[1] = load<uint4>(p.z + 2 * at + column + p.intermediate);
      vector[2] = load<uint4>(p.dh + at + column);
    }
    float gate[8], up[8], dh[8], of_gate[8], dup[8];
    unpack<Bf16>(&vector[0].x, gate), unpack<Bf16>(&vector[1].x, up);
    unpack<Bf16>(&vector[2].x, dh);
    shared.sigmoids.eight(vector[0], of_gate);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      dup[i] = p.act.grad(gate[i], up[i], of_gate[i], dh[i]).dup;
      if (kMultiplied) dup[i] *= prob[j];
    }
    waiting[2 * j * kFour] = {dup[0], dup[1], dup[2], dup[3]};
    waiting[(2 * j + 1) * kFour] = {dup[4], dup[5], dup[6], dup[7]};
  }
}

// Leaves dup for the next tile and takes what the one before left.
template <class Shared>
__device__ __forceinline__ void swap_waiting(int rest, int j, float (&dup)[8], Shared& shared) {
  constexpr int kFour = sizeof(shared.waiting[0]) / sizeof(float4);
  float4* const place = waiting_place(rest, shared) + 2 * j * kFour;
  const float4 low = place[0], high = place[kFour];
  place[0] = {dup[0], dup[1], dup[2], dup[3]};
  place[kFour] = {dup[4], dup[5], dup[6], dup[7]};
  dup[0] = low.x, dup[1] = low.y, dup[2] = low.z, dup[3] = low.w;
  dup[4] = high.x, dup[5] = high.y, dup[6] = high.z, dup[7] = high.w;
}

// Scales of the rows of dz: lane l of a group finds that of row l / 2 % 4, of dgate where l < 8,
// else of dup.
template <typename F, RowKernel kKernel, class Act>
__device__ __forceinline__ float store_row_scales(const ActBackward<Act>& p, const TileItem& item,
                                                  const float (&row_most)[8]) {
  using T = BackwardTile;
  const TileScale s = p.scaling.template of<F>(fmaxf(lanes_max_each<16>(row_most), 0.0f));
  const int r = T::row() + T::lane() / 2 % 4;
  constexpr bool kTurns = kKernel == RowKernel::any && Act::kGated;
  constexpr bool kSide = kKernel == RowKernel::side;
  const int whole = kSide ? p.intermediate / 128 : p.tiles;
  const int second = kTurns ? 2 * item.tile + 1 : whole + item.tile;
  const int tile = T::lane() < 8 ? (kTurns ? 2 * item.tile : item.tile) : second;
  bool there = !kTurns || 64 * tile < p.intermediate;
  if (kSide) there = T::lane() < 8 ? item.tile <= whole : item.tile > 0;
  if (T::lane() % 2 == 0 && r < item.rows && (Act::kGated || T::lane() < 8) && there)
    p.dz.scale[strides(item.first_row + r, p.dz.scale_row) + strides(tile, p.dz.scale_tile)] =
        r < item.tokens ? s.scale_inv : 0.0f;
  return s.scale;
}

// The rows of dgate (o = 0) or dup (o = 1).
template <typename F, RowKernel kKernel, class Act>
__device__ __forceinline__ void store_rows(const ActBackward<Act>& p, const TileItem& item, int o,
                                           const float (&v)[4][8], const float (&prob)[4],
                                           float scales) {
  using T = BackwardTile;
  constexpr bool kAny = kKernel != RowKernel::whole,
                 kTurns = kKernel == RowKernel::any && Act::kGated;
  int column = kTurns ? 128 * (2 * item.tile + o) + T::column(0)
                      : o * p.intermediate + 128 * item.tile + T::column(0);
  bool inside = !kAny || column < p.kParts * p.intermediate;
  if constexpr (kKernel == RowKernel::side) {
    const SideBySide side(p.intermediate);
    const int up = side.up_column(item.tile, T::column(0));
    if (o == 1) column = p.intermediate + up;
    inside = o == 1 ? up >= 0 : column < side.end();
  }
  const int left = inside ? item.rows - T::row() : 0;
  uint8_t* codes = p.dz.data + strides(item.first_row + T::row(), p.dz.ld) + column;
#pragma unroll
  for (int j = 0; j < 4; ++j, codes += p.dz.ld) {
    const float scale = __shfl_sync(kFullWarp, scales, 8 * o + 2 * j, 16);
    store_if(j < left, codes, fp8_encode8<F>(v[j], scale * prob[j]));
  }
}

// The row whose sum lanes_tree_sum_each gives to this thread.
__device__ __forceinline__ int sum_row() {
  using T = BackwardTile;
  return T::row() + 2 * (T::lane() % 2) + T::lane() / 2 % 2;
}

// Adds up the sums of dprob that are held, the last of them of this item's tile, where its block of
// tokens or the range ends or no more can be held. Returns how many are held then. Its branches and
// loops keep the warp together, which leaves the kernel's uniform registers to it.
template <class Act, class Shared>
__device__ __forceinline__ int add_sums(const ActBackward<Act>& p, const TileItem& item, int held,
                                        Shared& shared) {
  using T = BackwardTile;
  using Flag = ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device>;
  constexpr int kSums = Shared::kSums;
  const int next = index_of(p, item) + 1;
  const bool ends_block = item.tile + 1 == p.tiles, ends_range = next == of_warp(shared.range.end);
  if (!ends_block && !ends_range && held < kSums) return held;
  const bool takes_over = item.tile + 1 > held && next - held == of_warp(shared.range.begin);
  const int mine = of_warp(1 << threadIdx.x / 32);
  const int r = sum_row();
  const bool stores = T::lane() < 4 && r < item.rows;
  float* const dprob = p.dprobs + item.first_row + (stores ? r : 0);
  float sum = 0.0f;
  if (takes_over) {
    Flag flag(p.carry_ready[blockIdx.x]);
    while ((of_warp(static_cast<int>(flag.load(::cuda::memory_order_acquire))) & mine) == 0) {
    }
    __syncwarp();
    sum = __ldcg(dprob);
    flag.fetch_and(~static_cast<unsigned>(mine), ::cuda::memory_order_relaxed);
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < held; ++i) sum += shared.sums[i][r];
  if (!ends_block && !ends_range) {
    __syncwarp();
    if (T::lane() < 4) shared.sums[0][r] = sum;
    return 1;
  }
  if (stores) *dprob = sum;
  if (!ends_block) {
    __syncwarp();
    Flag(p.carry_ready[blockIdx.x + 1])
        .fetch_or(static_cast<unsigned>(mine), ::cuda::memory_order_release);
  }
  return 0;
}

template <typename F, ColumnKind kKind, class Act, RowKernel kKernel>
__global__ __launch_bounds__(512,
                             1) void backward_tiles(const __grid_constant__ ActBackward<Act> p,
                                                    const __grid_constant__ ActBackwardColumns to) {
  using T = BackwardTile;
  constexpr bool kTurns = kKernel == RowKernel::any && Act::kGated;
  constexpr bool kSide = kKernel == RowKernel::side;
  using Shared = BackwardTilesShared<Act, kSide>;
  constexpr int kOuts = Shared::kOuts, kH = kOuts - 1, kSlots = Shared::kSlots;  // dgate, dup, h
  extern __shared__ __align__(128) unsigned char bytes[];
  auto& shared = *reinterpret_cast<Shared*>(bytes);
  prefetch_plan(p.plan);
  if (p.probs == nullptr && threadIdx.x < 128) shared.prob[threadIdx.x] = 1.0f;
  if (threadIdx.x == 0) {
    shared.maxima_done.start(T::kWarps);
    shared.scales_done.start(T::kWarps);
    shared.codes_done.start(T::kWarps);
  }
  const BackwardRange range = backward_range(p);
  if (threadIdx.x == 0) shared.range = range;
  const int items = range.end - range.begin;
  TileItem item{}, next{};
  if (items > 0) next = item_at(p.plan, p.tiles, range.last);
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    if (items > 0) load_row<kKernel>(p, next, j, j, shared);
    copy_commit();
  }
  shared.sigmoids.fill(p.act);
  __syncthreads();

  const ColumnsOut outs[3] = {to.dz, kH == 1 ? to.h : to.dz, to.h};  // the first kOuts
  const int columns_of_dz = to.dz.data != nullptr ? p.kParts * p.intermediate : 0;
  const int columns_of_h = to.h.data != nullptr ? p.intermediate : 0;  // 0: not stored
  const SideBySide side(p.intermediate);                               // of kSide alone
  const int columns_of_dgate = kSide ? min(columns_of_dz, side.end()) : columns_of_dz;
  const int columns[3] = {columns_of_dgate, kH == 1 ? columns_of_h : columns_of_dz, columns_of_h};
  const auto tile_of = [&](int tile, int o) {
    if (kTurns) return o < kH ? 2 * tile + o : tile;
    return o == 1 && o < kH ? (kSide ? side.whole : p.tiles) + tile : tile;
  };
  const auto maxima = [&](int o) {
    return T::Maxima{shared.maxima[0] + 128 * o, Shared::kMaxima, shared.most[o], shared.scale[o]};
  };
  const auto store_columns = [&](int o, int turn, int block, int tile) {
    if (o == 0) shared.codes_done.wait(turn);
    if (kTurns && o == kH) {
      typename T::Words words;
      T::columns_read(shared.codes[o], words);
      int at = 128 * tile + column_of_place(threadIdx.x / 8);
      uint8_t* to = outs[o].data + strides(at, outs[o].ld) + (128 * block + 16 * (threadIdx.x % 8));
#pragma unroll
      for (int i = 0; i < 2; ++i, at += 32, to += 32 * outs[o].ld)  // 64 places
        store_if(at < columns[o], to, words[i]);
    } else if (kSide && o == 1) {
      typename T::Words words;
      T::columns_read(shared.codes[o], words);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int up = side.up_column(tile, 64 * i + threadIdx.x / 8);
        uint8_t* to = outs[o].data + strides(p.intermediate + up, outs[o].ld) +
                      (128 * block + 16 * (threadIdx.x % 8));
        store_if(up >= 0 && columns[o] > 0, to, words[i]);
      }
    } else {
      T::columns_store(outs[o], tile_of(tile, o), block, columns[o], shared.codes[o]);
    }
  };
  const int quarter = of_warp(threadIdx.x / 128);  // of the block: an output's column scales each
  int held = 0;                                    // sums of dprob
  int first_slot = 0;                              // of an item's row 0
  const auto slot_of = [&](int j) {
    if (kSlots == 4) return j;
    const int slot = first_slot + j % 3;
    return slot < 3 ? slot : slot - 3;
  };
#pragma unroll 1
  for (int n = 0; n < items; ++n) {
    const int last_block = item.block, last_tile = item.tile;
    item = next;
    const bool more = n + 1 < items;
    if (more) next = item_after(p, shared.range, item);
    float v[kOuts][4][8], prob[4], row_most[8] = {}, sum[4], most[kOuts];
    float sum_of_more[4] = {};            // of an interleaved z: of columns from 64 on
    const auto load_after = [&](int j) {  // into the slot of row j
      const bool of_next = j + kSlots >= 4;
      if (!of_next || more)
        load_row<kKernel>(p, of_next ? next : item, (j + kSlots) % 4, slot_of(j), shared);
      copy_commit();
    };
    copy_wait<kSlots - 1>();
    __syncwarp();
    const float4 probs = *reinterpret_cast<const float4*>(&shared.prob[T::row()]);
    prob[0] = probs.x, prob[1] = probs.y, prob[2] = probs.z, prob[3] = probs.w;
    most[kH] = 0.0f;
    constexpr bool kMultiplied = kKind == ColumnKind::column;
    const bool straddles = kSide && side.straddles(item.tile, T::column(0));
    const bool has_up = !kSide || side.up_column(item.tile, T::column(0)) >= 0;
    if constexpr (kSide)
      if (item.tile > 0 && index_of(p, item) == of_warp(shared.range.begin))
        find_waiting<kMultiplied>(p, item, prob, shared);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j > 0) {
        load_after(j - 1);
        copy_wait<kSlots - 1>();
      }
      const auto terms = row_gradient<kTurns, kMultiplied>(p.act, shared.operand[slot_of(j)],
                                                           shared.sigmoids, prob[j], v, j);
      if constexpr (kTurns)
        sum[j] = terms.x, sum_of_more[j] = terms.y;
      else
        sum[j] = straddles ? 0.0f : terms;
      if constexpr (kSide) {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[0][j][i] = straddles ? v[1][j][i] : v[0][j][i];
        if (side.waits(T::column(0))) swap_waiting(side.rest, j, v[1][j], shared);
      }
      if (kMultiplied) prob[j] = 1.0f;
      row_most[j] = weighted_amax_or_nan(v[0][j], prob[j]);
      if constexpr (Act::kGated)
        row_most[4 + j] = has_up ? weighted_amax_or_nan(v[1][j], prob[j]) : 0.0f;
      const float h_most = weighted_amax_or_nan(v[kH][j], prob[j]);
      most[kH] = fmaxf(most[kH], straddles ? 0.0f : h_most);
      __syncwarp();  // no read of the next row before: fewer registers
#pragma unroll
      for (int o = 0; o < kOuts; ++o)  // behind two rows, for a burst of stores holds up reads
        if (j == o / 2 && n > 0) store_columns(o, n - 1, last_block, last_tile);
    }
    float row_sum = lanes_tree_sum_each<16>(sum);
    if constexpr (kTurns) row_sum += lanes_tree_sum_each<16>(sum_of_more);
    if (T::lane() < 4) shared.sums[held][sum_row()] = row_sum;
#pragma unroll
    for (int o = 0; o < kH; ++o)
      most[o] = fmaxf(fmaxf(fmaxf(row_most[4 * o], row_most[4 * o + 1]),
                            fmaxf(row_most[4 * o + 2], row_most[4 * o + 3])),
                      0.0f);
#pragma unroll
    for (int o = 0; o < kOuts; ++o) T::columns_amax<kKind>(v[o], prob, most[o], maxima(o));
    shared.maxima_done.arrive();

    load_after(3);
    if (kSide) first_slot = slot_of(1);
    const float scales = store_row_scales<F, kKernel>(p, item, row_most);
    store_rows<F, kKernel>(p, item, 0, v[0], prob, scales);
    shared.maxima_done.wait(n);
    if constexpr (kKind == ColumnKind::column) {
      const int place = threadIdx.x % 128;
      TileScale s{};
      if (quarter < kOuts) {
        const float most = T::column_amax<4>(maxima(quarter), place);
        s = quarter < kH ? p.scaling.template of<F>(most) : p.scaling.template of<E4M3>(most);
        shared.scale[quarter][place] = s.scale;
      }
      shared.scales_done.arrive();
      if (kTurns && quarter == kH) {
        const int at = 128 * item.tile + column_of_place(T::column_at(place));
        if (at < columns_of_h)
          to.h.scale[strides(item.tile, to.h.scale_tile) + strides(item.block, to.h.scale_block) +
                     (at - 128 * item.tile)] = s.scale_inv;
      } else if (kSide && quarter == 1) {
        const int at = side.up_column(item.tile, T::column_at(place)) + p.intermediate;
        if (at >= p.intermediate && columns_of_dz > 0)
          to.dz.scale[strides(at / 128, to.dz.scale_tile) + strides(item.block, to.dz.scale_block) +
                      at % 128] = s.scale_inv;
      } else if (quarter < kOuts)  // nobody waits for these stores
        T::column_scale_store(quarter < kH ? to.dz : to.h, tile_of(item.tile, quarter), item.block,
                              quarter < kH ? columns_of_dgate : columns_of_h, place, s.scale_inv);
    }
    if constexpr (Act::kGated) store_rows<F, kKernel>(p, item, 1, v[1], prob, scales);
    if constexpr (kKind == ColumnKind::column) shared.scales_done.wait(n);
    float scale_inv[kOuts];
#pragma unroll
    for (int o = 0; o < kH; ++o)
      scale_inv[o] = T::columns_encode<F, kKind>(v[o], prob, maxima(o), p.scaling, shared.codes[o]);
    scale_inv[kH] =
        T::columns_encode<E4M3, kKind>(v[kH], prob, maxima(kH), p.scaling, shared.codes[kH]);
    shared.codes_done.arrive();
    if constexpr (kKind == ColumnKind::block) {  // a warp each, so that none falls behind
#pragma unroll
      for (int o = 0; o < kOuts; ++o)
        if (threadIdx.x == 32 * o &&
            columns[o] > (kTurns && o < kH  ? 128 * (2 * item.tile + o)
                          : kSide && o != 1 ? 128 * item.tile
                                            : 0) &&
            !(kSide && o == 1 && item.tile == 0))
          T::block_scale_store(outs[o], tile_of(item.tile, o), item.block, scale_inv[o]);
    }
    if (p.dprobs != nullptr) held = add_sums(p, item, held + 1, shared);
  }
#pragma unroll
  for (int o = 0; o < kOuts; ++o)
    if (items > 0) store_columns(o, items - 1, item.block, item.tile);
}

// Tiles that a range of backward_tiles has at least. Where sums of dprob are handed on, a block of
// tokens takes as long as a range of it and a wait, of about half a tile's time, a range.
inline int64_t fewest_tiles(int64_t tiles, bool dprobs) {
  return dprobs ? std::lround(std::sqrt(static_cast<double>(tiles))) : 1;
}

template <typename F, RowKernel kKernel>
void launch_tiles(const ActQuantizeBackward& p, cudaStream_t stream) {
  const int64_t tiles = items_of<kKernel>(p.dh.shape[1]), all = p.plan.columns() / kTile * tiles;
  if (all == 0) return;
  const ActBackwardColumns to = {columns_out(p.dz_columns), columns_out(p.h_columns)};
  const int64_t ranges =
      std::min<int64_t>(cdiv(all, fewest_tiles(tiles, p.dprobs.defined())), kMostRanges);
  const unsigned grid = persistent_grid(p.dh.device, ranges, 1);
  const ColumnKind kind = kind_of(p.dz_columns.defined() ? p.dz_columns : p.h_columns);
  with_activation(p.activation, [&]<class Act>(Act act) {
    constexpr bool kSide = kKernel == RowKernel::side;
    if constexpr (!kSide || Act::kGated) {
      const auto go = [&]<ColumnKind kKind>() {
        launch(kBackward, backward_tiles<F, kKind, Act, kKernel>, grid, BackwardTile::kThreads,
               sizeof(BackwardTilesShared<Act, kSide>), stream, backward_of(p, tiles, act), to);
      };
      kind == ColumnKind::block ? go.template operator()<ColumnKind::block>()
                                : go.template operator()<ColumnKind::column>();
    }
  });
}

}  // namespace fp8moe::cuda
