// One call of an operator from Python: positional arguments, in the order of P::fields, into P.
//
// An Fp8Tensor, a RoutingPlan and an Activation are read by their attributes, an array through
// DLPack's C exchange API where its type offers it (torch) and through nb::ndarray elsewhere.
// Nothing is copied. What is wrong becomes one InvalidArgument: "[op] name must be ...; got ...".
//
// In an output's place may stand what to allocate: of an array True or the name of its dtype, of an
// Fp8Tensor its scale layout or (layout, format), of a plan its five sizes, -1 where they follow.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

#include "exchange_api.h"
#include "fp8moe/ops.h"

namespace fp8moe {

// The module torch: from then on its arrays are allocated and the versions of those written are
// counted. An argument that requires grad is refused while grad mode is on, one with a tangent
// always.
void attach_torch(nanobind::object module);

class __attribute__((visibility("hidden"))) Reader {
 public:
  Reader(const char* op, const nanobind::args& given);

  template <class P, class T>
  void operator()(P& p, const Field<P, T>& field) {
    name_ = field.name, role_ = field.role, allows_ = field.allows;
    read(p.*field.at);
  }

  void finish() const;  // no argument is left over

  bool wants() const { return wants_; }  // an output is to be allocated

  // Memory for what outputs(p) has said of a field; then the field is what `returned` has.
  template <class P, class T>
  void provide(P& p, const Field<P, T>& field) {
    name_ = field.name, role_ = field.role;
    if constexpr (std::is_same_v<T, Tensor> || std::is_same_v<T, Fp8Tensor> ||
                  std::is_same_v<T, RoutingPlan>)
      if (makes()) results_.push_back(made(p.*field.at));
  }
  void provide(Tensor& workspace, int64_t bytes, bool zero);

  // Of the framework of the CUDA arrays, or use_stream's where it names none.
  Stream stream() const;

  // Counts the versions of torch's tensors that were given as outputs.
  void count_versions() const;

  // The outputs, given or made, None where there is none: in a tuple, or the only one.
  nanobind::object returned() const;

 private:
  using Object = nanobind::handle;

  void read(Tensor& t);
  void read(Fp8Tensor& q);
  void read(RoutingPlan& plan);
  bool asked(Object given, Tensor& t);
  bool asked(Object given, Fp8Tensor& q);
  bool asked(Object given, RoutingPlan& plan);
  DType format_of(Object given) const;
  nanobind::object made(Tensor& t);
  nanobind::object made(Fp8Tensor& q);
  nanobind::object made(RoutingPlan& plan);
  nanobind::object allocate(Tensor& t);

  void read(ScaleRule& rule);
  void read(Activation& activation);
  void read(DType& format);
  void read(bool& value) { value = truth(next()); }
  void read(int64_t& value) { value = integer(next()); }
  void read(float& value) { value = number(next()); }

  Object next();
  Tensor array(Object given, const char* part, bool strided_rows);
  Tensor aligned_array(Object given, const char* part, bool strided_rows);
  Tensor array_of_copy(Object given, const char* method, const char* part, bool strided_rows);
  nanobind::dlpack::dltensor view(Object given, const char* part, const ExchangeApi* api);
  bool is_torch(Object given) const;
  void look_at(Object given, const Tensor& t, const char* part);
  int64_t named_stream() const;
  int64_t integer(Object given, const char* part = "") const;
  float number(Object given) const;
  bool truth(Object given) const;
  ScaleKind scale_kind(Object given) const;
  ScaleLayout layout(Object given) const;

  bool optional() const {
    return role_ == Role::optional_in || role_ == Role::optional_out || is_workspace(role_);
  }
  bool makes() const { return role_ == Role::out || role_ == Role::optional_out; }
  bool output() const { return makes() || role_ == Role::status || is_workspace(role_); }
  // Throws "[op] <name><part> must be <rule>[ or None]; got <given>".
  [[noreturn]] void refuse(Object given, const std::string& rule, const char* part = "") const;
  template <typename... Parts>
  [[noreturn]] void fail(const char* part, const Parts&... parts) const;

  const char* op_;
  const nanobind::args& given_;
  size_t at_ = 0;

  const char* name_ = "";
  Role role_ = Role::in;
  unsigned allows_ = 0;

  std::vector<nanobind::ndarray<nanobind::ro>> lent_;  // they end the loan when the call is over
  std::vector<nanobind::object> kept_;                 // until the call is over
  std::vector<PyObject*> written_;                     // of torch, borrowed
  std::vector<nanobind::object> results_;
  std::vector<nanobind::object> outputs_;  // as given, in the order of the fields
  size_t next_output_ = 0;
  Object like_;  // the first array that is given
  Device like_device_;
  Object fp8_like_;  // the first Fp8Tensor
  int pow2_ = -1;    // whether a rule makes power-of-two scales
  bool wants_ = false;
  const ExchangeApi* api_ = nullptr;  // of the first CUDA array that has one
  int32_t device_ = 0;
  bool cuda_ = false;
  bool refuses_grad_ = false;
  bool duals_ = false;  // tensors may have tangents
};

}  // namespace fp8moe
