// How a tile of codes is turned and written: lines of 128 tokens, one a channel.
#pragma once

#include <cstdint>

#include "fp8moe/tensor.h"

namespace fp8moe::cpu {

constexpr int kBand = 16;  // tokens that are turned at a time

// Codes of one tile, [128 tokens][128 channels] or, turned, the other way round.
struct alignas(64) CodeTile {
  uint8_t code[kTile][kTile];
};

// turned.code[c][first + t] = band[t][c] for 16 tokens and 128 channels.
void turn_band(const uint8_t (*band)[kTile], int first, CodeTile& turned);

// out[i * stride + t] = lines[i][t] for n lines, which are aligned to 64 bytes. Where those of
// `out` are, too, they go past the caches: they lie far apart, and a store through the cache would
// read each cache line first. finish_lines() then comes before another thread is told.
void write_lines(const uint8_t (*lines)[kTile], int n, uint8_t* out, int64_t stride);
void finish_lines();

}  // namespace fp8moe::cpu
