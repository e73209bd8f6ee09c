#include "call.h"

#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

namespace fp8moe {
namespace {

namespace nb = nanobind;
using Code = nb::dlpack::dtype_code;

thread_local int64_t thread_stream = 0;

// DLPack device types: CPU memory (pinned or not) and CUDA memory (managed or not).
constexpr int32_t kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13;

template <typename... Parts>
[[noreturn]] void fail(const char* op, const char* name, const char* part, const Parts&... parts) {
  std::ostringstream text;
  text << "[" << op << "] " << name << part << " ";
  (text << ... << parts);
  throw InvalidArgument(text.str());
}

std::string brackets(const int64_t* values, int32_t count) {
  std::string text = "[";
  for (int32_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

std::string name_of(nb::dlpack::dtype dtype) {
  static constexpr const char* kNames[] = {"int",    "uint",    "float", "opaque",
                                           "bfloat", "complex", "bool"};
  const std::string stem = dtype.code < std::size(kNames)
                               ? kNames[dtype.code]
                               : "code" + std::to_string(dtype.code) + "_";
  return stem + std::to_string(dtype.bits) +
         (dtype.lanes > 1 ? "x" + std::to_string(dtype.lanes) : "");
}

std::optional<DType> known(nb::dlpack::dtype dtype) {
  if (dtype.lanes != 1) return std::nullopt;
  switch (dtype.bits | dtype.code << 8) {
    case 32 | static_cast<int>(Code::Float) << 8: return DType::f32;
    case 16 | static_cast<int>(Code::Float) << 8: return DType::f16;
    case 16 | static_cast<int>(Code::Bfloat) << 8: return DType::bf16;
    case 8 | static_cast<int>(Code::Float8_E4M3FN) << 8: return DType::e4m3;
    case 8 | static_cast<int>(Code::Float8_E5M2) << 8: return DType::e5m2;
    case 32 | static_cast<int>(Code::Int) << 8: return DType::i32;
    case 64 | static_cast<int>(Code::Int) << 8: return DType::i64;
    case 8 | static_cast<int>(Code::UInt) << 8: return DType::u8;
    case 8 | static_cast<int>(Code::Bool) << 8: return DType::boolean;
    default: return std::nullopt;
  }
}

bool contiguous(const nb::dlpack::dltensor& view) {
  if (!view.strides) return true;
  int64_t expected = 1;
  bool dense = true;
  for (int32_t i = view.ndim - 1; i >= 0; --i) {
    if (view.shape[i] == 0) return true;
    if (view.shape[i] != 1) dense = dense && view.strides[i] == expected;
    expected *= view.shape[i];
  }
  return dense;
}

// Elements between the rows of a 2-D view whose rows are dense and do not overlap; 0: not one.
int64_t row_stride(const nb::dlpack::dltensor& view) {
  if (view.ndim != 2 || (view.shape[1] > 1 && view.strides[1] != 1)) return 0;
  return view.strides[0] >= view.shape[1] ? view.strides[0] : 0;
}

}  // namespace

template <bool kWritable>
Tensor Call::tensor(const ArrayArg<kWritable>& arg, const char* name, const char* part,
                    bool strided_rows) {
  if (!arg.given) return {};
  if (arg.problem == Problem::no_memory)
    fail(op_, name, part,
         "must be a dense tensor with memory; got a meta, sparse or wrapped tensor");
  if (arg.problem == Problem::read_only)
    fail(op_, name, part, "is written, so it must be writable; got a read-only array");
  const auto& view = arg.view;
  const auto dtype = known(view.dtype);
  if (!dtype)
    fail(op_, name, part,
         "must be float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int32, int64, uint8 or "
         "bool; "
         "got ",
         name_of(view.dtype));
  if (arg.format && *dtype != DType::u8)
    fail(op_, name, part, "with its format named must hold uint8 codes; got ", name_of(view.dtype));
  if (view.ndim > Tensor::kMaxDims)
    fail(op_, name, part, "must have at most ", Tensor::kMaxDims, " dimensions; got ",
         brackets(view.shape, view.ndim));
  Tensor t;
  if (!contiguous(view)) {
    t.row_stride = strided_rows ? row_stride(view) : 0;
    if (t.row_stride == 0)
      fail(op_, name, part, "must be contiguous; got shape ", brackets(view.shape, view.ndim),
           " with strides ", brackets(view.strides, view.ndim));
  }
  t.dtype = arg.format.value_or(*dtype);
  t.ndim = view.ndim;
  for (int32_t i = 0; i < view.ndim; ++i) t.shape[i] = view.shape[i];
  const int32_t type = view.device.device_type;
  if (type == kCuda || type == kCudaManaged) {
    t.device = {DeviceType::cuda, view.device.device_id};
    if (!api_ && arg.api) {
      api_ = arg.api;
      device_ = view.device.device_id;
    }
  } else if (type != kCpu && type != kCudaHost) {
    fail(op_, name, part, "must be on the CPU or a CUDA device; got DLPack device type ", type);
  }
  if (view.data) {
    t.data = static_cast<char*>(view.data) + view.byte_offset;
  } else if (t.numel() > 0) {
    fail(op_, name, part, "must have memory behind it; got a fake or meta tensor of shape ",
         brackets(view.shape, view.ndim));
  }
  return t;
}

template <bool kWritable>
Fp8Tensor Call::fp8(const ArrayArg<kWritable>& data, const ArrayArg<kWritable>& scale,
                    const char* layout, const char* name, bool strided_rows) {
  const std::string_view text = layout;
  Fp8Tensor q{.data = tensor(data, name, "", strided_rows),
              .scale_inv = tensor(scale, name, ".scale_inv", strided_rows && text == "row")};
  if (!q.defined()) return q;
  if (text == "row") {
    q.layout = ScaleLayout::row;
  } else if (text == "gemm") {
    q.layout = ScaleLayout::gemm;
  } else if (text == "block") {
    q.layout = ScaleLayout::block;
  } else {
    fail(op_, name, ".scale_layout", "must be 'row', 'gemm' or 'block'; got '", text, "'");
  }
  return q;
}

DType Call::format(const char* fp8_dtype) const {
  const std::string_view text = fp8_dtype;
  if (text != "e4m3" && text != "e5m2")
    fail(op_, "fp8_dtype", "", "must be 'e4m3' or 'e5m2'; got '", text, "'");
  return text == "e4m3" ? DType::e4m3 : DType::e5m2;
}

template <bool kWritable>
RoutingPlan Call::plan(const ArrayArg<kWritable>& buffer, PlanSizes sizes) {
  RoutingPlan plan;
  if (!buffer.given) return plan;
  plan.buffer = tensor(buffer, "plan");
  plan.tokens = sizes.tokens;
  plan.slots = sizes.slots;
  plan.experts = sizes.experts;
  plan.align = sizes.align;
  plan.capacity = sizes.capacity;
  return plan;
}

Stream Call::stream() const {
  if (!api_) return {reinterpret_cast<void*>(static_cast<intptr_t>(thread_stream))};
  Stream stream;
  if (api_->current_stream(kCuda, device_, &stream.handle) != 0) nb::raise_python_error();
  return stream;
}

int64_t set_stream(int64_t handle) { return std::exchange(thread_stream, handle); }

const ExchangeApi* exchange_api(PyTypeObject* type) {
  // The few types of one program (Tensor, Parameter): each is looked up once. Guarded by the GIL.
  struct Entry {
    PyTypeObject* type = nullptr;
    const ExchangeApi* api = nullptr;
  };
  static Entry cache[4];
  static unsigned next = 0;
  for (const Entry& entry : cache)
    if (entry.type == type) return entry.api;

  const ExchangeApi* api = nullptr;
  PyObject* object = reinterpret_cast<PyObject*>(type);
  if (PyObject* capsule = PyObject_GetAttrString(object, "__dlpack_c_exchange_api__")) {
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
      auto* header =
          static_cast<const ExchangeHeader*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
      while (header && header->major != 1) header = header->previous;
      api = reinterpret_cast<const ExchangeApi*>(header);
      if (api && !api->view) api = nullptr;  // the standard lets a producer leave it out
    }
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  Entry& entry = cache[next++ % std::size(cache)];
  Py_INCREF(object);  // a freed type's address must not be mistaken for another's
  Py_XDECREF(reinterpret_cast<PyObject*>(entry.type));
  entry = {type, api};
  return api;
}

template Tensor Call::tensor(const TensorArg&, const char*, const char*, bool);
template Tensor Call::tensor(const OutArg&, const char*, const char*, bool);
template Fp8Tensor Call::fp8(const TensorArg&, const TensorArg&, const char*, const char*, bool);
template Fp8Tensor Call::fp8(const OutArg&, const OutArg&, const char*, const char*, bool);
template RoutingPlan Call::plan(const TensorArg&, PlanSizes);
template RoutingPlan Call::plan(const OutArg&, PlanSizes);

}  // namespace fp8moe
