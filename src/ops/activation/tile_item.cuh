// The 128x128 tiles of a matrix whose rows a plan divides into blocks of 128 tokens, as a warp
// walks through them: all of it in uniform registers, and the plan read once an expert.
#pragma once

#include "device/plan.cuh"
#include "device/reduce.cuh"

namespace fp8moe::cuda {

// A tile of a block of tokens, as in TokenBlock.
struct TileItem {
  int first_row, tokens, rows;
  int block, tile;
  ExpertRest rest;  // from this block on
};

// A value that all lanes of a warp have, in a uniform register: the compiler then knows that
// branches on it keep the warp together, and spends no registers on it.
__device__ __forceinline__ int of_warp(int value) {
  return static_cast<int>(__reduce_or_sync(kFullWarp, static_cast<unsigned>(value)));
}

// The mine-th of `shares` equal shares of `all`, the first ones longer by one; of a whole warp.
struct Share {
  int begin, count;
};
__device__ __forceinline__ Share share_of(int all, int shares, int mine) {
  const int count = all / shares, more_by_one = all % shares;
  return {of_warp(count * mine + min(mine, more_by_one)), of_warp(count + (mine < more_by_one))};
}

// The item so many tiles after another, `tiles` a block of tokens.
__device__ __forceinline__ TileItem item_after(const PlanView& plan, int tiles, TileItem item,
                                               int count) {
  item.tile += count;
  if (item.tile < tiles) return item;
  const int last = item.block;
  for (; item.tile >= tiles; item.tile -= tiles) ++item.block;
  if (item.block < item.rest.end) {
    const int rows = 128 * (item.block - last);
    item.rest.first_row += rows, item.rest.tokens -= rows, item.rest.rows -= rows;
  } else {
    const ExpertRest rest = expert_rest_of_warp(plan, item.block);
    item.rest = {of_warp(rest.first_row), of_warp(rest.tokens), of_warp(rest.rows), 0,
                 of_warp(rest.end)};
  }
  const TokenBlock b = item.rest.block();
  item.first_row = b.first_row, item.tokens = b.tokens, item.rows = b.rows;
  return item;
}

// The item that is `index` in all, of one tile after the other of each block of tokens.
__device__ __forceinline__ TileItem item_at(const PlanView& plan, int tiles, int index) {
  return item_after(plan, tiles, {.block = index / tiles - 1}, tiles + index % tiles);
}

}  // namespace fp8moe::cuda
