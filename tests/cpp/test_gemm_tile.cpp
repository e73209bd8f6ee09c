// Every instruction set this machine has gives the same bits: those of the ascending f32 sum.
#include "check.h"
#include "gemm/gemm_tile_cpu.h"

using namespace fp8moe;
using namespace fp8moe::test;

int main() {
  Random random(1);
  for (const cpu::TileKernel& kernel : cpu::tile_kernels()) {
    CHECK(cpu::kTileRowsMax % kernel.rows == 0 && cpu::kTileColumnsMax % kernel.columns == 0);
    for (int depth : {0, 1, 16, 127, 128}) {
      // The last row ends with its last element: nothing past it may be read.
      Owned a(DType::f32, {depth == 0 ? 0 : (kernel.rows - 1) * kTile + depth});
      Owned b(DType::f32, {depth, kernel.columns});
      Owned partial(DType::f32, {kernel.rows, kernel.columns});
      for (const Owned* t : {&a, &b})
        for (int64_t i = 0; i < t->view.numel(); ++i)
          t->as<float>()[i] = static_cast<float>(decode(DType::e4m3, random() % 0x7F));
      kernel.run(a.as<float>(), b.as<float>(), depth, partial.as<float>());
      for (int i = 0; i < kernel.rows; ++i)
        for (int j = 0; j < kernel.columns; ++j) {
          float sum = 0.0f;
          for (int p = 0; p < depth; ++p)
            sum += a.as<float>()[i * kTile + p] * b.as<float>()[p * kernel.columns + j];
          CHECK(partial.as<float>()[i * kernel.columns + j] == sum);
        }
    }
  }
}
