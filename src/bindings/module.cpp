// The extension _C: of each operator in fp8moe/ops.h a function of its fields, in their order.
//
// quantize(x, q, scale, eps): an Fp8Tensor and a RoutingPlan are objects, a ScaleRule two
// arguments, None leaves an optional array out. In an output's place may stand what to allocate
// (reader.h). It returns the outputs, given or made. A workspace that is None is allocated.
#include <nanobind/nanobind.h>

#include <string>
#include <type_traits>

#include "errors.h"
#include "fp8moe/ops.h"
#include "gemm_choice.h"
#include "reader.h"

namespace fp8moe {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

template <class P>
using Run = void (*)(const P&, Stream);

template <class P>
constexpr bool has_workspace = requires(const P& p) { workspace_bytes(p); };

template <class P>
constexpr Role role_of_last = std::get<std::tuple_size_v<decltype(P::fields)> - 1>(P::fields).role;

template <class P>
nb::object call(Run<P> run, const nb::args& given) {
  Reader reader(P::op, given);
  P p;
  for_each_field<P>([&](const auto& field) { reader(p, field); });
  reader.finish();
  if (reader.wants()) outputs(p);
  for_each_field<P>([&](const auto& field) { reader.provide(p, field); });
  if constexpr (has_workspace<P>)  // the last field
    if (!p.workspace.defined())
      if (const int64_t bytes = workspace_bytes(p))
        reader.provide(p.workspace, bytes, role_of_last<P> == Role::zero_workspace);
  const Stream stream = reader.stream();
  {
    nb::gil_scoped_release nogil;
    run(p, stream);
  }
  reader.count_versions();
  return reader.returned();
}

// ---- what Python is told of an operator ---------------------------------------------------------

template <class T>
constexpr const char* kind_of() {
  if constexpr (std::is_same_v<T, Tensor>) return "array";
  if constexpr (std::is_same_v<T, Fp8Tensor>) return "fp8";
  if constexpr (std::is_same_v<T, RoutingPlan>) return "plan";
  if constexpr (std::is_same_v<T, ScaleRule>) return "rule";
  if constexpr (std::is_same_v<T, Activation>) return "activation";
  if constexpr (std::is_same_v<T, DType>) return "format";
  if constexpr (std::is_same_v<T, bool>) return "bool";
  if constexpr (std::is_same_v<T, int64_t>) return "int";
  if constexpr (std::is_same_v<T, float>) return "float";
}

const char* name_of(Role role) {
  static constexpr const char* kNames[] = {
      "in",        "optional_in",    "out",   "optional_out", "status",
      "workspace", "zero_workspace", "option"};
  return kNames[static_cast<int>(role)];
}

// As Python has it: "def quantize(x: ArrayArg, ..., /) -> ...".
template <class P>
std::string signature() {
  std::string text = std::string("def ") + P::op + "(";
  const auto add = [&](const std::string& argument, const std::string& type, Role role) {
    const bool none = role == Role::optional_in || role == Role::optional_out || is_workspace(role);
    text += argument + ": " + type + (none ? " | None" : "") + ", ";
  };
  for_each_field<P>([&]<class T>(const Field<P, T>& field) {
    const std::string kind = kind_of<T>();
    if (kind == "rule") {
      add("scale", "str", field.role);
      return add("eps", "float", field.role);
    }
    const std::string types[][2] = {
        {"array", "fp8moe_cutlass.typing.DLPackArray"},
        {"fp8", "fp8moe_cutlass.tensor.Fp8Tensor"},
        {"plan", "fp8moe_cutlass.routing.RoutingPlan"},
        {"activation", "fp8moe_cutlass.activation.Activation"},
        {"format", "str"},
    };
    std::string type = kind;
    for (const auto& [from, to] : types)
      if (kind == from) type = to;
    const bool out = field.role == Role::out || field.role == Role::optional_out;
    if (out && kind == "array") type += " | bool | str";
    if (out && kind == "fp8") type += " | str | tuple[str, Any]";
    if (out && kind == "plan") type += " | tuple[int, int, int, int, int]";
    if (field.allows & kPlainToo) type += " | fp8moe_cutlass.typing.DLPackArray";
    add(field.name, type, field.role);
  });
  return text + "/) -> Any";
}

template <class P>
void bind(nb::module_& m, Run<P> run) {
  m.def(
      P::op, [run](const nb::args& given) { return call<P>(run, given); },
      nb::sig(signature<P>().c_str()));
}

template <class P>
void describe(nb::dict& all, Run<P>) {
  nb::list fields;
  for_each_field<P>([&]<class T>(const Field<P, T>& field) {
    fields.append(nb::make_tuple(field.name, kind_of<T>(), name_of(field.role),
                                 (field.allows & kPlainToo) != 0));
  });
  all[P::op] = nb::tuple(fields);
}

void bind_operators(nb::module_& m) {
  std::apply([&](auto... run) { (bind(m, run), ...); }, operators);
  m.def(
      "operators",
      [] {
        nb::dict all;
        std::apply([&](auto... run) { (describe(all, run), ...); }, operators);
        return all;
      },
      nb::sig("def operators() -> dict[str, tuple[tuple[str, str, str, bool], ...]]"),
      "Of each operator its fields: name, kind, role, and whether a plain array may stand for an "
      "Fp8Tensor.");
}

}  // namespace
}  // namespace fp8moe

NB_MODULE(_C, m) {
  using namespace fp8moe;
  bind_errors(m);
  bind_operators(m);
  m.attr("ZERO_WORKSPACE_BYTES") = kZeroWorkspaceBytes;
  m.def(
      "activations",
      [] {
        nb::dict all;
        for (const ActivationTraits& a : kActivations)
          all[a.name] = nb::make_tuple(a.gated, a.limited, a.scaled);
        return all;
      },
      nb::sig("def activations() -> dict[str, tuple[bool, bool, bool]]"),
      "Of each kind of activation: whether it has a gate, a limit, and alpha and offset.");
  m.def("attach_torch", &attach_torch, "module"_a, nb::sig("def attach_torch(module: Any) -> None"),
        "From then on torch's arrays are allocated, and their gradients, tangents and versions "
        "looked at.");
  bind_gemm_choice(m);
  m.def("build_info", [] {
    const BuildInfo info = build_info();
    nb::typed<nb::dict, nb::str, nb::any> d;
    d["version"] = info.version;
    d["cuda"] = info.cuda;
    d["cuda_toolkit"] = info.cuda_toolkit;
    d["cutlass"] = info.cutlass;
    d["cpu_isa"] = info.cpu_isa;
    return d;
  });
  m.def("require_cuda", &require_cuda, "device"_a = 0,
        "Returns where this build runs on that GPU; else raises what the first CUDA array would.");
}
