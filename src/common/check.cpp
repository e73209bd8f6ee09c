#include "common/check.h"

#include <cmath>

namespace fp8moe {

namespace {
constexpr int64_t kMaxSize = (int64_t{1} << 31) - 256;  // kernels count rows in 32 bits
}  // namespace

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return "float32";
    case DType::f16: return "float16";
    case DType::bf16: return "bfloat16";
    case DType::e4m3: return "float8_e4m3fn";
    case DType::e5m2: return "float8_e5m2";
    case DType::i32: return "int32";
    case DType::i64: return "int64";
    case DType::u8: return "uint8";
    case DType::boolean: return "bool";
  }
  return "unknown";
}

const char* name_of(ScaleLayout layout) {
  switch (layout) {
    case ScaleLayout::row: return "row";
    case ScaleLayout::gemm: return "gemm";
    case ScaleLayout::block: return "block";
  }
  return "unknown";
}

std::string name_of(Device device) {
  return device.type == DeviceType::cpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

namespace {

template <typename Range>
std::string brackets(const Range& sizes) {
  std::string text = "[";
  for (int64_t n : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  return text + "]";
}

// The bytes of an argument's codes and scales; empty where there are none.
struct Extent {
  explicit Extent(const Tensor* t) {
    if (t == nullptr || !t->defined() || t->numel() == 0) return;
    const int64_t gaps = t->row_stride != 0 ? (t->shape[0] - 1) * (t->row_stride - t->shape[1]) : 0;
    begin = t->as<char>();
    end = begin + (t->numel() + gaps) * size_of(t->dtype);
  }
  bool overlaps(const Extent& other) const { return begin < other.end && other.begin < end; }

  const char* begin = nullptr;
  const char* end = nullptr;
};

struct Extents {
  explicit Extents(const Memory& memory)
      : parts{Extent(memory.parts[0]), Extent(memory.parts[1])}, name(memory.name) {}
  bool overlap(const Extents& other) const {
    for (const Extent& a : parts)
      for (const Extent& b : other.parts)
        if (a.overlaps(b)) return true;
    return false;
  }

  Extent parts[2];
  const char* name;
};

std::string sizes_of(const RoutingPlan& plan) {
  std::ostringstream text;
  text << "; plan has " << plan.tokens << " tokens of " << plan.slots << " slots, " << plan.experts
       << " experts, " << plan.rows() << " rows";
  return text.str();
}

}  // namespace

std::string shape_of(const Tensor& t) {
  return brackets(std::vector<int64_t>(t.shape.begin(), t.shape.begin() + std::max(t.ndim, 0)));
}

void Checker::ndim(const Tensor& t, const char* name, int ndim) const {
  FP8MOE_CHECK(t.defined(), "[", op_, "] ", name, " is required; got none");
  FP8MOE_CHECK(t.ndim == ndim, "[", op_, "] ", name, " must have ", ndim, " dimensions; got ",
               shape_of(t));
}

void Checker::tensor(const Tensor& t, const char* name, std::initializer_list<int64_t> shape,
                     const char* part) const {
  FP8MOE_CHECK(t.defined(), "[", op_, "] ", name, part, " is required; got none");
  FP8MOE_CHECK(t.device == device_, "[", op_, "] ", name, part, " must be on ", name_of(device_),
               "; got ", name_of(t.device));
  FP8MOE_CHECK(t.ndim == static_cast<int>(shape.size()) &&
                   std::equal(shape.begin(), shape.end(), t.shape.begin()),
               "[", op_, "] ", name, part, " must be ", brackets(shape), "; got ", shape_of(t),
               plan_ ? sizes_of(*plan_) : "");
  FP8MOE_CHECK(t.row_stride == 0 || (t.ndim == 2 && t.row_stride == t.shape[1]), "[", op_, "] ",
               name, part, " must be contiguous; got shape ", shape_of(t), " with rows ",
               t.row_stride, " elements apart");
  FP8MOE_CHECK(t.data != nullptr || t.numel() == 0, "[", op_, "] ", name, part,
               " has no memory behind it (a meta or fake tensor); got a null pointer");
}

void Checker::tensor(const Tensor& t, const char* name, std::initializer_list<int64_t> shape,
                     std::initializer_list<DType> dtypes) const {
  tensor(t, name, shape, "");
  dtype(t, name, dtypes);
}

void Checker::dtype(const Tensor& t, const char* name, std::initializer_list<DType> allowed,
                    const char* part) const {
  for (DType d : allowed)
    if (t.dtype == d) return;
  std::string names;
  for (DType d : allowed) names += (names.empty() ? "" : ", ") + std::string(name_of(d));
  fail("[", op_, "] ", name, part, " must be one of ", names, "; got ", name_of(t.dtype));
}

void Checker::e4m3(const Fp8Tensor& t, const char* name) const {
  FP8MOE_CHECK(t.data.dtype == DType::e4m3, "[", op_, "] ", name,
               " must be float8_e4m3fn, as every weight and activation; got ",
               name_of(t.data.dtype));
}

void Checker::multiple(int64_t value, const char* name, int64_t of, const char* part) const {
  FP8MOE_CHECK(value % of == 0, "[", op_, "] ", name, part, " must be a multiple of ", of, "; got ",
               value);
}

void Checker::strided_fp8(const Fp8Tensor& t, const char* name,
                          std::initializer_list<int64_t> shape,
                          std::initializer_list<ScaleLayout> layouts) const {
  Fp8Tensor rows = t;  // what fp8() checks but for the strides
  rows.data.row_stride = 0;
  if (t.layout == ScaleLayout::row) rows.scale_inv.row_stride = 0;
  fp8(rows, name, shape, layouts);
  constexpr int64_t kMaxStride = 0x7FFFFFFF;
  for (const Tensor* part : {&t.data, &t.scale_inv}) {
    const bool data = part == &t.data;
    const int64_t stride = part->stride();
    FP8MOE_CHECK(stride >= part->shape[1] && stride <= kMaxStride && (!data || stride % 16 == 0),
                 "[", op_, "] ", name, data ? "" : ".scale_inv", " must have rows ", part->shape[1],
                 " to 2^31 - 1 elements apart", data ? ", a multiple of 16" : "", "; got ", stride);
  }
}

void Checker::workspace(const Tensor& t, int64_t bytes) const {
  if (bytes == 0) return;
  FP8MOE_CHECK(t.defined(), "[", op_, "] workspace must be given on ", name_of(device_), ", ",
               bytes, " bytes of uint8; got none");
  ndim(t, "workspace", 1);
  tensor(t, "workspace", {t.shape[0]}, {DType::u8});
  aligned(t, "workspace");
  FP8MOE_CHECK(t.shape[0] >= bytes, "[", op_, "] workspace must have at least ", bytes,
               " bytes; got ", t.shape[0]);
}

void Checker::layout_of(const Fp8Tensor& t, const char* name,
                        std::initializer_list<ScaleLayout> layouts) const {
  if (std::find(layouts.begin(), layouts.end(), t.layout) != layouts.end()) return;
  std::string names;
  for (ScaleLayout l : layouts) names += (names.empty() ? "" : ", ") + std::string(name_of(l));
  const char* how = names == "gemm" && t.layout == ScaleLayout::row
                        ? ": quantize and permute_pad write it with scale_layout=\"gemm\""
                        : "";
  fail("[", op_, "] ", name, " must have scale layout ", names, "; got ", name_of(t.layout), how);
}

void Checker::fp8(const Fp8Tensor& t, const char* name, std::initializer_list<int64_t> shape,
                  std::initializer_list<ScaleLayout> layouts) const {
  constexpr const char* kScale = ".scale_inv";
  tensor(t.data, name, shape);
  dtype(t.data, name, {DType::e4m3, DType::e5m2});
  layout_of(t, name, layouts);
  sizes(name, shape);
  const int64_t m = *(shape.end() - 2);
  const int64_t k = *(shape.end() - 1);
  if (t.layout == ScaleLayout::row) {
    tensor(t.scale_inv, name, {m, cdiv(k, kTile)}, kScale);
  } else if (t.layout == ScaleLayout::gemm) {
    tensor(t.scale_inv, name, {cdiv(k, kTile), pad4(m)}, kScale);
  } else if (shape.size() == 3) {
    tensor(t.scale_inv, name, {*shape.begin(), cdiv(m, kTile), cdiv(k, kTile)}, kScale);
  } else {
    tensor(t.scale_inv, name, {cdiv(m, kTile), cdiv(k, kTile)}, kScale);
  }
  dtype(t.scale_inv, name, {DType::f32}, kScale);
  aligned(t.data, name);
  if (t.layout == ScaleLayout::gemm) aligned(t.scale_inv, name, kScale);
}

void Checker::sizes(const char* name, std::initializer_list<int64_t> given) const {
  for (const int64_t size : given)
    FP8MOE_CHECK(size <= kMaxSize, "[", op_, "] ", name, " must have no size over 2^31 - 256; got ",
                 size);
}

void Checker::plan_sizes(const RoutingPlan& plan) const {
  FP8MOE_CHECK(plan.align == 1 || plan.align == 16 || plan.align == 32 || plan.align == 128, "[",
               op_, "] plan.align must be 1, 16, 32 or 128; got ", plan.align);
  FP8MOE_CHECK(plan.tokens >= 0 && plan.slots >= 1 && plan.experts >= 1 && plan.capacity >= 0, "[",
               op_, "] plan needs tokens >= 0, slots >= 1, experts >= 1, capacity >= 0; got ",
               plan.tokens, ", ", plan.slots, ", ", plan.experts, ", ", plan.capacity);
  FP8MOE_CHECK(plan.experts <= plan.kMaxExperts, "[", op_, "] plan must have at most ",
               plan.kMaxExperts, " experts; got ", plan.experts);
  // One by one first: their products and sums must not overflow.
  sizes("plan", {plan.tokens, plan.slots, plan.experts, plan.capacity});
  FP8MOE_CHECK(plan.columns() <= kMaxSize && plan.tokens * plan.slots <= kMaxSize, "[", op_,
               "] plan must have at most 2^31 - 256 rows; got ", plan.columns(), " and ",
               plan.tokens * plan.slots, " assignments");
}

void Checker::plan(const RoutingPlan& plan) const {
  plan_sizes(plan);
  tensor(plan.buffer, "plan", {plan.buffer_size()}, {DType::i32});
  aligned(plan.buffer, "plan");
  plan_ = &plan;
}

void Checker::columns(const Fp8Tensor& t, const char* name, int64_t c,
                      const RoutingPlan& plan) const {
  fp8(t, name, {c, plan.columns()}, {ScaleLayout::block, ScaleLayout::gemm});
}

void Checker::output(Tensor& t, const char* name, std::initializer_list<int64_t> shape,
                     std::initializer_list<DType> dtypes, bool aligned) const {
  if (t.is_wanted()) {
    const DType dtype = dtypes.size() == 1 ? *dtypes.begin() : t.dtype;
    t = Tensor(nullptr, dtype, shape, device_);
    this->dtype(t, name, dtypes);
    return;
  }
  tensor(t, name, shape, dtypes);
  if (aligned) this->aligned(t, name);
}

void Checker::output(Fp8Tensor& t, const char* name, std::initializer_list<int64_t> shape,
                     std::initializer_list<ScaleLayout> layouts,
                     std::initializer_list<DType> formats) const {
  if (!t.is_wanted()) {
    fp8(t, name, shape, layouts);
    if (formats.size() == 1 && *formats.begin() == DType::e4m3) return e4m3(t, name);
    return dtype(t.data, name, formats);
  }
  layout_of(t, name, layouts);
  output(t.data, name, shape, formats);
  const int64_t m = *(shape.end() - 2);
  const int64_t k = cdiv(*(shape.end() - 1), kTile);
  const auto scale = [&](std::initializer_list<int64_t> sizes) {
    t.scale_inv = Tensor(nullptr, DType::f32, sizes, device_);
  };
  if (t.layout == ScaleLayout::row)
    scale({m, k});
  else if (t.layout == ScaleLayout::gemm)
    scale({k, pad4(m)});
  else if (shape.size() == 3)
    scale({*shape.begin(), cdiv(m, kTile), k});
  else
    scale({cdiv(m, kTile), k});
}

void Checker::output_columns(Fp8Tensor& t, const char* name, int64_t c, const RoutingPlan& plan,
                             DType format) const {
  if (!t.is_wanted()) {
    columns(t, name, c, plan);
    return dtype(t.data, name, {format});
  }
  output(t, name, {c, plan.columns()}, {ScaleLayout::block, ScaleLayout::gemm}, {format});
}

void Checker::output(RoutingPlan& plan) const {
  if (!plan.buffer.is_wanted()) return this->plan(plan);
  plan_sizes(plan);
  plan.buffer = Tensor(nullptr, DType::i32, {plan.buffer_size()}, device_);
}

void Checker::aligned(const Tensor& t, const char* name, const char* part) const {
  const auto address = reinterpret_cast<uintptr_t>(t.data);
  FP8MOE_CHECK(address % 16 == 0, "[", op_, "] ", name, part,
               " must start at a multiple of 16 bytes; got ", address % 16, " bytes past one");
}

int64_t Checker::values(const Tensor& t, const char* name, int64_t rows, int64_t factor) const {
  ndim(t, name, 2);
  const int64_t c = t.shape[1];
  tensor(t, name, {rows, c}, {DType::f32, DType::f16, DType::bf16});
  multiple(c, name, factor, ".shape[1]");
  aligned(t, name);
  return c;
}

void Checker::rule(ScaleRule rule) const {
  const auto kind = static_cast<int>(rule.kind);
  FP8MOE_CHECK(kind >= 0 && kind <= static_cast<int>(ScaleKind::approx), "[", op_,
               "] scale must be 0 (fp32), 1 (pow2), 2 (amax) or 3 (approx); got ", kind);
  FP8MOE_CHECK(rule.eps >= 0.0f && std::isfinite(rule.eps), "[", op_,
               "] eps must be finite and not negative; got ", rule.eps);
}

void Checker::disjoint(std::initializer_list<Memory> outputs,
                       std::initializer_list<Memory> inputs) const {
  std::vector<Extents> all;  // outputs, then inputs
  all.reserve(outputs.size() + inputs.size());
  for (const Memory& memory : outputs) all.emplace_back(memory);
  for (const Memory& memory : inputs) all.emplace_back(memory);
  for (size_t i = 0; i < outputs.size(); ++i) {
    FP8MOE_CHECK(!all[i].parts[0].overlaps(all[i].parts[1]), "[", op_, "] ", all[i].name,
                 " must not share memory with its scales; got ranges that overlap");
    for (size_t j = i + 1; j < all.size(); ++j)
      FP8MOE_CHECK(!all[i].overlap(all[j]), "[", op_, "] ", all[i].name, " and ", all[j].name,
                   " must not share memory; got ranges that overlap");
  }
}

void check_first(const char* op, const Tensor& first, int64_t ranks) {
  const Checker host(op, Device{DeviceType::cpu, 0});
  host.tensor(first, "first", {ranks}, {DType::i32});
  FP8MOE_CHECK(ranks <= kMostPeers, "[", op, "] peers are at most ", kMostPeers, " ranks; got ",
               ranks);
}

}  // namespace fp8moe
