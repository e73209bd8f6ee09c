#include "eager.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "exchange_api.h"
#include "fp8moe/plan.h"

namespace fp8moe {
namespace {

namespace nb = nanobind;

// A frozen dataclass, whose instances are made here without its __init__, in a third of its time,
// and keep what an op takes of them, the fields `taken`, as a tuple: one look-up instead of many.
struct Dataclass {
  Dataclass(nb::object dataclass, std::vector<size_t> taken)
      : type(dataclass),
        fields(nb::steal<nb::tuple>(
            PySequence_Tuple(nb::object(dataclass.attr("__dataclass_fields__")).ptr()))),
        taken(std::move(taken)) {}

  nb::object instance(PyObject* const* values) const {
    static const auto create =
        reinterpret_cast<newfunc>(PyType_GetSlot(&PyBaseObject_Type, Py_tp_new));
    static PyObject* const no_arguments = PyTuple_New(0);
    nb::object made =
        nb::steal(create(reinterpret_cast<PyTypeObject*>(type.ptr()), no_arguments, nullptr));
    for (size_t i = 0; made.is_valid() && i < fields.size(); ++i)
      if (PyObject_GenericSetAttr(made.ptr(), fields[i].ptr(), values[i]) != 0) made.reset();
    if (!made.is_valid()) nb::raise_python_error();
    keep(made.ptr(), [&](size_t field) { return Py_NewRef(values[field]); });
    return made;
  }

  // The tuple that an instance keeps, or null.
  nb::object kept(PyObject* instance) const {
    nb::object tuple = nb::steal(PyObject_GetAttr(instance, kept_name()));
    if (!tuple.is_valid()) PyErr_Clear();
    return tuple.is_valid() && PyTuple_Check(tuple.ptr()) ? tuple : nb::object();
  }

  // Lets it keep one of its fields, or of `value(field)`, new references or null. Returns it, or
  // null.
  nb::object keep(PyObject* instance) const {
    return keep(instance, [&](size_t field) { return get(instance, field); });
  }
  template <typename Value>
  nb::object keep(PyObject* instance, Value value) const {
    nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(taken.size())));
    for (size_t i = 0; tuple.is_valid() && i < taken.size(); ++i) {
      PyObject* own = value(taken[i]);
      if (!own || PyTuple_SetItem(tuple.ptr(), static_cast<Py_ssize_t>(i), own) != 0) tuple.reset();
    }
    if (tuple.is_valid() && PyObject_GenericSetAttr(instance, kept_name(), tuple.ptr()) != 0)
      tuple.reset();
    if (!tuple.is_valid()) PyErr_Clear();
    return tuple;
  }

  bool made(PyObject* object) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.ptr();
  }
  // A new reference; null with Python's error set.
  PyObject* get(PyObject* instance, size_t field) const {
    return PyObject_GetAttr(instance, fields[field].ptr());
  }

  static PyObject* kept_name() {
    static PyObject* const name = PyUnicode_InternFromString("_kept");
    return name;
  }

  nb::object type;
  nb::tuple fields;  // names, in order
  std::vector<size_t> taken;
};

struct Torch {
  explicit Torch(nb::dict objects)
      : tensor(objects["tensor"]),
        requires_grad(objects["requires_grad"]),
        fp8_tensor(objects["fp8_tensor"], {0, 1, 2}),
        plan(objects["plan"], {0, 1, 2, 3, 4, 5}),
        dtypes(objects["dtypes"]),
        formats(objects["formats"]),
        forward_ad(objects["forward_ad"]),
        profiler(objects["profiler"]),
        is_grad_enabled(objects["is_grad_enabled"]),
        dispatch_modes(objects["dispatch_modes"]),
        is_jit_tracing(objects["is_jit_tracing"]),
        is_deterministic(objects["is_deterministic"]),
        increment_version(objects["increment_version"]),
        current_device(objects["current_device"]),
        flatten(objects["flatten"]),
        empty_cpu(objects["empty_cpu"]),
        empty_cuda(objects["empty_cuda"]) {}

  nb::object tensor;         // the class
  nb::object requires_grad;  // its descriptor
  Dataclass fp8_tensor, plan;
  nb::dict dtypes;                // name -> torch's dtype
  nb::dict formats;               // name or dtype -> (name, torch's dtype)
  nb::dict forward_ad, profiler;  // contents of the modules
  nb::object is_grad_enabled, dispatch_modes, is_jit_tracing, is_deterministic;
  nb::object increment_version, current_device;
  nb::object flatten;                // (kinds, an op's arguments) -> the flat ones, in a list
  nb::object empty_cpu, empty_cuda;  // (size, stride, dtype) -> tensor; None: this torch has none
};

const Torch* torch = nullptr;  // never freed: Python may be gone by then

bool is_true(const nb::object& function) {
  const nb::object answer = nb::steal(PyObject_CallNoArgs(function.ptr()));
  const int truth = answer.is_valid() ? PyObject_IsTrue(answer.ptr()) : -1;
  if (truth < 0) nb::raise_python_error();
  return truth;
}

bool is_intercepted() { return is_true(torch->dispatch_modes) || is_true(torch->is_jit_tracing); }

bool is_watched() {
  static PyObject* const level_name = PyUnicode_InternFromString("_current_level");
  static PyObject* const profiled_name = PyUnicode_InternFromString("_is_profiler_enabled");
  PyObject* level = PyDict_GetItem(torch->forward_ad.ptr(), level_name);
  PyObject* profiled = PyDict_GetItem(torch->profiler.ptr(), profiled_name);
  return !level || PyLong_AsLong(level) >= 0 || profiled != Py_False || is_intercepted();
}

bool is_tensor(nb::handle object) {
  if (object.is_none()) return false;  // isinstance would ask the metaclass, which takes long
  const int is = PyObject_IsInstance(object.ptr(), torch->tensor.ptr());
  if (is < 0) nb::raise_python_error();
  return is;
}

// An op's flat arguments.
class Flat {
 public:
  Flat() = default;
  Flat(const Flat&) = delete;
  Flat& operator=(const Flat&) = delete;
  ~Flat() { clear(); }

  // Those that `given` stand for (eager.h). What is not common is taken apart in Python.
  void take(const nb::tuple& given, const std::string& kinds) {
    bool common = given.size() == kinds.size();
    for (size_t i = 0; common && i < kinds.size(); ++i) common = take(given[i].ptr(), kinds[i]);
    if (common) return;
    PyErr_Clear();
    clear();
    const nb::object all = torch->flatten(kinds.c_str(), given);
    for (nb::handle argument : all) add_borrowed(argument.ptr());
  }

  PyObject* const* begin() const { return values_; }
  PyObject* const* end() const { return values_ + size_; }
  size_t size() const { return size_; }
  PyObject* operator[](size_t i) const { return values_[i]; }

 private:
  static constexpr size_t kRoom = 48;

  void clear() {
    while (size_ > 0) Py_DECREF(values_[--size_]);
  }
  bool add(PyObject* own) {
    if (!own || size_ == kRoom) {
      Py_XDECREF(own);
      return false;
    }
    values_[size_++] = own;
    return true;
  }
  bool add_borrowed(PyObject* borrowed) { return add(Py_NewRef(borrowed)); }
  // A tuple's first `count`; null has none.
  bool add_first(const nb::object& tuple, size_t count) {
    for (size_t i = 0; tuple.is_valid() && i < count; ++i)
      if (!add_borrowed(PyTuple_GetItem(tuple.ptr(), static_cast<Py_ssize_t>(i)))) return false;
    return tuple.is_valid();
  }

  bool take(PyObject* given, char kind) {
    if (kind == '.') return add_borrowed(given);
    return kind == 'p' ? take_plan(given) : take_fp8(given, kind == '3');
  }

  bool take_plan(PyObject* given) {
    static PyObject* const zero = PyLong_FromLong(0);
    const Dataclass& plan = torch->plan;
    if (given != Py_None) {
      if (!plan.made(given)) return false;
      const nb::object kept = plan.kept(given);
      return add_first(kept.is_valid() ? kept : plan.keep(given), plan.taken.size());
    }
    for (size_t i = 0; i < plan.taken.size(); ++i)
      if (!add_borrowed(i == 0 ? Py_None : zero)) return false;
    return true;
  }

  bool take_fp8(PyObject* given, bool layout) {
    static PyObject* const no_layout = PyUnicode_InternFromString("");
    const Dataclass& fp8 = torch->fp8_tensor;
    if (!fp8.made(given)) {
      // None, or an array of torch's; what else there is, subclasses among it, Python knows.
      if (given != Py_None && !exchange_api(Py_TYPE(given))) return false;
      return add_borrowed(given) && add_borrowed(Py_None) && (!layout || add_borrowed(no_layout));
    }
    nb::object kept = fp8.kept(given);
    if (!kept.is_valid() && is_fp8(nb::steal(fp8.get(given, 0)))) kept = fp8.keep(given);
    return add_first(kept, layout ? 3 : 2);
  }

  // Of one of torch's FP8 dtypes, not of uint8 codes.
  static bool is_fp8(const nb::object& data) {
    static PyObject* const name = PyUnicode_InternFromString("dtype");
    if (!data.is_valid()) return false;
    const nb::object dtype = nb::steal(PyObject_GetAttr(data.ptr(), name));
    return dtype.is_valid() && PyDict_GetItem(torch->formats.ptr(), dtype.ptr()) != nullptr;
  }

  PyObject* values_[kRoom];
  size_t size_ = 0;
};

// array.requires_grad: of a plain torch.Tensor by its descriptor, which spares the look-up.
nb::object requires_grad(PyObject* array) {
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  PyObject* descriptor = torch->requires_grad.ptr();
  static const auto get =
      reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(descriptor), Py_tp_descr_get));
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(array));
  return nb::steal(type == torch->tensor.ptr() ? get(descriptor, array, type)
                                               : PyObject_GetAttr(array, name));
}

bool needs_grad(const Flat& arguments, uint64_t arrays) {
  for (size_t i = 0; i < arguments.size() && arrays != 0; ++i, arrays >>= 1) {
    PyObject* argument = arguments[i];
    if ((arrays & 1) == 0 || argument == Py_None || PyTuple_Check(argument) ||
        !exchange_api(Py_TYPE(argument)))
      continue;
    const nb::object needs = requires_grad(argument);
    if (!needs.is_valid()) PyErr_Clear();  // of another framework that offers the exchange API
    if (needs.ptr() == Py_True) return true;
  }
  return false;
}

// What allocates beside `like` without the dispatcher; null: nothing may.
PyObject* allocator(nb::handle like) {
  const ExchangeApi* api = torch ? exchange_api(Py_TYPE(like.ptr())) : nullptr;
  if (!api || !is_tensor(like) || is_intercepted() || is_true(torch->is_deterministic))
    return nullptr;
  nb::dlpack::dltensor view;
  if (api->view(like.ptr(), &view) != 0) {
    PyErr_Clear();
    return nullptr;
  }
  const auto [type, id] = view.device;
  PyObject* function = nullptr;
  if (type == nb::device::cpu::value) function = torch->empty_cpu.ptr();
  if (type == nb::device::cuda::value && nb::cast<int32_t>(torch->current_device()) == id)
    function = torch->empty_cuda.ptr();
  return function == Py_None ? nullptr : function;
}

// The integers of a tuple into `values`; how many, or -1 if it has others (symbolic ones, too), a
// negative one or more than there is room for.
template <Py_ssize_t kRoom>
Py_ssize_t read(nb::handle tuple, int64_t (&values)[kRoom]) {
  const Py_ssize_t count = PyTuple_Check(tuple.ptr()) ? PyTuple_Size(tuple.ptr()) : kRoom + 1;
  if (count > kRoom) return -1;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* value = PyTuple_GetItem(tuple.ptr(), i);
    values[i] = PyLong_CheckExact(value) ? PyLong_AsLongLong(value) : -1;
    if (values[i] < 0) {
      PyErr_Clear();
      return -1;
    }
  }
  return count;
}

struct Shape {
  int64_t sizes[3];
  Py_ssize_t count;

  int64_t& operator[](Py_ssize_t i) { return sizes[i < 0 ? count + i : i]; }
  nb::object tuple() const {
    nb::object t = nb::steal(PyTuple_New(count));
    for (Py_ssize_t i = 0; i < count; ++i)
      PyTuple_SetItem(t.ptr(), i, PyLong_FromLongLong(sizes[i]));
    return t;
  }
};

nb::object allocate(PyObject* function, const Shape& shape, nb::handle dtype) {
  Shape strides = shape;
  int64_t stride = 1;
  for (Py_ssize_t i = shape.count; i-- > 0;) {
    strides[i] = stride;
    if (i > 0 && shape.sizes[i] > 1) stride *= shape.sizes[i];
  }
  const nb::object size = shape.tuple(), step = strides.tuple();
  PyObject* arguments[] = {size.ptr(), step.ptr(), dtype.ptr()};
  nb::object array = nb::steal(PyObject_Vectorcall(function, arguments, 3, nullptr));
  if (!array.is_valid()) PyErr_Clear();  // torch.empty says it in words for users
  return array;
}

std::optional<Shape> scale_shape(Shape shape, std::string_view layout) {
  const int64_t m = shape[-2], blocks = cdiv(shape[-1], kTile);
  if (layout == "block") {
    shape[-2] = cdiv(m, kTile);
    shape[-1] = blocks;
    return shape;
  }
  if (shape.count != 2) return std::nullopt;
  if (layout == "row") return Shape{{m, blocks}, 2};
  if (layout == "gemm") return Shape{{blocks, pad4(m)}, 2};
  return std::nullopt;
}

}  // namespace

void attach_torch(nb::dict objects) { torch = new Torch(objects); }

nb::object eager(nb::object direct, nb::object watched, const char* kinds, uint64_t arrays,
                 uint64_t written) {
  return nb::cpp_function([=, kinds = std::string(kinds)](const nb::tuple& given) -> nb::object {
    if (is_watched()) return watched(given);
    Flat flat;
    flat.take(given, kinds);
    if (is_true(torch->is_grad_enabled) && needs_grad(flat, arrays)) return watched(given);
    if (!nb::steal(PyObject_Vectorcall(direct.ptr(), flat.begin(), flat.size(), nullptr)))
      nb::raise_python_error();
    nb::list counted;
    uint64_t bits = written;
    for (size_t i = 0; i < flat.size() && bits != 0; ++i, bits >>= 1)
      if ((bits & 1) != 0 && is_tensor(flat[i])) counted.append(nb::handle(flat[i]));
    return torch->increment_version(counted);
  });
}

nb::object empty(nb::handle like, nb::handle shape, nb::handle dtype) {
  PyObject* function = allocator(like);
  Shape sizes;
  if (!function || (sizes.count = read(shape, sizes.sizes)) < 0) return nb::none();
  const nb::object own = dtype.is_none() ? nb::object(like.attr("dtype")) : torch->dtypes[dtype];
  nb::object array = allocate(function, sizes, own);
  return array.is_valid() ? array : nb::none();
}

nb::object empty_fp8(nb::handle like, nb::handle shape, nb::handle layout, nb::handle fp8_dtype,
                     nb::handle pow2) {
  PyObject* format = torch ? PyDict_GetItem(torch->formats.ptr(), fp8_dtype.ptr()) : nullptr;
  if (!format) return nb::none();
  PyObject* function = PyUnicode_Check(layout.ptr()) ? allocator(like) : nullptr;
  Shape sizes;
  if (!function || (sizes.count = read(shape, sizes.sizes)) < 2) return nb::none();
  const auto scales = scale_shape(sizes, nb::cast<const char*>(layout));
  if (!scales) return nb::none();

  const nb::object data = allocate(function, sizes, PyTuple_GetItem(format, 1));
  if (!data.is_valid()) return nb::none();
  const nb::object scale_inv = allocate(function, *scales, torch->dtypes["float32"]);
  if (!scale_inv.is_valid()) return nb::none();
  PyObject* values[] = {data.ptr(), scale_inv.ptr(), layout.ptr(), pow2.ptr(),
                        PyTuple_GetItem(format, 0)};
  return torch->fp8_tensor.instance(values);
}

nb::object empty_plan(nb::handle like, nb::tuple sizes) {
  constexpr int64_t kMost = INT32_MAX;  // so that nothing overflows below
  PyObject* function = allocator(like);
  int64_t size[5];
  if (!function || read(sizes, size) != 5) return nb::none();
  const auto [tokens, slots, experts, align, capacity] = size;
  if (tokens > kMost || slots > kMost || experts == 0 || experts > kMost || align == 0 ||
      align > kTile || capacity > kMost)
    return nb::none();
  const RoutingPlan plan{{}, tokens, slots, experts, align, capacity};
  const nb::object buffer = allocate(function, {{plan.buffer_size()}, 1}, torch->dtypes["int32"]);
  if (!buffer.is_valid()) return nb::none();
  PyObject* values[] = {buffer.ptr(),   sizes[0].ptr(), sizes[1].ptr(),
                        sizes[2].ptr(), sizes[3].ptr(), sizes[4].ptr()};
  return torch->plan.instance(values);
}

}  // namespace fp8moe
