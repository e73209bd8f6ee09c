// From a runtime dtype to a template argument: dispatch_float(dtype, [&]<typename T>() { ... }).
#pragma once

#include "common/bits.h"
#include "common/check.h"
#include "common/fp8.h"

namespace fp8moe {

// T is float, Fp16 or Bf16 (common/bits.h).
template <typename Body>
void dispatch_float(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f32: return body.template operator()<float>();
    case DType::f16: return body.template operator()<Fp16>();
    case DType::bf16: return body.template operator()<Bf16>();
    default: fail("expected float32, float16 or bfloat16; got ", name_of(dtype));
  }
}

// F is E4M3 or E5M2 (common/fp8.h).
template <typename Body>
void dispatch_fp8(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::e4m3: return body.template operator()<E4M3>();
    case DType::e5m2: return body.template operator()<E5M2>();
    default: fail("expected float8_e4m3fn or float8_e5m2; got ", name_of(dtype));
  }
}

}  // namespace fp8moe
