// The operands of the SwiGLU kernels, read as f32 eight at a time, and what is computed from them.
#pragma once

#include "common/swiglu.h"
#include "core/dispatch.h"
#include "cuda/device/tile.cuh"
#include "cuda/runtime.h"

namespace fp8moe::cuda {

// Eight values of a dense tensor of any float type.
struct FloatSource {
  const void* data;
  DType dtype;

  __device__ __forceinline__ void load(int64_t offset, float (&v)[8]) const {
    const auto* p = static_cast<const char*>(data);
    if (dtype == DType::f32) {
      const uint4 a = cuda::load<uint4>(p + 4 * offset), b = cuda::load<uint4>(p + 4 * offset + 16);
      const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      unpack<float>(words, v);
    } else {
      const uint4 a = cuda::load<uint4>(p + 2 * offset);
      const uint32_t words[4] = {a.x, a.y, a.z, a.w};
      if (dtype == DType::bf16)
        unpack<Bf16>(words, v);
      else
        unpack<Fp16>(words, v);
    }
  }
};

// z of any dtype, or E4M3 dequantized to bf16.
struct PreActivation {
  FloatSource dense;               // data == nullptr: E4M3
  const uint8_t* codes = nullptr;  // [R, 2I]
  const float* scale_inv = nullptr;
  int64_t scale_row = 0, scale_tile = 0;
  int width = 0;  // 2I

  __device__ __forceinline__ void load(int64_t row, int column, float (&v)[8]) const {
    const int64_t offset = row * width + column;
    if (dense.data != nullptr) return dense.load(offset, v);
    const uint2 packed = cuda::load<uint2>(codes + offset);
    const float s = scale_inv[row * scale_row + column / 128 * scale_tile];
    fp8_decode4<E4M3>(packed.x, v), fp8_decode4<E4M3>(packed.y, v + 4);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 rounded = unpack2<Bf16>(pack2<Bf16>(v[i] * s, v[i + 1] * s));
      v[i] = rounded.x, v[i + 1] = rounded.y;
    }
  }
};

inline PreActivation pre_activation(const Tensor& z, const Fp8Tensor& z_q) {
  if (!z_q.defined()) return {.dense = {z.data, z.dtype}, .width = static_cast<int>(z.shape[1])};
  const RowsOut strides = rows_out(z_q);
  return {.dense = {nullptr, DType::bf16},
          .codes = strides.data,
          .scale_inv = strides.scale,
          .scale_row = strides.scale_row,
          .scale_tile = strides.scale_tile,
          .width = static_cast<int>(strides.ld)};
}

// z itself, to be quantized.
struct ZSource {
  PreActivation z;
  __device__ __forceinline__ void operator()(int64_t row, int column, float (&v)[8]) const {
    z.load(row, column, v);
  }
};

// h = silu(gate) up prob, [R, I]
struct HiddenSource {
  PreActivation z;
  const float* probs;  // [R] or nullptr: 1
  float clamp;
  int intermediate;  // I

  __device__ __forceinline__ void operator()(int64_t row, int column, float (&v)[8]) const {
    float gate[8], up[8];
    z.load(row, column, gate);
    z.load(row, intermediate + column, up);
    const float prob = probs != nullptr ? probs[row] : 1.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const SwigluInput in = clamp_swiglu(gate[i], up[i], clamp);
      v[i] = swiglu(in, pinned_sigmoid(in.gate), prob);
    }
  }
};

// dz = [dgate | dup], [R, 2I]; terms: of dprob instead.
struct GradSource {
  PreActivation z;
  FloatSource dh;  // [R, I]
  const float* probs;
  float clamp;
  int intermediate;

  template <typename Body>
  __device__ __forceinline__ void each(int64_t row, int column, Body body) const {
    float gate[8], up[8], grad[8];
    z.load(row, column, gate);
    z.load(row, intermediate + column, up);
    dh.load(row * intermediate + column, grad);
    const float prob = probs != nullptr ? probs[row] : 1.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const SwigluInput in = clamp_swiglu(gate[i], up[i], clamp);
      body(i, swiglu_grad(in, pinned_sigmoid(in.gate), prob, grad[i]));
    }
  }
  __device__ __forceinline__ void operator()(int64_t row, int column, float (&v)[8]) const {
    const bool second = column >= intermediate;
    each(row, second ? column - intermediate : column,
         [&](int i, SwigluGrad g) { v[i] = second ? g.dup : g.dgate; });
  }
  __device__ __forceinline__ void terms(int64_t row, int column, float (&v)[8]) const {
    each(row, column, [&](int i, SwigluGrad g) { v[i] = g.dprob; });
  }
};

// One block of 256 threads a tile; tiles of a row block are neighbours in the grid.
template <typename F, ColumnKind kKind, typename Source>
__global__ __launch_bounds__(Tile<8>::kThreads, 2) void quantize_source(
    const __grid_constant__ Source source, const __grid_constant__ PlanView plan, int rows,
    int columns, int tiles, const __grid_constant__ RowsOut rows_to,
    const __grid_constant__ ColumnsOut columns_to, Scaling scaling) {
  const int tile = blockIdx.x % tiles, block = blockIdx.x / tiles;
  TokenBlock b = {128 * block, min(128, rows - 128 * block), min(128, rows - 128 * block), 0};
  if (plan.row_of != nullptr) b = token_block(plan, block);
  if (b.expert < 0) return;
  quantize_tile<F, kKind>(source, b, tile, block, columns, rows_to, columns_to, scaling);
}

// Quantizes source [rows, columns] to rows, to columns, or to both, in format F.
template <typename F, typename Source>
void quantize_from(const char* op, const Source& source, const RoutingPlan& plan, int64_t rows,
                   int64_t columns, const Fp8Tensor& rows_to, const Fp8Tensor& columns_to,
                   Scaling scaling, cudaStream_t stream) {
  const int64_t tiles = cdiv(columns, kTile);
  const int64_t blocks = plan.defined() ? plan.columns() / kTile : cdiv(rows, kTile);
  if (blocks == 0 || tiles == 0) return;
  const auto go = [&](auto kernel) {
    launch(op, kernel, static_cast<unsigned>(blocks * tiles), Tile<8>::kThreads, 0, stream, source,
           view_of(plan), static_cast<int>(rows), static_cast<int>(columns),
           static_cast<int>(tiles), rows_out(rows_to), columns_out(columns_to), scaling);
  };
  switch (kind_of(columns_to)) {
    case ColumnKind::none: return go(quantize_source<F, ColumnKind::none, Source>);
    case ColumnKind::block: return go(quantize_source<F, ColumnKind::block, Source>);
    case ColumnKind::column: return go(quantize_source<F, ColumnKind::column, Source>);
  }
}

}  // namespace fp8moe::cuda
