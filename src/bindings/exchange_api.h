// DLPack's C exchange API, the part read here: how a framework lends a tensor without a Python
// call.
//
// A type that offers it carries a capsule "dlpack_exchange_api" in `__dlpack_c_exchange_api__`. The
// field order is DLPack's 1.x ABI; function pointers this module never calls are left untyped.
#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>

namespace fp8moe {

struct ExchangeHeader {
  uint32_t major;
  uint32_t minor;
  const ExchangeHeader* previous;  // the same producer's table for an older major version, or null
};

struct ExchangeApi {
  ExchangeHeader header;
  // Not called: torch's tensors that come from it are foreign memory to torch's allocator, so that
  // record_stream does nothing.
  void (*allocate)();
  void (*managed_from_object)();
  void (*managed_to_object)();
  // Fills a view that borrows from `object`, shape and strides included. Nonzero: a Python error is
  // set.
  int (*view)(void* object, nanobind::dlpack::dltensor* out);
  // The stream the framework is working on, also while it captures a graph.
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

// The table of a Python type, or null where it has none (NumPy, older frameworks). Needs the GIL.
const ExchangeApi* exchange_api(PyTypeObject* type);

}  // namespace fp8moe
