// Argument checks of the operators: "[op] rule; got value", in the order ndim, device, dtype,
// shape.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <sstream>
#include <string>
#include <vector>

#include "fp8moe/error.h"
#include "fp8moe/ops.h"
#include "fp8moe/plan.h"
#include "fp8moe/tensor.h"

namespace fp8moe {

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw InvalidArgument(message.str());
}

#define FP8MOE_CHECK(condition, ...)               \
  do {                                             \
    if (!(condition)) ::fp8moe::fail(__VA_ARGS__); \
  } while (false)

const char* name_of(DType dtype);
const char* name_of(ScaleLayout layout);
std::string name_of(Device device);
std::string shape_of(const Tensor& t);  // "[4, 128]"

inline bool is_fp8(DType d) { return d == DType::e4m3 || d == DType::e5m2; }

// The memory of an argument; an FP8 tensor's codes and scales.
struct Memory {
  Memory(const Tensor& t, const char* name) : parts{&t, nullptr}, name(name) {}
  Memory(const Fp8Tensor& t, const char* name) : parts{&t.data, &t.scale_inv}, name(name) {}

  const Tensor* parts[2];
  const char* name;
};

// The checks of one op. Names are the argument names of ops.h.
class Checker {
 public:
  Checker(const char* op, Device device) : op_(op), device_(device) {}

  // Defined, on the op's device, of this exact shape, dense, and not null where it has elements.
  // part: what of `name` it is (".scale_inv"), for the message.
  void tensor(const Tensor& t, const char* name, std::initializer_list<int64_t> shape,
              const char* part = "") const;
  // The same, and of one of these dtypes.
  void tensor(const Tensor& t, const char* name, std::initializer_list<int64_t> shape,
              std::initializer_list<DType> dtypes) const;
  void ndim(const Tensor& t, const char* name, int ndim) const;
  void dtype(const Tensor& t, const char* name, std::initializer_list<DType> allowed,
             const char* part = "") const;
  void multiple(int64_t value, const char* name, int64_t of, const char* part = "") const;
  // Aligned FP8 data [M, K] (or [E, M, K], block layout) of this shape, scales to match the layout:
  // those in gemm layout are aligned, too.
  void fp8(const Fp8Tensor& t, const char* name, std::initializer_list<int64_t> shape,
           std::initializer_list<ScaleLayout> layouts) const;
  // Weights and activations are in E4M3: E5M2 is for gradients alone.
  void e4m3(const Fp8Tensor& t, const char* name) const;
  // fp8() of [M, K], where rows of the data, and of scales in row layout, may lie row_stride
  // apart: of the data multiples of 16 bytes.
  void strided_fp8(const Fp8Tensor& t, const char* name, std::initializer_list<int64_t> shape,
                   std::initializer_list<ScaleLayout> layouts) const;
  // Numbers that make a plan: sizes in range, align one of 1, 16, 32, 128.
  void plan_sizes(const RoutingPlan& plan) const;
  // A whole plan: its numbers, and a buffer of the size that follows. Messages on the shapes of
  // what is checked after it tell its sizes.
  void plan(const RoutingPlan& plan) const;
  // A transposed operand [C, Kcap] of `plan`, layout block or gemm.
  void columns(const Fp8Tensor& t, const char* name, int64_t c, const RoutingPlan& plan) const;
  // Data rows and scales for the GEMM move in 16-byte pieces: they start at a multiple of 16 bytes.
  void aligned(const Tensor& t, const char* name, const char* part = "") const;
  // Aligned values [rows, C] in f32, f16 or bf16, C a multiple of `factor`; C.
  int64_t values(const Tensor& t, const char* name, int64_t rows, int64_t factor = 16) const;
  // eps finite and not negative.
  void rule(ScaleRule rule) const;
  // Of an output that is given what tensor(), dtype() and, if `aligned`, aligned() check; one that
  // is wanted gets this shape and its dtype, or the only one it may have.
  void output(Tensor& t, const char* name, std::initializer_list<int64_t> shape,
              std::initializer_list<DType> dtypes, bool aligned = false) const;
  // The same of codes and scales.
  void output(Fp8Tensor& t, const char* name, std::initializer_list<int64_t> shape,
              std::initializer_list<ScaleLayout> layouts,
              std::initializer_list<DType> formats = {DType::e4m3, DType::e5m2}) const;
  // A transposed operand [C, Kcap] of `plan` in this format.
  void output_columns(Fp8Tensor& t, const char* name, int64_t c, const RoutingPlan& plan,
                      DType format) const;
  // A plan whose sizes are all said.
  void output(RoutingPlan& plan) const;

  // No output overlaps an input or another output. Shapes are already checked.
  void disjoint(std::initializer_list<Memory> outputs, std::initializer_list<Memory> inputs) const;

  // The scratch of an op that needs `bytes`, if it needs any.
  void workspace(const Tensor& t, int64_t bytes) const;

  const char* op() const { return op_; }

 private:
  // None over what kernels count in 32 bits.
  void sizes(const char* name, std::initializer_list<int64_t> given) const;
  void layout_of(const Fp8Tensor& t, const char* name,
                 std::initializer_list<ScaleLayout> layouts) const;

  const char* op_;
  Device device_;
  mutable const RoutingPlan* plan_ = nullptr;  // checked, of the caller
};

// first [ranks] of unpermute_unpad and quantize_pack, in host memory.
void check_first(const char* op, const Tensor& first, int64_t ranks);

// The arguments of an operator that is called, checked: every output has its memory.
template <class P>
P checked(const P& given) {
  for_each_field<P>([&]<class T>(const Field<P, T>& field) {
    bool wanted = false;
    if constexpr (std::is_same_v<T, RoutingPlan>)
      wanted = (given.*field.at).buffer.is_wanted();
    else if constexpr (std::is_same_v<T, Tensor> || std::is_same_v<T, Fp8Tensor>)
      wanted = (given.*field.at).is_wanted();
    FP8MOE_CHECK(!wanted, "[", P::op, "] ", field.name,
                 " must have memory; got one that is wanted");
  });
  P p = given;
  outputs(p);
  return p;
}

}  // namespace fp8moe
