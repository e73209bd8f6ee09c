#include "reader.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <sstream>
#include <string_view>

namespace fp8moe {
namespace nb = nanobind;

namespace {

using Code = nb::dlpack::dtype_code;

// DLPack device types: CPU memory (pinned or not) and CUDA memory (managed or not).
constexpr int32_t kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13;

struct Torch {
  nb::object tensor, is_grad_enabled, increment_version, forward_ad;
  nb::object requires_grad;  // its descriptor, which spares a look-up
  descrgetfunc get;
  nb::object is_neg;
  nb::object empty;
  nb::object dtypes[9];  // in the order of DType
};
const Torch* torch = nullptr;  // never freed: Python may be gone by then

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

// The attribute, or nothing where there is none.
nb::object attribute(nb::handle object, PyObject* name) {
  nb::object value = nb::steal(PyObject_GetAttr(object.ptr(), name));
  if (!value.is_valid()) PyErr_Clear();
  return value;
}

PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

bool is_text(nb::handle object, const char* text) {
  return PyUnicode_Check(object.ptr()) && PyUnicode_CompareWithASCIIString(object.ptr(), text) == 0;
}

// Of interned words, the one that was given; -1: another.
template <int kWords>
int index_of(nb::handle given, PyObject* const (&words)[kWords]) {
  for (int i = 0; i < kWords; ++i)
    if (given.ptr() == words[i]) return i;
  for (int i = 0; i < kWords; ++i)
    if (PyUnicode_Check(given.ptr()) && PyUnicode_Compare(given.ptr(), words[i]) == 0) return i;
  return -1;
}

// What came, for a message: None, 'word', a number, or a type with what dtype it has.
std::string shown(nb::handle given) {
  if (given.is_none()) return "None";
  if (PyUnicode_Check(given.ptr()) || PyLong_Check(given.ptr()) || PyFloat_Check(given.ptr()))
    return nb::repr(given).c_str();
  std::string text = nb::str(given.type().attr("__name__")).c_str();
  static PyObject* const name = interned("dtype");
  const nb::object dtype = attribute(given, name);
  if (dtype.is_valid()) text += std::string(" of dtype ") + nb::str(dtype).c_str();
  return text;
}

}  // namespace

void attach_torch(nb::object module) {
  const nb::object tensor = module.attr("Tensor"), autograd = module.attr("autograd");
  nb::object requires_grad = tensor.attr("requires_grad");
  const auto get =
      reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(requires_grad.ptr()), Py_tp_descr_get));
  auto* made = new Torch{tensor,
                         module.attr("is_grad_enabled"),
                         autograd.attr("graph").attr("increment_version"),
                         autograd.attr("forward_ad"),
                         std::move(requires_grad),
                         get,
                         tensor.attr("is_neg"),
                         module.attr("empty"),
                         {}};
  int i = 0;
  for (const char* name : {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
                           "int32", "int64", "uint8", "bool"})
    made->dtypes[i++] = module.attr(name);
  torch = made;
}

template <typename... Parts>
void Reader::fail(const char* part, const Parts&... parts) const {
  std::ostringstream text;
  text << "[" << op_ << "] " << name_ << part << " ";
  (text << ... << parts);
  throw InvalidArgument(text.str());
}

void Reader::refuse(Object given, const std::string& rule, const char* part) const {
  fail(part, "must be ", rule, optional() ? " or None" : "", "; got ", shown(given));
}

Reader::Reader(const char* op, const nb::args& given) : op_(op), given_(given) {
  if (torch) {
    static PyObject* const level = interned("_current_level");  // private: none is no level
    const nb::object current = attribute(torch->forward_ad, level);
    duals_ = current.is_valid() && nb::cast<int>(current) >= 0;
    const nb::object enabled = nb::steal(PyObject_CallNoArgs(torch->is_grad_enabled.ptr()));
    if (!enabled.is_valid()) nb::raise_python_error();
    refuses_grad_ = enabled.ptr() == Py_True;
  }
}

nb::handle Reader::next() {
  if (at_ == given_.size()) fail("", "is missing; got ", given_.size(), " arguments");
  return PyTuple_GetItem(given_.ptr(), static_cast<Py_ssize_t>(at_++));
}

void Reader::finish() const {
  if (at_ < given_.size())
    throw InvalidArgument(std::string("[") + op_ + "] takes " + std::to_string(at_) +
                          " arguments; got " + std::to_string(given_.size()));
}

// ---- numbers and words --------------------------------------------------------------------------

int64_t Reader::integer(Object given, const char* part) const {
  if (!PyBool_Check(given.ptr()) && PyIndex_Check(given.ptr())) {
    const nb::object index = nb::steal(PyNumber_Index(given.ptr()));
    if (index.is_valid()) {
      int overflow = 0;
      const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
      if (overflow == 0 && (value != -1 || !PyErr_Occurred())) return value;
      PyErr_Clear();
      fail(part, "must be less than 2^63; got ", shown(index));
    }
    PyErr_Clear();  // an array of more than one element has the method, too
  }
  refuse(given, "an int", part);
}

float Reader::number(Object given) const {
  if (PyFloat_CheckExact(given.ptr())) return static_cast<float>(PyFloat_AsDouble(given.ptr()));
  const bool array = PyObject_HasAttrString(given.ptr(), "__dlpack__") == 1;
  if (!PyBool_Check(given.ptr()) && !array && PyNumber_Check(given.ptr())) {
    const double value = PyFloat_AsDouble(given.ptr());
    if (value != -1.0 || !PyErr_Occurred()) return static_cast<float>(value);
    PyErr_Clear();
  }
  refuse(given, "a number");
}

bool Reader::truth(Object given) const {
  if (!PyBool_Check(given.ptr())) refuse(given, "True or False");
  return given.ptr() == Py_True;
}

void Reader::read(ScaleRule& rule) {
  name_ = "scale";
  rule.kind = scale_kind(next());
  pow2_ = rule.kind == ScaleKind::pow2;
  name_ = "eps";
  rule.eps = number(next());
}

void Reader::read(Activation& activation) {
  static PyObject* const names[] = {interned("kind"), interned("alpha"), interned("offset"),
                                    interned("limit"), interned("interleaved")};
  const Object given = next();
  nb::object parts[5];
  for (int i = 0; i < 5; ++i) {
    parts[i] = attribute(given, names[i]);
    if (!parts[i].is_valid()) refuse(given, "an Activation");
  }
  const auto* kind = std::find_if(std::begin(kActivations), std::end(kActivations),
                                  [&](const auto& of) { return is_text(parts[0], of.name); });
  if (kind == std::end(kActivations)) fail(".kind", "must be a kind; got ", shown(parts[0]));
  activation.kind = static_cast<ActivationKind>(kind - kActivations);
  activation.alpha = number(parts[1]);
  activation.offset = number(parts[2]);
  if (!parts[3].is_none()) activation.limit = number(parts[3]);
  activation.interleaved = truth(parts[4]);
}

void Reader::read(DType& format) { format = format_of(next()); }

// "e4m3", "e5m2", or the dtype of a framework that is called so.
DType Reader::format_of(Object given) const {
  if (is_text(given, "e4m3")) return DType::e4m3;
  if (is_text(given, "e5m2")) return DType::e5m2;
  static PyObject* const name = interned("name");
  const nb::object own = attribute(given, name);
  const std::string text = nb::str(own.is_valid() ? own : nb::borrow(given)).c_str();
  if (text.ends_with("float8_e4m3fn")) return DType::e4m3;
  if (text.ends_with("float8_e5m2")) return DType::e5m2;
  refuse(given, "'e4m3' or 'e5m2'");
}

ScaleKind Reader::scale_kind(Object given) const {
  static PyObject* const words[] = {interned("fp32"), interned("pow2"), interned("amax"),
                                    interned("approx")};
  const int kind = index_of(given, words);
  if (kind < 0) refuse(given, "'pow2', 'fp32', 'amax' or 'approx'");
  return static_cast<ScaleKind>(kind);
}

ScaleLayout Reader::layout(Object given) const {
  static PyObject* const words[] = {interned("row"), interned("gemm"), interned("block")};
  const int layout = index_of(given, words);
  if (layout < 0) fail(".scale_layout", "must be 'row', 'gemm' or 'block'; got ", shown(given));
  return static_cast<ScaleLayout>(layout);
}

// ---- arrays -------------------------------------------------------------------------------------

void Reader::read(Tensor& t) {
  const Object given = next();
  if (makes() && asked(given, t)) return;
  if (given.is_none()) {
    if (optional()) return;
    refuse(given, "an array");
  }
  t = allows_ & kAligned ? aligned_array(given, "", false) : array(given, "", false);
}

void Reader::read(Fp8Tensor& q) {
  static PyObject* const names[] = {interned("data"), interned("scale_inv"),
                                    interned("scale_layout"), interned("fp8_dtype")};
  const Object given = next();
  if (makes() && asked(given, q)) return;
  nb::object data, scale, word;
  if (!given.is_none() && !exchange_api(Py_TYPE(given.ptr()))) {
    scale = attribute(given, names[1]);
    if (scale.is_valid()) {
      data = attribute(given, names[0]);
      word = attribute(given, names[2]);
      kept_.insert(kept_.end(), {data, scale});  // a property may have made them
      if (!fp8_like_.is_valid()) fp8_like_ = given;
    }
  }
  if (!scale.is_valid()) {  // no Fp8Tensor
    if (given.is_none() && optional()) return;
    if (!(allows_ & kPlainToo) || given.is_none())
      refuse(given, allows_ & kPlainToo
                        ? "an Fp8Tensor or an array"
                        : "an Fp8Tensor (ops.quantize, of weights ops.quantize_weight)");
    data = nb::borrow(given);
  }
  if (data.is_none() && optional()) return;
  const bool plain = !scale.is_valid() || scale.is_none();
  q.layout = plain ? ScaleLayout::row : layout(word);
  const bool strided = allows_ & kStridedRows;
  q.data = aligned_array(data, "", strided && !plain);
  if (!plain)
    q.scale_inv = q.layout == ScaleLayout::gemm
                      ? aligned_array(scale, ".scale_inv", false)
                      : array(scale, ".scale_inv", strided && q.layout == ScaleLayout::row);
  if (q.data.dtype == DType::u8 && !plain) {  // codes of a framework without FP8 dtypes
    const nb::object format = attribute(given, names[3]);
    if (format.is_valid() && is_text(format, "e4m3")) q.data.dtype = DType::e4m3;
    if (format.is_valid() && is_text(format, "e5m2")) q.data.dtype = DType::e5m2;
  }
}

void Reader::read(RoutingPlan& plan) {
  static PyObject* const names[] = {interned("buffer"),  interned("tokens"), interned("slots"),
                                    interned("experts"), interned("align"),  interned("capacity")};
  const Object given = next();
  if (makes() && asked(given, plan)) return;
  if (given.is_none()) {
    if (optional()) return;
    refuse(given, "a RoutingPlan");
  }
  nb::object parts[6];
  for (int i = 0; i < 6; ++i) {
    parts[i] = attribute(given, names[i]);
    if (!parts[i].is_valid()) refuse(given, "a RoutingPlan");
  }
  const bool refuses_grad = std::exchange(refuses_grad_, false);  // a plan's integers need none
  kept_.push_back(parts[0]);
  plan.buffer = aligned_array(parts[0], "", false);
  refuses_grad_ = refuses_grad;
  plan.tokens = integer(parts[1], ".tokens");
  plan.slots = integer(parts[2], ".slots");
  plan.experts = integer(parts[3], ".experts");
  plan.align = integer(parts[4], ".align");
  plan.capacity = integer(parts[5], ".capacity");
}

nb::dlpack::dltensor Reader::view(Object given, const char* part, const ExchangeApi* api) {
  nb::dlpack::dltensor view;
  if (api) {
    if (api->view(given.ptr(), &view) == 0) return view;
    PyErr_Clear();
    fail(part, "must be a dense tensor with memory; got a meta, sparse or wrapped tensor");
  }
  static PyObject* const names[] = {interned("__dlpack_device__"), interned("__name__"),
                                    interned("__module__")};
  const nb::object name = attribute(given.type(), names[1]);
  if (is_text(name, "MaskedArray")) fail(part, "must be an array without a mask; got MaskedArray");
  const nb::object module = attribute(given.type(), names[2]);
  if (output() && std::string_view(nb::str(module).c_str()).starts_with("jax"))
    fail(part, "is written, so it must be writable; got an immutable array of JAX");
  nb::object lender = nb::borrow(given);
  const nb::object device_of = attribute(given, names[0]);
  if (device_of.is_valid()) {
    const nb::object device = device_of();
    if (nb::cast<int>(device[nb::int_(0)]) == kCuda) {  // let it order its work before ours
      const int64_t handle = named_stream();
      lender = given.attr("__dlpack__")(nb::arg("stream") = handle == 0 ? 1 : handle);
    }
  }
  nb::ndarray<> writable;
  nb::ndarray<nb::ro> lent;
  if (output() && nb::try_cast(lender, writable, false)) lent = nb::ndarray<nb::ro>(writable);
  PyErr_Clear();
  if (!lent.is_valid()) {
    if (!nb::try_cast(lender, lent, false)) {
      PyErr_Clear();
      refuse(given,
             std::string(allows_ & kPlainToo ? "an Fp8Tensor or " : "") +
                 "an array of native byte order, lent by DLPack or the buffer protocol",
             part);
    }
    if (output()) fail(part, "is written, so it must be writable; got a read-only array");
  }
  view = {.data = const_cast<void*>(lent.data()),
          .device = {lent.device_type(), lent.device_id()},
          .ndim = static_cast<int32_t>(lent.ndim()),
          .dtype = lent.dtype(),
          .shape = const_cast<int64_t*>(lent.shape_ptr()),
          .strides = const_cast<int64_t*>(lent.stride_ptr())};
  lent_.push_back(std::move(lent));
  return view;
}

bool Reader::is_torch(Object given) const {
  if (!torch) return false;
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(given.ptr()));
  return type == torch->tensor.ptr() || PyObject_IsInstance(given.ptr(), torch->tensor.ptr()) == 1;
}

// Its gradient, and its version.
void Reader::look_at(Object given, const Tensor& t, const char* part) {
  if (refuses_grad_ && t.dtype <= DType::e5m2) {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(given.ptr()));
    const nb::object needs = nb::steal(torch->get(torch->requires_grad.ptr(), given.ptr(), type));
    if (!needs.is_valid()) nb::raise_python_error();
    if (needs.ptr() == Py_True)
      fail(part,
           "must not require grad, its gradient would be lost; use fp8moe_cutlass.autograd or "
           ".nn, or detach it");
  }
  if (duals_ && t.dtype <= DType::e5m2 &&
      !torch->forward_ad.attr("unpack_dual")(given).attr("tangent").is_none())
    fail(part,
         "must not have a tangent, which would be lost: ops have no forward-mode AD; got one");
  if (makes()) written_.push_back(given.ptr());
}

Tensor Reader::array_of_copy(Object given, const char* method, const char* part,
                             bool strided_rows) {
  const nb::object copy = given.attr(method)();
  kept_.push_back(copy);
  return array(copy, part, strided_rows);
}

Tensor Reader::aligned_array(Object given, const char* part, bool strided_rows) {
  const Tensor t = array(given, part, strided_rows);
  const bool written = output() && role_ != Role::status;
  if (reinterpret_cast<uintptr_t>(t.data) % 16 == 0 || t.numel() == 0 || written) return t;
  for (const char* method : {"clone", "copy"})  // torch's, NumPy's and others'
    if (PyObject_HasAttrString(given.ptr(), method) == 1)
      return array_of_copy(given, method, part, strided_rows);
  return t;
}

Tensor Reader::array(Object given, const char* part, bool strided_rows) {
  const ExchangeApi* api = exchange_api(Py_TYPE(given.ptr()));
  const auto view = this->view(given, part, api);
  const auto dtype = known(view.dtype);
  if (!dtype)
    fail(part,
         "must be float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int32, int64, uint8 or "
         "bool; got ",
         name_of(view.dtype));
  if (view.ndim > Tensor::kMaxDims)
    fail(part, "must have at most ", Tensor::kMaxDims, " dimensions; got ",
         brackets(view.shape, view.ndim));
  Tensor t;
  if (!contiguous(view)) {
    t.row_stride = strided_rows ? row_stride(view) : 0;
    if (t.row_stride == 0)
      fail(part, "must be contiguous; got shape ", brackets(view.shape, view.ndim),
           " with strides ", brackets(view.strides, view.ndim));
  }
  t.dtype = *dtype;
  t.ndim = view.ndim;
  for (int32_t i = 0; i < view.ndim; ++i) t.shape[i] = view.shape[i];
  const int32_t type = view.device.device_type;
  if (type == kCuda || type == kCudaManaged) {
    t.device = {DeviceType::cuda, view.device.device_id};
    cuda_ = true;
    if (!api_ && api) {
      api_ = api;
      device_ = view.device.device_id;
    }
  } else if (type != kCpu && type != kCudaHost) {
    fail(part, "must be on the CPU or a CUDA device; got DLPack device type ", type);
  }
  if (view.data) {
    t.data = static_cast<char*>(view.data) + view.byte_offset;
  } else if (t.numel() > 0) {
    fail(part, "must have memory behind it; got a fake or meta tensor of shape ",
         brackets(view.shape, view.ndim), ", or a wrapper such as DTensor");
  }
  if (!like_.is_valid()) like_ = given, like_device_ = t.device;
  if (!api || !is_torch(given)) return t;
  look_at(given, t, part);
  if (t.dtype <= DType::bf16 && *part == '\0') {  // a negative view: -x over x's memory
    const nb::object is_neg =
        nb::steal(PyObject_CallFunctionObjArgs(torch->is_neg.ptr(), given.ptr(), nullptr));
    if (is_neg.ptr() == Py_True) {
      if (output()) fail(part, "is written, so it must not be a negative view; got one");
      return array_of_copy(given, "resolve_neg", part, strided_rows);
    }
    if (!is_neg.is_valid()) PyErr_Clear();
  }
  return t;
}

Stream Reader::stream() const {
  Stream stream;
  if (api_) {
    if (api_->current_stream(kCuda, device_, &stream.handle) != 0) nb::raise_python_error();
  } else if (cuda_) {
    stream.handle = reinterpret_cast<void*>(static_cast<intptr_t>(named_stream()));
  }
  return stream;
}

int64_t Reader::named_stream() const {
  return nb::cast<int64_t>(nb::module_::import_("fp8moe_cutlass.stream").attr("current")());
}

// ---- outputs ------------------------------------------------------------------------------------

bool Reader::asked(Object given, Tensor& t) {
  outputs_.push_back(nb::borrow(given));
  if (given.ptr() == Py_True) {
    t = Tensor::wanted();
  } else if (PyUnicode_Check(given.ptr())) {
    static constexpr std::pair<const char*, DType> kNames[] = {
        {"float32", DType::f32}, {"float16", DType::f16}, {"bfloat16", DType::bf16}};
    bool found = false;
    for (const auto& [name, dtype] : kNames)
      if (!found && is_text(given, name)) found = true, t = Tensor::wanted(dtype);
    if (!found) return false;
  } else {
    return false;
  }
  return wants_ = true;
}

bool Reader::asked(Object given, Fp8Tensor& q) {
  outputs_.push_back(nb::borrow(given));
  if (PyTuple_Check(given.ptr()) && PyTuple_Size(given.ptr()) == 2) {
    const ScaleLayout layout = this->layout(PyTuple_GetItem(given.ptr(), 0));
    q = Fp8Tensor::wanted(layout, format_of(PyTuple_GetItem(given.ptr(), 1)));
  } else if (is_text(given, "row") || is_text(given, "gemm") || is_text(given, "block")) {
    q = Fp8Tensor::wanted(layout(given));
  } else {
    return false;
  }
  return wants_ = true;
}

bool Reader::asked(Object given, RoutingPlan& plan) {
  outputs_.push_back(nb::borrow(given));
  if (!PyTuple_Check(given.ptr()) || PyTuple_Size(given.ptr()) != 5) return false;
  plan.buffer = Tensor::wanted(DType::i32);
  int64_t* const sizes[] = {&plan.tokens, &plan.slots, &plan.experts, &plan.align, &plan.capacity};
  constexpr const char* kParts[] = {".tokens", ".slots", ".experts", ".align", ".capacity"};
  for (int i = 0; i < 5; ++i) *sizes[i] = integer(PyTuple_GetItem(given.ptr(), i), kParts[i]);
  return wants_ = true;
}

// By torch.empty, which memory for another stream, resizing and hooks need; NumPy's by _outputs.
nb::object Reader::allocate(Tensor& t) {
  nb::object array;
  if (is_torch(like_)) {
    static PyObject* const device_name = interned("device");
    static PyObject* const names = PyTuple_Pack(2, interned("dtype"), device_name);
    const nb::object device = attribute(like_, device_name);
    nb::object sizes[Tensor::kMaxDims];
    PyObject* args[Tensor::kMaxDims + 2];
    for (int i = 0; i < t.ndim; ++i) sizes[i] = nb::int_(t.shape[i]), args[i] = sizes[i].ptr();
    args[t.ndim] = torch->dtypes[static_cast<int>(t.dtype)].ptr();
    args[t.ndim + 1] = device.ptr();
    array = nb::steal(PyObject_Vectorcall(torch->empty.ptr(), args, t.ndim, names));
    if (!array.is_valid()) nb::raise_python_error();
  } else {
    static constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "e4m3", "e5m2",
                                             "int32",   "int64",   "uint8",    "bool"};
    nb::list shape;
    for (int i = 0; i < t.ndim; ++i) shape.append(t.shape[i]);
    const nb::object empty = nb::module_::import_("fp8moe_cutlass.ops._outputs").attr("empty");
    array = empty(op_, like_, nb::tuple(shape), kNames[static_cast<int>(t.dtype)]);
  }
  const auto view = this->view(array, "", exchange_api(Py_TYPE(array.ptr())));
  t.data = view.data ? static_cast<char*>(view.data) + view.byte_offset : nullptr;
  return array;
}

nb::object Reader::made(Tensor& t) {
  nb::object given = std::move(outputs_[next_output_++]);
  if (given.ptr() != Py_True && !PyUnicode_Check(given.ptr())) return given;
  return allocate(t);
}

namespace {

// An object of a frozen dataclass, without a call of Python code.
nb::object object_of(const nb::object& type,
                     std::initializer_list<std::pair<PyObject*, nb::object>> attributes) {
  static PyObject* const name = interned("__dict__");
  nb::object object = type.attr("__new__")(type);
  const nb::object own = attribute(object, name);
  for (const auto& [key, value] : attributes) PyDict_SetItem(own.ptr(), key, value.ptr());
  return object;
}

}  // namespace

nb::object Reader::made(Fp8Tensor& q) {
  nb::object given = std::move(outputs_[next_output_++]);
  if (!PyUnicode_Check(given.ptr()) && !PyTuple_Check(given.ptr())) return given;
  nb::object data = allocate(q.data);
  if (!q.scale_inv.defined()) return data;  // an op that takes plain tensors, too
  nb::object scale = allocate(q.scale_inv);
  static PyObject* const names[] = {interned("data"), interned("scale_inv"),
                                    interned("scale_layout"), interned("pow2"),
                                    interned("fp8_dtype")};
  static PyObject* const layouts[] = {interned("row"), interned("gemm"), interned("block")};
  static PyObject* const formats[] = {interned("e4m3"), interned("e5m2")};
  nb::object pow2 = nb::bool_(pow2_ == 1);
  if (pow2_ < 0) pow2 = attribute(fp8_like_, names[3]);
  static const nb::object* type =
      new nb::object(nb::module_::import_("fp8moe_cutlass.tensor").attr("Fp8Tensor"));
  return object_of(*type, {{names[0], std::move(data)},
                           {names[1], std::move(scale)},
                           {names[2], nb::borrow(layouts[static_cast<int>(q.layout)])},
                           {names[3], std::move(pow2)},
                           {names[4], nb::borrow(formats[q.data.dtype == DType::e5m2])}});
}

nb::object Reader::made(RoutingPlan& plan) {
  nb::object given = std::move(outputs_[next_output_++]);
  if (!PyTuple_Check(given.ptr())) return given;
  nb::object buffer = allocate(plan.buffer);
  static PyObject* const names[] = {interned("buffer"),  interned("tokens"), interned("slots"),
                                    interned("experts"), interned("align"),  interned("capacity")};
  static const nb::object* type =
      new nb::object(nb::module_::import_("fp8moe_cutlass.routing").attr("RoutingPlan"));
  return object_of(*type, {{names[0], std::move(buffer)},
                           {names[1], nb::int_(plan.tokens)},
                           {names[2], nb::int_(plan.slots)},
                           {names[3], nb::int_(plan.experts)},
                           {names[4], nb::int_(plan.align)},
                           {names[5], nb::int_(plan.capacity)}});
}

void Reader::provide(Tensor& workspace, int64_t bytes, bool zero) {
  name_ = "workspace";
  if (!is_torch(like_))
    fail("", "is allocated for torch only; give ", bytes, " bytes of uint8", zero ? ", zeros" : "");
  workspace = Tensor(nullptr, DType::u8, {bytes}, like_device_);
  kept_.push_back(allocate(workspace));
  if (zero) kept_.back().attr("zero_")();
}

void Reader::count_versions() const {
  if (written_.empty()) return;
  nb::list list;
  for (PyObject* t : written_) list.append(nb::borrow(t));
  torch->increment_version(list);
}

nb::object Reader::returned() const {
  if (results_.size() == 1) return results_[0];
  nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(results_.size())));
  for (size_t i = 0; i < results_.size(); ++i)
    PyTuple_SetItem(tuple.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(results_[i].ptr()));
  return tuple;
}

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

}  // namespace fp8moe
