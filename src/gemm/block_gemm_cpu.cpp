// An output block of at most 264 x 256 is one task of one thread. Per 128-block of the contraction
// the operands are decoded once into panels that fit the L2 cache, the inner tiles (gemm_tile.h)
// are summed from zero, and each is scaled into the block's f32 sums.
#include "gemm/block_gemm_cpu.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "common/dispatch.h"
#include "cpu/multiversion.h"
#include "gemm/gemm_tile_cpu.h"

namespace fp8moe::cpu {
namespace {

constexpr int64_t kRows = 264;  // a multiple of kTileRowsMax
constexpr int64_t kColumns = 256;
constexpr int64_t kMinColumns = 64;  // narrowest column block, when there are few tasks

// A thread's memory: 0.5 MB.
struct alignas(64) Scratch {
  float a[kRows * kTile];       // [row][k]
  float b[kColumns * kTile];    // [tile][k][column of the tile]
  float sum[kRows * kColumns];  // [row][column]
  float partial[kTileRowsMax * kTileColumnsMax];
  uint8_t codes[kTile * kTileColumnsMax];  // one tile of b, [k][column]
  float scale_a[kRows];
  float scale_b[kColumns];
};

struct Task {
  const BlockProduct* product;
  int64_t row;
  int64_t column;
  int64_t rows;
  int64_t columns;
};

template <typename F>
FP8MOE_CLONES void decode(const uint8_t* codes, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = fp8_decode<F>(codes[i]);
}

// sum[i][j] += partial[i][j] * (scale_a[i] * scale_b[j])
FP8MOE_CLONES void promote(const float* partial, int tile_columns, int64_t rows, int64_t columns,
                           const float* scale_a, const float* scale_b, float* sum) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      sum[i * kColumns + j] += partial[i * tile_columns + j] * (scale_a[i] * scale_b[j]);
}

// [rows][k] from `rows` rows of codes; rows up to a whole tile are zero.
void pack_a(const BlockOperand& a, int64_t row, int64_t rows, int64_t k, int64_t depth, int tile,
            float* panel) {
  dispatch_fp8(a.format, [&]<typename F>() {
    for (int64_t i = 0; i < rows; ++i)
      decode<F>(a.codes + (row + i) * a.stride + k, depth, panel + i * kTile);
  });
  for (int64_t i = rows; i < round_up(rows, tile); ++i) std::fill_n(panel + i * kTile, depth, 0.0f);
}

// [tile][k][column] from `columns` rows of codes in E4M3; columns up to a whole tile are zero.
void pack_b(const BlockOperand& b, int64_t row, int64_t columns, int64_t k, int64_t depth, int tile,
            uint8_t* codes, float* panel) {
  for (int64_t first = 0; first < columns; first += tile) {
    const int64_t n = std::min<int64_t>(tile, columns - first);
    if (n < tile) memset(codes, 0, depth * tile);
    for (int64_t j = 0; j < n; ++j) {
      const uint8_t* source = b.codes + (row + first + j) * b.stride + k;
      for (int64_t p = 0; p < depth; ++p) codes[p * tile + j] = source[p];
    }
    decode<E4M3>(codes, depth * tile, panel + first * kTile);
  }
}

void sum_blocks(const Task& task, const TileKernel& kernel, Scratch& s) {
  const BlockProduct& product = *task.product;
  for (int64_t i = 0; i < task.rows; ++i) std::fill_n(s.sum + i * kColumns, task.columns, 0.0f);
  const auto add = [&](const BlockOperand& a, const BlockOperand& b, int64_t k, int64_t depth) {
    pack_a(a, task.row, task.rows, k, depth, kernel.rows, s.a);
    pack_b(b, task.column, task.columns, k, depth, kernel.columns, s.codes, s.b);
    for (int64_t i = 0; i < task.rows; ++i) s.scale_a[i] = a.scale(task.row + i, k / kTile);
    for (int64_t j = 0; j < task.columns; ++j) s.scale_b[j] = b.scale(task.column + j, k / kTile);
    for (int64_t j = 0; j < task.columns; j += kernel.columns)
      for (int64_t i = 0; i < task.rows; i += kernel.rows) {
        kernel.run(s.a + i * kTile, s.b + j * kTile, static_cast<int>(depth), s.partial);
        promote(s.partial, kernel.columns, std::min<int64_t>(kernel.rows, task.rows - i),
                std::min<int64_t>(kernel.columns, task.columns - j), s.scale_a + i, s.scale_b + j,
                s.sum + i * kColumns + j);
      }
  };
  for (int64_t k = 0; k < product.depth; k += kTile)
    add(product.a, product.b, k, std::min(kTile, product.depth - k));
  for (int64_t k = 0; k < product.depth2; k += kTile)
    add(product.a2, product.b2, k, std::min(kTile, product.depth2 - k));
}

template <typename T>
void store(const Task& task, const float* sum, T* out, bool accumulate) {
  const int64_t stride = task.product->columns;
  out += task.product->out + task.row * stride + task.column;
  for (int64_t i = 0; i < task.rows; ++i, out += stride, sum += kColumns)
    for (int64_t j = 0; j < task.columns; ++j) {
      const T value = from_float<T>(sum[j]);
      out[j] = accumulate ? from_float<T>(to_float(out[j]) + to_float(value)) : value;
    }
}

// Row blocks of even size; column blocks of `width`.
std::vector<Task> cut(const std::vector<BlockProduct>& products, int64_t width) {
  std::vector<Task> tasks;
  for (const BlockProduct& product : products) {
    const int64_t height =
        round_up(cdiv(product.rows, std::max<int64_t>(1, cdiv(product.rows, kRows))), kTileRowsMax);
    for (int64_t row = 0; row < product.rows; row += height)
      for (int64_t column = 0; column < product.columns; column += width)
        tasks.push_back({&product, row, column, std::min(height, product.rows - row),
                         std::min(width, product.columns - column)});
  }
  return tasks;
}

}  // namespace

BlockOperand BlockOperand::of(const Fp8Tensor& q, int64_t matrix, int64_t row, int64_t column) {
  const int nd = q.data.ndim;
  const int64_t rows = q.data.shape[nd - 2];
  const int64_t depth = q.data.shape[nd - 1];
  const int64_t blocks = cdiv(depth, kTile);
  BlockOperand operand{.codes = q.data.as<uint8_t>() + (matrix * rows + row) * depth + column,
                       .stride = depth,
                       .format = q.data.dtype,
                       .scales = nullptr,
                       .row_tile = q.layout == ScaleLayout::block ? kTile : 1,
                       .row_step = q.layout == ScaleLayout::gemm ? 1 : blocks,
                       .block_step = q.layout == ScaleLayout::gemm ? pad4(rows) : 1};
  operand.scales = q.scale_inv.as<float>() + matrix * cdiv(rows, operand.row_tile) * blocks +
                   row / operand.row_tile * operand.row_step + column / kTile * operand.block_step;
  return operand;
}

void multiply(const std::vector<BlockProduct>& products, const Tensor& out, bool accumulate) {
  int64_t width = kColumns;
  std::vector<Task> tasks = cut(products, width);
  const int64_t threads = omp_get_max_threads();
  while (width > kMinColumns && static_cast<int64_t>(tasks.size()) < 4 * threads)
    tasks = cut(products, width /= 2);
  if (tasks.empty()) return;

  static const TileKernel kernel = tile_kernels().front();
  const int64_t count = static_cast<int64_t>(tasks.size());
  const int team = static_cast<int>(std::min(threads, count));
  const auto scratch = std::make_unique_for_overwrite<Scratch[]>(team);
#pragma omp parallel for schedule(dynamic) num_threads(team)
  for (int64_t t = 0; t < count; ++t) {
    Scratch& s = scratch[omp_get_thread_num()];
    sum_blocks(tasks[t], kernel, s);
    if (out.dtype == DType::f32) {
      store(tasks[t], s.sum, out.as<float>(), accumulate);
    } else {
      store(tasks[t], s.sum, out.as<Bf16>(), accumulate);
    }
  }
}

}  // namespace fp8moe::cpu
