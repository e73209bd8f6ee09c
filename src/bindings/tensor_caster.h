// Python arrays as arguments: TensorArg is read, OutArg is written. Both borrow; nothing is copied.
//
// torch tensors come through DLPack's C exchange API, everything else with `__dlpack__` or the
// buffer protocol through nb::ndarray. A caster knows neither the op nor the argument's name, so it
// only records what it met; Call (call.h) turns that into a Tensor or into an error that names
// both.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <type_traits>

#include "exchange_api.h"

namespace fp8moe {

enum class Problem : uint8_t { none, no_memory, read_only };

template <bool kWritable>
struct ArrayArg {
  using Fallback =
      std::conditional_t<kWritable, nanobind::ndarray<>, nanobind::ndarray<nanobind::ro>>;

  nanobind::dlpack::dltensor view;   // valid while the call holds its arguments
  const ExchangeApi* api = nullptr;  // set where the exchange API lent the view
  Fallback owner;                    // set where nb::ndarray did
  bool given = false;                // false: None
  Problem problem = Problem::none;
};

using TensorArg = ArrayArg<false>;
using OutArg = ArrayArg<true>;

// (tokens, slots, experts, align, capacity); empty where there is no plan.
struct PlanShape {
  std::array<int64_t, 5> sizes{};
  bool given = false;
};

}  // namespace fp8moe

namespace nanobind::detail {

template <bool kWritable>
struct type_caster<fp8moe::ArrayArg<kWritable>> {
  using Arg = fp8moe::ArrayArg<kWritable>;
  NB_TYPE_CASTER(Arg, const_name("fp8moe_cutlass.typing.DLPackArray"))

  bool from_python(handle src, uint32_t flags, cleanup_list* cleanup) noexcept {
    if (src.is_none()) return true;
    value.given = true;
    if (const auto* api = fp8moe::exchange_api(Py_TYPE(src.ptr()))) {
      value.api = api;
      if (api->view(src.ptr(), &value.view) != 0) {
        PyErr_Clear();
        value.problem = fp8moe::Problem::no_memory;
      }
      return true;
    }
    make_caster<typename Arg::Fallback> array;
    if (array.from_python(src, flags, cleanup)) {
      value.owner = std::move(array.value);
      value.view = {.data = const_cast<void*>(static_cast<const void*>(value.owner.data())),
                    .device = {value.owner.device_type(), value.owner.device_id()},
                    .ndim = static_cast<int32_t>(value.owner.ndim()),
                    .dtype = value.owner.dtype(),
                    .shape = const_cast<int64_t*>(value.owner.shape_ptr()),
                    .strides = const_cast<int64_t*>(value.owner.stride_ptr())};
      return true;
    }
    PyErr_Clear();
    if constexpr (kWritable) {  // is it an array at all? then the reason is that it is read-only
      make_caster<nanobind::ndarray<nanobind::ro>> readable;
      if (readable.from_python(src, flags, cleanup)) {
        value.problem = fp8moe::Problem::read_only;
        return true;
      }
      PyErr_Clear();
    }
    return false;
  }
};

template <>
struct type_caster<fp8moe::PlanShape> {
  NB_TYPE_CASTER(fp8moe::PlanShape, const_name("collections.abc.Sequence[int]"))

  bool from_python(handle src, uint32_t, cleanup_list*) noexcept {
    const Py_ssize_t size = PySequence_Size(src.ptr());
    value.given = size == static_cast<Py_ssize_t>(value.sizes.size());
    for (Py_ssize_t i = 0; value.given && i < size; ++i) {
      PyObject* item = PySequence_GetItem(src.ptr(), i);
      value.sizes[i] = item ? PyLong_AsLongLong(item) : -1;
      Py_XDECREF(item);
    }
    if (PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    return value.given || size == 0;
  }
};

}  // namespace nanobind::detail
