// The exceptions of fp8moe/error.h as Python types. InvalidArgument needs none: it is ValueError.
#pragma once

#include <nanobind/nanobind.h>

namespace fp8moe {

void bind_errors(nanobind::module_& m);

}  // namespace fp8moe
