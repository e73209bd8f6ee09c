// SPDX-License-Identifier: Apache-2.0
// What crosses the API: dense row-major views over memory the caller owns. Nothing here allocates.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

namespace fp8moe {

enum class DType : int32_t { f32, f16, bf16, e4m3, e5m2, i32, i64, u8, boolean };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f16:
    case DType::bf16: return 2;
    default: return 1;
  }
}

enum class DeviceType : int32_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int32_t index = 0;
  bool operator==(const Device&) const = default;
};

// A dense row-major view, or, for the inputs that allow it (ops.h says which), a 2-D view whose
// rows lie `row_stride` elements apart. A default-constructed Tensor stands for "not given".
struct Tensor {
  static constexpr int kMaxDims = 4;

  void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  int32_t ndim = -1;
  std::array<int64_t, kMaxDims> shape{};
  int64_t row_stride = 0;  // 0: dense

  Tensor() = default;
  Tensor(void* data, DType dtype, std::initializer_list<int64_t> sizes, Device device = {})
      : data(data), dtype(dtype), device(device), ndim(static_cast<int32_t>(sizes.size())) {
    int i = 0;
    for (int64_t n : sizes)
      if (i < kMaxDims) shape[i++] = n;
  }

  // An output that outputs(p) is to give a shape and, of those it may have, a dtype.
  static Tensor wanted(DType dtype = DType::f32) {
    Tensor t;
    t.dtype = dtype;
    t.ndim = kWanted;
    return t;
  }

  bool defined() const { return ndim >= 0; }
  bool is_wanted() const { return ndim == kWanted; }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }
  // Elements from a row of a 2-D view to the next.
  int64_t stride() const { return row_stride != 0 ? row_stride : shape[1]; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }

 private:
  static constexpr int32_t kWanted = -2;
};

// Where the scales of an FP8 tensor [M, K] (or [E, M, K]) live; pictures:
// docs/reference/layouts.md.
enum class ScaleLayout : int32_t {
  row,    // 1x128 tiles:   [M, cdiv(K,128)]          rows that travel
  gemm,   // 1x128 tiles:   [cdiv(K,128), pad4(M)]    M contiguous: what the GEMM's TMA reads
  block,  // 128x128 tiles: [(E,) cdiv(M,128), cdiv(K,128)]
};

// value = decode(data) * scale_inv. `data` is e4m3 or e5m2, `scale_inv` f32 in `layout`.
struct Fp8Tensor {
  Tensor data{};
  Tensor scale_inv{};
  ScaleLayout layout = ScaleLayout::row;

  // An output that outputs(p) is to give its shapes.
  static Fp8Tensor wanted(ScaleLayout layout, DType format = DType::e4m3) {
    return {Tensor::wanted(format), {}, layout};
  }

  bool defined() const { return data.defined(); }
  bool is_wanted() const { return data.is_wanted(); }
};

// A CUDA stream (cudaStream_t) of the tensors' device; ignored by the CPU backend.
struct Stream {
  void* handle = nullptr;
};

constexpr int64_t kTile = 128;  // the quantization tile along the contracted dimension
constexpr int64_t cdiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return cdiv(a, b) * b; }
constexpr int64_t pad4(int64_t a) { return round_up(a, 4); }

}  // namespace fp8moe
