// act_quantize: h = Q(silu(gate) up prob) row by row.
#include "ops/activation/swiglu_rows_cpu.h"
#include "ops/backends.h"

namespace fp8moe::cpu {

template <>
void run(const ActQuantize& p, Stream) {
  const int64_t inner = p.z.shape[1] / 2;
  const std::vector<TokenTile> tiles = tiles_of("act_quantize", p.plan, p.z.shape[0]);
  const RowSink h_rows(p.h);
  const RowSink z_rows(p.z_q);
  if (p.plan.defined()) {
    h_rows.zero_padding(p.plan);
    if (p.z_q.defined()) z_rows.zero_padding(p.plan);
  }
  dispatch_float(p.z.dtype, [&]<typename T>() {
#pragma omp parallel
    {
      std::vector<float> z_row(2 * inner), h_row(inner);
#pragma omp for schedule(dynamic)
      for (size_t n = 0; n < tiles.size(); ++n) {
        const TokenTile& tile = tiles[n];
        for (int64_t r = tile.row; r < tile.row + tile.tokens; ++r) {
          const T* from = p.z.as<const T>() + r * 2 * inner;
          widen_row<T>(from, 2 * inner, z_row.data());
          swiglu_row(z_row.data(), inner, p.probs.defined() ? p.probs.as<const float>()[r] : 1.0f,
                     p.limit, h_row.data());
          h_rows.put(r, h_row.data(), p.rule);
          if (p.z_q.defined()) z_rows.put(r, from, p.rule);
        }
      }
    }
  });
}

}  // namespace fp8moe::cpu
