#include "errors.h"

#include "fp8moe/error.h"

namespace fp8moe {
namespace nb = nanobind;

namespace {

template <typename Error>
void bind(nb::module_& m, const char* name, const char* doc) {
  nb::exception<Error> type(m, name, PyExc_RuntimeError);
  type.attr("__doc__") = doc;
}

}  // namespace

void bind_errors(nb::module_& m) {
  bind<DeviceUnavailable>(
      m, "DeviceUnavailable",
      "CUDA arrays were given, but the build has no CUDA backend or the machine no "
      "usable driver or GPU.");
  bind<UnsupportedDevice>(
      m, "UnsupportedDevice",
      "The GPU is not of compute capability 9.0, the one the kernels are built for.");
  bind<CudaError>(m, "CudaError",
                  "A CUDA call failed; the message names it and CUDA's own reason.");
}

}  // namespace fp8moe
