// What the C++ tests share: CHECK, exactly sized heap tensors (so that a sanitizer sees an overrun
// by one byte), plans, and FP8 arithmetic in double written apart from the library's.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "fp8moe/ops.h"

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                               \
    }                                                                             \
  } while (false)

// The statement must throw InvalidArgument whose message holds `text`.
#define CHECK_INVALID(text, ...)                                                             \
  do {                                                                                       \
    std::string message = "(no exception)";                                                  \
    try {                                                                                    \
      __VA_ARGS__;                                                                           \
    } catch (const fp8moe::InvalidArgument& e) {                                             \
      message = e.what();                                                                    \
    }                                                                                        \
    if (message.find(text) == std::string::npos) {                                           \
      std::fprintf(stderr, "%s:%d: expected \"%s\", got \"%s\"\n", __FILE__, __LINE__, text, \
                   message.c_str());                                                         \
      std::exit(1);                                                                          \
    }                                                                                        \
  } while (false)

namespace fp8moe::test {

// ---- FP8, bf16 and f16 in double ----------------------------------------------------------------

inline double decode(DType format, uint8_t code) {
  const int mantissa_bits = format == DType::e4m3 ? 3 : 2;
  const int bias = format == DType::e4m3 ? 7 : 15;
  const int exponent = (code & 0x7F) >> mantissa_bits;
  const double fraction = std::ldexp(code & ((1 << mantissa_bits) - 1), -mantissa_bits);
  const double sign = code & 0x80 ? -1.0 : 1.0;
  if (format == DType::e4m3 && (code & 0x7F) == 0x7F) return NAN;
  if (format == DType::e5m2 && exponent == 31) return fraction == 0.0 ? sign * INFINITY : NAN;
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias)
                               : std::ldexp(1.0 + fraction, exponent - bias));
}

// No code is nearer to x than `code`.
inline bool is_nearest(DType format, uint8_t code, double x) {
  double best = INFINITY;
  for (int c = 0; c < 256; ++c) {
    const double value = decode(format, static_cast<uint8_t>(c));
    if (std::isfinite(value)) best = std::min(best, std::fabs(value - x));
  }
  return std::fabs(decode(format, code) - x) <= best;
}

inline double half_to_double(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const double fraction = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

// ---- memory -------------------------------------------------------------------------------------

// A tensor that owns exactly numel * size_of(dtype) bytes, filled with 0xA5.
struct Owned {
  Tensor view;
  std::unique_ptr<uint8_t, decltype(&std::free)> bytes{nullptr, &std::free};

  Owned() = default;
  Owned(DType dtype, std::initializer_list<int64_t> shape) : view(nullptr, dtype, shape) {
    bytes.reset(static_cast<uint8_t*>(std::malloc(size())));
    std::memset(bytes.get(), 0xA5, size());
    view.data = bytes.get();
  }
  operator Tensor() const { return view; }
  size_t size() const { return static_cast<size_t>(view.numel() * size_of(view.dtype)); }
  template <typename T>
  T* as() const {
    return view.as<T>();
  }
  double at(int64_t i) const {
    switch (view.dtype) {
      case DType::f32: return as<float>()[i];
      case DType::f16: return half_to_double(as<uint16_t>()[i]);
      case DType::bf16: {
        const uint32_t bits = static_cast<uint32_t>(as<uint16_t>()[i]) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
      }
      case DType::i32: return as<int32_t>()[i];
      case DType::i64: return static_cast<double>(as<int64_t>()[i]);
      case DType::e4m3:
      case DType::e5m2: return decode(view.dtype, as<uint8_t>()[i]);
      default: return as<uint8_t>()[i];
    }
  }
  std::vector<uint8_t> copy() const { return {bytes.get(), bytes.get() + size()}; }
  bool same(const Owned& other) const {
    return size() == other.size() && std::memcmp(bytes.get(), other.bytes.get(), size()) == 0;
  }
};

struct OwnedFp8 {
  Owned data;
  Owned scale;
  ScaleLayout layout = ScaleLayout::row;

  OwnedFp8() = default;
  OwnedFp8(DType format, int64_t m, int64_t k, ScaleLayout layout)
      : data(format, {m, k}), layout(layout) {
    if (layout == ScaleLayout::row) scale = Owned(DType::f32, {m, cdiv(k, kTile)});
    if (layout == ScaleLayout::gemm) scale = Owned(DType::f32, {cdiv(k, kTile), pad4(m)});
    if (layout == ScaleLayout::block) scale = Owned(DType::f32, {cdiv(m, kTile), cdiv(k, kTile)});
  }
  OwnedFp8(DType format, int64_t e, int64_t m, int64_t k)
      : data(format, {e, m, k}),
        scale(DType::f32, {e, cdiv(m, kTile), cdiv(k, kTile)}),
        layout(ScaleLayout::block) {}

  operator Fp8Tensor() const { return {data, scale, layout}; }
  int64_t rows() const { return data.view.shape[data.view.ndim - 2]; }
  int64_t depth() const { return data.view.shape[data.view.ndim - 1]; }
  int64_t scale_index(int64_t i, int64_t j, int64_t e = 0) const {
    const int64_t blocks = cdiv(depth(), kTile);
    if (layout == ScaleLayout::row) return i * blocks + j / kTile;
    if (layout == ScaleLayout::gemm) return j / kTile * pad4(rows()) + i;
    return (e * cdiv(rows(), kTile) + i / kTile) * blocks + j / kTile;
  }
  double scale_at(int64_t i, int64_t j, int64_t e = 0) const {
    return scale.at(scale_index(i, j, e));
  }
  uint8_t code(int64_t i, int64_t j, int64_t e = 0) const {
    return data.as<uint8_t>()[(e * rows() + i) * depth() + j];
  }
  double at(int64_t i, int64_t j, int64_t e = 0) const {
    return decode(data.view.dtype, code(i, j, e)) * scale_at(i, j, e);
  }
};

// ---- random content -----------------------------------------------------------------------------

using Random = std::mt19937;

inline void fill_normal(const Owned& t, Random& random) {
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < t.view.numel(); ++i) {
    const float value = normal(random);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (t.view.dtype == DType::f32) t.as<float>()[i] = value;
    if (t.view.dtype == DType::bf16) t.as<uint16_t>()[i] = static_cast<uint16_t>(bits >> 16);
    // Any finite f16 will do: sign, exponent 8..15, mantissa.
    if (t.view.dtype == DType::f16)
      t.as<uint16_t>()[i] = static_cast<uint16_t>((bits >> 16 & 0x8000) | 0x2000 | (bits & 0x1FFF));
  }
}

// Finite codes, and scales 2^-6 .. 2^5.
inline void fill_random(const OwnedFp8& q, Random& random) {
  for (int64_t i = 0; i < q.data.view.numel(); ++i) {
    uint8_t& code = q.data.as<uint8_t>()[i];
    do code = static_cast<uint8_t>(random());
    while (!std::isfinite(decode(q.data.view.dtype, code)));
  }
  for (int64_t i = 0; i < q.scale.view.numel(); ++i)
    q.scale.as<float>()[i] = std::ldexp(1.0f, static_cast<int>(random() % 12) - 6);
}

// ---- plans --------------------------------------------------------------------------------------

struct OwnedPlan {
  RoutingPlan plan;
  Owned buffer;
  operator const RoutingPlan&() const { return plan; }
  const RoutingPlan* operator->() const { return &plan; }
};

inline OwnedPlan empty_plan(int64_t tokens, int64_t slots, int64_t experts, int64_t align,
                            int64_t capacity) {
  OwnedPlan p;
  p.plan.tokens = tokens;
  p.plan.slots = slots;
  p.plan.experts = experts;
  p.plan.align = align;
  p.plan.capacity = capacity;
  p.buffer = Owned(DType::i32, {p.plan.buffer_size()});
  p.plan.buffer = p.buffer;
  return p;
}

inline Owned int32s(std::initializer_list<int64_t> shape, const std::vector<int>& values) {
  Owned t(DType::i32, shape);
  CHECK(t.view.numel() == static_cast<int64_t>(values.size()));
  for (size_t i = 0; i < values.size(); ++i) t.as<int32_t>()[i] = values[i];
  return t;
}

inline void run_route(const OwnedPlan& p, const Tensor& topk_idx, const Tensor& routing_map) {
  Route r{.topk_idx = topk_idx, .routing_map = routing_map, .plan = p};
  Owned workspace(DType::u8, {workspace_bytes(r)});
  std::memset(workspace.as<uint8_t>(), 0, workspace.size());
  r.workspace = workspace;
  route(r);
  for (size_t i = 0; i < workspace.size(); ++i) CHECK(workspace.as<uint8_t>()[i] == 0);
}

inline Owned zero_workspace() {
  Owned workspace(DType::u8, {kZeroWorkspaceBytes});
  std::memset(workspace.as<uint8_t>(), 0, workspace.size());
  return workspace;
}

// Runs an operator that takes a zero workspace; it is zero afterwards, too.
template <class P>
void run_with_workspace(void (*op)(const P&, Stream), P p) {
  const Owned workspace = zero_workspace();
  p.workspace = workspace;
  op(p, {});
  CHECK(workspace.same(zero_workspace()));
}

// A call that runs on the CPU without a workspace is refused on CUDA, before a device is asked for,
// unless it has one of the right kind.
template <class P>
void check_needs_workspace(void (*op)(const P&, Stream), P p) {
  CHECK(workspace_bytes(p) == 0);
  op(p, {});
  const auto move = [](Tensor& t) { t.device = {DeviceType::cuda, 0}; };
  for_each_field<P>([&]<class T>(const Field<P, T>& field) {
    T& member = p.*field.at;
    if constexpr (std::is_same_v<T, Tensor>) move(member);
    if constexpr (std::is_same_v<T, Fp8Tensor>) move(member.data), move(member.scale_inv);
    if constexpr (std::is_same_v<T, RoutingPlan>) move(member.buffer);
  });
  CHECK(workspace_bytes(p) == kZeroWorkspaceBytes);
  CHECK_INVALID("workspace must be given on cuda:0, 576 bytes of uint8; got none", op(p, {}));
  const Owned bytes(DType::u8, {kZeroWorkspaceBytes + 1}), words(DType::i32, {144});
  const auto refused = [&](const char* text, const Tensor& workspace, Device device) {
    p.workspace = workspace;
    p.workspace.device = device;
    CHECK_INVALID(text, op(p, {}));
  };
  const Device cuda = {DeviceType::cuda, 0};
  const auto view = [&](int64_t from, int64_t size) {
    return Tensor(bytes.as<uint8_t>() + from, DType::u8, {size});
  };
  refused("workspace must have at least 576 bytes; got 575", view(0, 575), cuda);
  refused("workspace must start at a multiple of 16 bytes", view(1, 576), cuda);
  refused("workspace must be on cuda:0; got cpu", view(0, 576), {});
  refused("workspace must be one of uint8; got int32", words, cuda);
}

inline OwnedPlan routed(int64_t tokens, int64_t slots, int64_t experts, int64_t align,
                        const std::vector<int>& topk, int64_t capacity = -1) {
  OwnedPlan p = empty_plan(tokens, slots, experts, align, capacity < 0 ? tokens * slots : capacity);
  run_route(p, int32s({tokens, slots}, topk), {});
  return p;
}

inline OwnedPlan from_counts(const std::vector<int>& counts, int64_t capacity, int64_t align) {
  const int64_t experts = static_cast<int64_t>(counts.size());
  OwnedPlan p = empty_plan(capacity, 1, experts, align, capacity);
  plan_from_counts({.tokens_per_expert = int32s({experts}, counts), .plan = p});
  return p;
}

// Ids in [-1, experts), expert `experts - 1` never named: it stays empty.
inline std::vector<int> random_topk(int64_t assignments, int64_t experts, Random& random) {
  std::vector<int> topk(assignments);
  for (int& id : topk) id = static_cast<int>(random() % experts) - 1;
  return topk;
}

}  // namespace fp8moe::test
