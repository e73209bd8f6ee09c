// One call of an operator from Python: positional arguments, in the order of P::fields, into P.
//
// An Fp8Tensor and a RoutingPlan are read by their attributes, an array through DLPack's C exchange
// API where its type offers it (torch) and through nb::ndarray elsewhere. Nothing is copied. What
// is wrong becomes one InvalidArgument: "[op] name must be ...; got ...".
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

#include "exchange_api.h"
#include "fp8moe/ops.h"

namespace fp8moe {

// torch.Tensor and torch.is_grad_enabled: from then on, what an operator writes is told to the
// caller, and an argument that requires grad is refused while grad mode is on.
void attach_torch(nanobind::object tensor, nanobind::object is_grad_enabled);

class __attribute__((visibility("hidden"))) Reader {
 public:
  // flat: as torch's dispatcher has them, an Fp8Tensor in three arguments (data, scale_inv or None,
  // layout), a plan in six (buffer and sizes). Gradients are then the dispatcher's to see.
  Reader(const char* op, const nanobind::args& given, bool flat);

  template <class P, class T>
  void operator()(P& p, const Field<P, T>& field) {
    name_ = field.name, role_ = field.role, allows_ = field.allows;
    read(p.*field.at);
  }

  void finish() const;  // no argument is left over

  // Of the framework of the CUDA arrays, or use_stream's where it names none.
  Stream stream() const;

  // torch's tensors that are outputs, in a list; None: there are none.
  nanobind::object written() const;

 private:
  using Object = nanobind::handle;

  void read(Tensor& t);
  void read(Fp8Tensor& q);
  void read(RoutingPlan& plan);
  void read(ScaleRule& rule);
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
  bool output() const {
    return role_ == Role::out || role_ == Role::optional_out || role_ == Role::status ||
           is_workspace(role_);
  }
  // Throws "[op] <name><part> must be <rule>[ or None]; got <given>".
  [[noreturn]] void refuse(Object given, const std::string& rule, const char* part = "") const;
  template <typename... Parts>
  [[noreturn]] void fail(const char* part, const Parts&... parts) const;

  const char* op_;
  const nanobind::args& given_;
  bool flat_;
  size_t at_ = 0;

  const char* name_ = "";
  Role role_ = Role::in;
  unsigned allows_ = 0;

  std::vector<nanobind::ndarray<nanobind::ro>> lent_;  // they end the loan when the call is over
  std::vector<nanobind::object> copies_;
  PyObject* written_[16];
  Py_ssize_t written_count_ = 0;
  const ExchangeApi* api_ = nullptr;  // of the first CUDA array that has one
  int32_t device_ = 0;
  bool cuda_ = false;
  bool refuses_grad_;
};

}  // namespace fp8moe
