// The operands of the activation kernels, read as f32 eight at a time, and what is computed from
// them.
#pragma once

#include "common/activation.h"
#include "common/dispatch.h"
#include "device/runtime.h"
#include "device/tile.cuh"

namespace fp8moe::cuda {

// Vec8 values of a dense tensor [R, width] of any float type.
struct FloatSource {
  const void* data;
  DType dtype;
  int width;

  __device__ __forceinline__ void load(int64_t row, int column, float (&v)[8]) const {
    const int64_t offset = row * width + column;
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

inline FloatSource float_source(const Tensor& t) {
  return {t.data, t.dtype, static_cast<int>(t.shape[1])};
}

// z itself, to be quantized.
struct ZSource {
  FloatSource z;
  __device__ __forceinline__ void operator()(int64_t row, int column, float (&v)[8]) const {
    z.load(row, column, v);
  }
};

// z by its activation, of which a switch chooses: for shapes and types without a kernel of its own.
struct PairSource {
  FloatSource z;
  Activation activation;
  bool gated;
  int intermediate;  // I

  // Eight gates and ups from that column of h on; without a gate, z in the gates' place.
  __device__ __forceinline__ void load(int64_t row, int column, float (&gate)[8],
                                       float (&up)[8]) const {
    if (!activation.interleaved) {
      z.load(row, column, gate);
      if (gated) z.load(row, intermediate + column, up);
      return;
    }
    float both[2][8];
    z.load(row, 2 * column, both[0]);
    z.load(row, 2 * column + 8, both[1]);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      gate[i] = both[i / 4][2 * i % 8], up[i] = both[i / 4][2 * i % 8 + 1];
  }
};

struct Eight {
  float of[8];
};
struct EightGradients {
  Eight dgate, dup, dprob;
};

// Functions that are called, for the switch inlined everywhere would be megabytes of code.
__device__ __noinline__ inline Eight values_of(const Activation a, int64_t rounding,
                                               const Eight gate, const Eight up) {
  Eight h;
  with_rounding(a, rounding, [&](auto act) {
#pragma unroll
    for (int i = 0; i < 8; ++i) h.of[i] = act.value(gate.of[i], up.of[i], act.sigmoid(gate.of[i]));
  });
  return h;
}
__device__ __noinline__ inline EightGradients gradients_of(const Activation a, const Eight gate,
                                                           const Eight up, const Eight dh) {
  EightGradients made;
  with_activation(a, [&](auto act) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const ActivationGrad g = act.grad(gate.of[i], up.of[i], act.sigmoid(gate.of[i]), dh.of[i]);
      made.dgate.of[i] = g.dgate, made.dup.of[i] = g.dup, made.dprob.of[i] = g.dprob;
    }
  });
  return made;
}

// h times prob, [R, I]
struct HiddenSource {
  PairSource pairs;
  const float* probs;  // [R] or nullptr: 1
  int64_t rounding = kRoundNothing;

  __device__ __forceinline__ void operator()(int64_t row, int column, float (&v)[8]) const {
    Eight gate, up = {};
    pairs.load(row, column, gate.of, up.of);
    const float prob = probs != nullptr ? probs[row] : 1.0f;
    const Eight h = values_of(pairs.activation, rounding, gate, up);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = h.of[i] * prob;
  }
};

// dz, [R, 2I] as z, or [R, I]; terms: of dprob instead.
struct GradSource {
  PairSource pairs;
  FloatSource dh;  // [R, I]
  const float* probs;

  __device__ __forceinline__ EightGradients at(int64_t row, int column) const {
    Eight gate, up = {}, grad;
    pairs.load(row, column, gate.of, up.of);
    dh.load(row, column, grad.of);
    return gradients_of(pairs.activation, gate, up, grad);
  }
  __device__ __forceinline__ void operator()(int64_t row, int column, float (&v)[8]) const {
    const float prob = probs != nullptr ? probs[row] : 1.0f;
    if (pairs.activation.interleaved) {
      const int pair = column / 2;
      const bool second = pair % 8 != 0;  // of the two fours
      const EightGradients g = at(row, pair - pair % 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[2 * i] = (second ? g.dgate.of[4 + i] : g.dgate.of[i]) * prob;
        v[2 * i + 1] = (second ? g.dup.of[4 + i] : g.dup.of[i]) * prob;
      }
      return;
    }
    const bool second = column >= pairs.intermediate;
    const EightGradients g = at(row, second ? column - pairs.intermediate : column);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = (second ? g.dup.of[i] : g.dgate.of[i]) * prob;
  }
  __device__ __forceinline__ void terms(int64_t row, int column, float (&v)[8]) const {
    const EightGradients g = at(row, column);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = g.dprob.of[i];
  }
};

// One block of 256 threads per tile; tiles of a row block are neighbours in the grid.
template <typename F, ColumnKind kKind, typename Source, typename Rule>
__global__ __launch_bounds__(Tile<8>::kThreads, 2) void quantize_source(
    const __grid_constant__ Source source, const __grid_constant__ PlanView plan, int rows,
    int columns, int tiles, const __grid_constant__ RowsOut rows_to,
    const __grid_constant__ ColumnsOut columns_to, Rule scaling) {
  const int tile = blockIdx.x % tiles, block = blockIdx.x / tiles;
  TokenBlock b = {128 * block, min(128, rows - 128 * block), min(128, rows - 128 * block), 0};
  if (plan.row_of != nullptr) b = token_block(plan, block);
  if (b.expert < 0) return;
  quantize_tile<F, kKind>(source, b, tile, block, columns, rows_to, columns_to, scaling);
}

template <typename F, ColumnKind kKind, typename Source>
void launch_source(const char* op, const Source& source, const RoutingPlan& plan, int64_t rows,
                   int64_t columns, const Fp8Tensor& rows_to, const Fp8Tensor& columns_to,
                   ScaleRule rule, float overflow, cudaStream_t stream) {
  const int64_t tiles = cdiv(columns, kTile);
  const int64_t blocks = plan.defined() ? plan.columns() / kTile : cdiv(rows, kTile);
  if (blocks == 0 || tiles == 0) return;
  const auto go = [&]<typename Rule>(Rule scaling) {
    launch(op, quantize_source<F, kKind, Source, Rule>, static_cast<unsigned>(blocks * tiles),
           Tile<8>::kThreads, 0, stream, source, view_of(plan), static_cast<int>(rows),
           static_cast<int>(columns), static_cast<int>(tiles), rows_out(rows_to),
           columns_out(columns_to), scaling);
  };
  dispatch_scaling(rule, overflow, go);
}

// Quantizes source [rows, columns] to rows, in format F. overflow: see dispatch_scaling.
template <typename F, typename Source>
void quantize_rows_from(const char* op, const Source& source, const RoutingPlan& plan, int64_t rows,
                        int64_t columns, const Fp8Tensor& rows_to, ScaleRule rule, float overflow,
                        cudaStream_t stream) {
  launch_source<F, ColumnKind::none>(op, source, plan, rows, columns, rows_to, {}, rule, overflow,
                                     stream);
}

// The same to columns, and to rows where these are given.
template <typename F, typename Source>
void quantize_columns_from(const char* op, const Source& source, const RoutingPlan& plan,
                           int64_t rows, int64_t columns, const Fp8Tensor& rows_to,
                           const Fp8Tensor& columns_to, ScaleRule rule, float overflow,
                           cudaStream_t stream) {
  const auto go = [&]<ColumnKind kKind>() {
    launch_source<F, kKind>(op, source, plan, rows, columns, rows_to, columns_to, rule, overflow,
                            stream);
  };
  kind_of(columns_to) == ColumnKind::block ? go.template operator()<ColumnKind::block>()
                                           : go.template operator()<ColumnKind::column>();
}

}  // namespace fp8moe::cuda
