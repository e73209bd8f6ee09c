// q = Q(w) by 128x128 tiles of w [E, N, K], in E4M3; q_t [E, K, N] holds the same codes transposed.
#include "common/dispatch.h"
#include "cpu/columns.h"
#include "cpu/multiversion.h"
#include "ops/backends.h"

namespace fp8moe::cpu {
namespace {

// One tile of w [rows, cols] -> its codes and scale_inv; past the edge the codes are zero.
template <typename T>
FP8MOE_CLONES float encode_tile(const T* w, int64_t stride, int rows, int cols, ScaleRule rule,
                                CodeTile& tile) {
  const TileMax max = tile_max(w, stride, rows, cols);
  const TileScale s = tile_scale_of<E4M3, T>(max.amax, rule);
  tile_encode<E4M3>(w, stride, rows, cols, s.scale, rule.kind, max.finite, tile.code[0], kTile);
  return s.scale_inv;
}

void transpose(const CodeTile& tile, int rows, int cols, uint8_t* out, int64_t stride) {
  if (rows == kTile) return transpose_tile(tile, cols, out, stride);
  CodeTile turned;
  turn_tile(tile, turned);
  for (int c = 0; c < cols; ++c)
    memcpy(out + c * stride, turned.code[c], static_cast<size_t>(rows));
}

}  // namespace

template <>
void run(const QuantizeWeight& p, Stream) {
  const int64_t experts = p.w.shape[0];
  const int64_t n = p.w.shape[1];
  const int64_t k = p.w.shape[2];
  const int64_t n_tiles = cdiv(n, kTile);
  const int64_t k_tiles = cdiv(k, kTile);
  dispatch_float(p.w.dtype, [&]<typename T>() {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t e = 0; e < experts; ++e)
      for (int64_t nt = 0; nt < n_tiles; ++nt) {
        const int64_t row = nt * kTile;
        const int rows = static_cast<int>(std::min(kTile, n - row));
        for (int64_t kt = 0; kt < k_tiles; ++kt) {
          const int64_t col = kt * kTile;
          const int cols = static_cast<int>(std::min(kTile, k - col));
          CodeTile tile;
          const float scale_inv =
              encode_tile(p.w.as<T>() + (e * n + row) * k + col, k, rows, cols, p.rule, tile);
          if (p.q.defined()) {
            uint8_t* out = p.q.data.as<uint8_t>() + e * n * k + col;
            for (int i = 0; i < rows; ++i)
              memcpy(out + (row + i) * k, tile.code[i], static_cast<size_t>(cols));
            p.q.scale_inv.as<float>()[(e * n_tiles + nt) * k_tiles + kt] = scale_inv;
          }
          if (p.q_t.defined()) {
            transpose(tile, rows, cols, p.q_t.data.as<uint8_t>() + (e * k + col) * n + row, n);
            p.q_t.scale_inv.as<float>()[(e * k_tiles + kt) * n_tiles + nt] = scale_inv;
          }
        }
        finish_lines();
      }
  });
}

}  // namespace fp8moe::cpu
