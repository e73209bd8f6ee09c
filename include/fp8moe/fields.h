// SPDX-License-Identifier: Apache-2.0
// What an operator's parameter struct says of its members: a tuple of names and roles, from which
// bindings, schemas and tests follow. See PermutePad in ops.h for one.
#pragma once

#include <cstdint>
#include <tuple>

namespace fp8moe {

enum class Role : uint8_t {
  in,
  optional_in,
  out,
  optional_out,
  status,          // an input whose status words the operator counts up
  workspace,       // at least workspace_bytes(p) bytes, whatever they hold
  zero_workspace,  // the same of zeros, which are zeros again when the operator has run
  option,
};

constexpr bool is_workspace(Role role) {
  return role == Role::workspace || role == Role::zero_workspace;
}

// What else a member allows or needs.
enum : unsigned {
  kStridedRows = 1,  // rows of a 2-D input may lie apart
  kPlainToo = 2,     // an Fp8Tensor without scale_inv stands for a plain tensor
  kAligned = 4,      // a Tensor that starts at a multiple of 16 bytes, as Fp8Tensors and plans do
};

template <class P, class T>
struct Field {
  const char* name;
  T P::* at;
  Role role;
  unsigned allows = 0;
};

template <class P, class T>
constexpr Field<P, T> in(const char* name, T P::* at, unsigned allows = 0) {
  return {name, at, Role::in, allows};
}
template <class P, class T>
constexpr Field<P, T> optional_in(const char* name, T P::* at, unsigned allows = 0) {
  return {name, at, Role::optional_in, allows};
}
template <class P, class T>
constexpr Field<P, T> out(const char* name, T P::* at, unsigned allows = 0) {
  return {name, at, Role::out, allows};
}
template <class P, class T>
constexpr Field<P, T> optional_out(const char* name, T P::* at, unsigned allows = 0) {
  return {name, at, Role::optional_out, allows};
}
template <class P, class T>
constexpr Field<P, T> status(const char* name, T P::* at) {
  return {name, at, Role::status};
}
template <class P, class T>
constexpr Field<P, T> scratch(const char* name, T P::* at) {
  return {name, at, Role::workspace};
}
template <class P, class T>
constexpr Field<P, T> zero_scratch(const char* name, T P::* at) {
  return {name, at, Role::zero_workspace};
}
template <class P, class T>
constexpr Field<P, T> option(const char* name, T P::* at) {
  return {name, at, Role::option};
}

// f(field) of each, in order.
template <class P, class F>
constexpr void for_each_field(F&& f) {
  std::apply([&](const auto&... field) { (f(field), ...); }, P::fields);
}

}  // namespace fp8moe
