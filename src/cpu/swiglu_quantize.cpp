// swiglu_quantize: h = Q(silu(gate) up prob) row by row; with columns, the f32 rows of 128 tokens
// are kept until their columns are quantized too.
#include "core/backends.h"
#include "cpu/swiglu_rows.h"

namespace fp8moe::cpu {

void swiglu_quantize(const Tensor& z, const RoutingPlan& plan, const Tensor& probs, float clamp,
                     const Fp8Tensor& h, const Fp8Tensor& h_columns, const Fp8Tensor& z_q,
                     ScaleRule rule, Stream) {
  const int64_t inner = z.shape[1] / 2;
  const std::vector<TokenTile> tiles = tiles_of("swiglu_quantize", plan, z.shape[0]);
  const int64_t kept = h_columns.defined() ? kTile : 1;  // rows of h
  const RowSink h_rows(h);
  const RowSink z_rows(z_q);
  if (plan.defined()) {
    h_rows.zero_padding(plan);
    if (z_q.defined()) z_rows.zero_padding(plan);
  }
  dispatch_float(z.dtype, [&]<typename T>() {
#pragma omp parallel
    {
      std::vector<float> z_row(2 * inner);
      std::vector<float> h_block(kept * inner);
#pragma omp for schedule(dynamic)
      for (size_t n = 0; n < tiles.size(); ++n) {
        const TokenTile& tile = tiles[n];
        for (int64_t r = tile.row; r < tile.row + tile.tokens; ++r) {
          const T* from = z.as<const T>() + r * 2 * inner;
          float* h_row = h_block.data() + (r - tile.row) % kept * inner;
          widen_row<T>(from, 2 * inner, z_row.data());
          swiglu_row(z_row.data(), inner, probs.defined() ? probs.as<const float>()[r] : 1.0f,
                     clamp, h_row);
          h_rows.put(r, h_row, rule);
          if (z_q.defined()) z_rows.put(r, from, rule);
        }
        if (h_columns.defined()) put_columns(h_columns, tile, h_block.data(), rule);
      }
    }
  });
}

}  // namespace fp8moe::cpu
