// DLPack's C exchange API, the part read here: how a framework lends a tensor without a Python
// call.
//
// A type that offers it carries a capsule "dlpack_exchange_api" in `__dlpack_c_exchange_api__`. The
// field order is DLPack's 1.x ABI; a function pointer this module never calls is left untyped.
#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>

namespace fp8moe {

struct ExchangeHeader {
  uint32_t major;
  uint32_t minor;
  const ExchangeHeader* previous;  // the same producer's table for an older major version, or null
};

// DLPack's DLManagedTensorVersioned.
struct Managed {
  uint32_t version[2];
  void* context;
  void (*deleter)(Managed* self);
  uint64_t flags;
  nanobind::dlpack::dltensor tensor;
};

struct ExchangeApi {
  ExchangeHeader header;
  // An uninitialized tensor of the prototype's shape, dtype and device. Nonzero: none, and
  // `fail(context, kind, message)` has been called.
  int (*allocate)(nanobind::dlpack::dltensor* prototype, Managed** out, void* context,
                  void (*fail)(void* context, const char* kind, const char* message));
  void (*managed_from_object)();
  // Gives `managed` away as an object of Python. Nonzero: a Python error is set.
  int (*managed_to_object)(Managed* managed, void** object);
  // Fills a view that borrows from `object`, shape and strides included. Nonzero: a Python error is
  // set.
  int (*view)(void* object, nanobind::dlpack::dltensor* out);
  // The stream the framework is working on, also while it captures a graph.
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

// The table of a Python type, or null where it has none (NumPy, older frameworks). Needs the GIL.
const ExchangeApi* exchange_api(PyTypeObject* type);

}  // namespace fp8moe
