// One call of an op from Python: arguments into the C++ vocabulary, the stream, the GIL, the call.
#pragma once

#include "fp8moe/ops.h"
#include "tensor_caster.h"

namespace fp8moe {

// The stream (a cudaStream_t as an integer) of this thread for arrays whose framework does not tell
// its own through the exchange API; 0, the default stream, at first. Returns the previous one.
int64_t set_stream(int64_t handle);

struct PlanSizes {
  int64_t tokens, slots, experts, align, capacity;
};

class Call {
 public:
  explicit Call(const char* op) : op_(op) {}

  // The view as a Tensor (undefined for None). Throws InvalidArgument for what has no memory, is
  // read-only but written, is not contiguous, or has a dtype or device no op knows.
  // strided_rows: dense rows of a 2-D view may lie apart (Tensor::row_stride).
  template <bool kWritable>
  Tensor tensor(const ArrayArg<kWritable>& arg, const char* name, const char* part = "",
                bool strided_rows = false);

  // layout: "row", "gemm" or "block".
  template <bool kWritable>
  Fp8Tensor fp8(const ArrayArg<kWritable>& data, const ArrayArg<kWritable>& scale,
                const char* layout, const char* name, bool strided_rows = false);

  // "e4m3" or "e5m2".
  DType format(const char* fp8_dtype) const;

  template <bool kWritable>
  RoutingPlan plan(const ArrayArg<kWritable>& buffer, PlanSizes sizes);

  // function(arguments..., stream) without the GIL.
  template <typename Function, typename... Arguments>
  void run(Function function, const Arguments&... arguments) {
    const Stream stream = this->stream();
    nanobind::gil_scoped_release nogil;
    function(arguments..., stream);
  }

 private:
  Stream stream() const;

  const char* op_;
  const ExchangeApi* api_ = nullptr;  // of the first CUDA tensor that has one
  int32_t device_ = 0;
};

}  // namespace fp8moe
