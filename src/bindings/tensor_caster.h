// Python arrays as arguments: TensorArg is read, OutArg is written. Both borrow; nothing is copied.
//
// torch tensors come through DLPack's C exchange API, everything else with `__dlpack__` or the
// buffer protocol through nb::ndarray. A caster knows neither the op nor the argument's name, so it
// only records what it met; Call (call.h) turns that into a Tensor or into an error that names
// both.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

#include "exchange_api.h"
#include "fp8moe/tensor.h"

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
  std::optional<DType> format;       // of uint8 codes, given as (array, "e4m3")
  Problem problem = Problem::none;
};

using TensorArg = ArrayArg<false>;
using OutArg = ArrayArg<true>;

}  // namespace fp8moe

namespace nanobind::detail {

template <bool kWritable>
struct type_caster<fp8moe::ArrayArg<kWritable>> {
  using Arg = fp8moe::ArrayArg<kWritable>;
  NB_TYPE_CASTER(Arg, const_name("fp8moe_cutlass.typing.ArrayArg"))

  bool from_python(handle src, uint32_t flags, cleanup_list* cleanup) noexcept {
    if (src.is_none()) return true;
    if (PyTuple_Check(src.ptr())) return from_pair(src, flags, cleanup);
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

 private:
  // (array, "e4m3" or "e5m2"): codes of a framework without FP8 dtypes.
  bool from_pair(handle src, uint32_t flags, cleanup_list* cleanup) noexcept {
    make_caster<const char*> format;
    if (PyTuple_Size(src.ptr()) != 2) return false;
    const handle array = PyTuple_GetItem(src.ptr(), 0);
    if (PyTuple_Check(array.ptr()) || !from_python(array, flags, cleanup)) return false;
    if (!format.from_python(PyTuple_GetItem(src.ptr(), 1), flags, cleanup)) return false;
    const std::string_view name = static_cast<const char*>(format);
    if (name != "e4m3" && name != "e5m2") return false;
    value.format = name == "e4m3" ? fp8moe::DType::e4m3 : fp8moe::DType::e5m2;
    return true;
  }
};

}  // namespace nanobind::detail
