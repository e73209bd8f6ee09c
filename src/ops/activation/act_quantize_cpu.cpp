// act_quantize: h = Q(silu(gate) up prob) row by row.
#include "ops/activation/swiglu_rows_cpu.h"
#include "ops/backends.h"

namespace fp8moe::cpu {

void act_quantize(const Tensor& z, const RoutingPlan& plan, const Tensor& probs, float limit,
                  const Fp8Tensor& h, const Fp8Tensor& z_q, ScaleRule rule, Stream) {
  const int64_t inner = z.shape[1] / 2;
  const std::vector<TokenTile> tiles = tiles_of("act_quantize", plan, z.shape[0]);
  const RowSink h_rows(h);
  const RowSink z_rows(z_q);
  if (plan.defined()) {
    h_rows.zero_padding(plan);
    if (z_q.defined()) z_rows.zero_padding(plan);
  }
  dispatch_float(z.dtype, [&]<typename T>() {
#pragma omp parallel
    {
      std::vector<float> z_row(2 * inner), h_row(inner);
#pragma omp for schedule(dynamic)
      for (size_t n = 0; n < tiles.size(); ++n) {
        const TokenTile& tile = tiles[n];
        for (int64_t r = tile.row; r < tile.row + tile.tokens; ++r) {
          const T* from = z.as<const T>() + r * 2 * inner;
          widen_row<T>(from, 2 * inner, z_row.data());
          swiglu_row(z_row.data(), inner, probs.defined() ? probs.as<const float>()[r] : 1.0f,
                     limit, h_row.data());
          h_rows.put(r, h_row.data(), rule);
          if (z_q.defined()) z_rows.put(r, from, rule);
        }
      }
    }
  });
}

}  // namespace fp8moe::cpu
