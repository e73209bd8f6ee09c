// act_quantize and its gradient: what they take.
#include <cmath>
#include <iterator>

#include "common/backends.h"
#include "common/check.h"

namespace fp8moe {

namespace {

// The activation's traits, when it is one.
const ActivationTraits& check_activation(const Checker& check, const Activation& a) {
  const auto kind = static_cast<int64_t>(a.kind), kinds = int64_t{std::size(kActivations)};
  FP8MOE_CHECK(kind >= 0 && kind < kinds, "[", check.op(), "] activation.kind must be 0 to ",
               kinds - 1, "; got ", kind);
  const ActivationTraits& of = a.traits();
  FP8MOE_CHECK(of.scaled || (a.alpha == 1.0f && a.offset == 0.0f), "[", check.op(),
               "] activation.alpha and offset must be 1 and 0 of ", of.name, "; got ", a.alpha,
               " and ", a.offset);
  FP8MOE_CHECK(a.alpha >= 1.0f && a.alpha <= 4.0f, "[", check.op(),
               "] activation.alpha must lie in [1, 4]; got ", a.alpha);
  FP8MOE_CHECK(std::isfinite(a.offset), "[", check.op(), "] activation.offset must be finite; got ",
               a.offset);
  FP8MOE_CHECK(a.limit > 0.0f, "[", check.op(),
               "] activation.limit must be positive, infinity for none; got ", a.limit);
  FP8MOE_CHECK(of.limited || std::isinf(a.limit), "[", check.op(),
               "] activation.limit must be infinity of ", of.name, "; got ", a.limit);
  FP8MOE_CHECK(of.gated || !a.interleaved, "[", check.op(),
               "] activation.interleaved must be false of ", of.name,
               ", which has no gate; got true");
  return of;
}

void check_rounding(const Checker& check, int64_t rounding, const Activation& a) {
  FP8MOE_CHECK(rounding >= kRoundNothing && rounding <= kRoundSilu, "[", check.op(),
               "] rounding must be 0 (none), 1 (product) or 2 (silu); got ", rounding);
  const bool plain = a.kind == ActivationKind::swiglu && a.alpha == 1.0f && a.offset == 0.0f &&
                     std::isinf(a.limit);
  FP8MOE_CHECK(rounding == kRoundNothing || plain, "[", check.op(),
               "] rounding needs swiglu without alpha, offset and limit; got rounding ", rounding,
               " of another activation");
}

// The plan and probs [rows] if any.
void check_act(const Checker& check, int64_t rows, const RoutingPlan& plan, const Tensor& probs) {
  if (plan.defined()) {
    check.plan(plan);
    FP8MOE_CHECK(rows == plan.rows(), "[", check.op(), "] z must have the plan's ", plan.rows(),
                 " rows; got ", rows);
  }
  if (probs.defined()) {
    check.tensor(probs, "probs", {rows}, {DType::f32});
  }
}

// An optional transposed operand [c, Kcap]: it needs the plan.
void check_columns(const Checker& check, Fp8Tensor& columns, const char* name, int64_t c,
                   const RoutingPlan& plan, DType format) {
  if (!columns.defined() && !columns.is_wanted()) return;
  FP8MOE_CHECK(plan.defined(), "[", check.op(), "] ", name, " needs a plan; got none");
  check.output_columns(columns, name, c, plan, format);
}

}  // namespace

void outputs(ActQuantize& p) {
  const Checker check("act_quantize", p.z.device);
  check.ndim(p.z, "z", 2);
  check.dtype(p.z, "z", {DType::f32, DType::f16, DType::bf16});
  const int64_t rows = p.z.shape[0];
  const int64_t width = p.z.shape[1], parts = check_activation(check, p.activation).gated ? 2 : 1;
  check_rounding(check, p.rounding, p.activation);
  const int64_t inner = width / parts;
  FP8MOE_CHECK(width % (16 * parts) == 0, "[act_quantize] z.shape[1] must be ",
               parts == 2 ? "twice a" : "a", " multiple of 16; got ", width);
  check_act(check, rows, p.plan, p.probs);
  check.tensor(p.z, "z", {rows, width});
  check.aligned(p.z, "z");
  const auto layouts = {ScaleLayout::row, ScaleLayout::gemm};
  check.output(p.h, "h", {rows, inner}, layouts, {DType::e4m3});
  if (p.z_q.defined() || p.z_q.is_wanted())
    check.output(p.z_q, "z_q", {rows, width}, layouts, {DType::e4m3});
  check.rule(p.rule);
}

void act_quantize(const ActQuantize& given, Stream stream) {
  const ActQuantize p = checked(given);
  const Checker check("act_quantize", p.z.device);
  check.disjoint({{p.h, "h"}, {p.z_q, "z_q"}},
                 {{p.z, "z"}, {p.probs, "probs"}, {p.plan.buffer, "plan"}});
  if (p.z.numel() == 0) return;
  dispatch(p, p.z.device, stream);
}

int64_t workspace_bytes(const ActQuantizeBackward& p) {
  const bool columns = p.dz_columns.defined() || p.h_columns.defined();
  const bool counts = p.dh.device.type == DeviceType::cuda && p.dprobs.defined() && columns;
  return counts ? kZeroWorkspaceBytes : 0;
}

void outputs(ActQuantizeBackward& p) {
  const Checker check("act_quantize_backward", p.dh.device);
  check.ndim(p.dh, "dh", 2);
  check.dtype(p.dh, "dh", {DType::f32, DType::f16, DType::bf16});
  const int64_t rows = p.dh.shape[0];
  const int64_t inner = p.dh.shape[1];
  const int64_t width = check_activation(check, p.activation).gated ? 2 * inner : inner;
  FP8MOE_CHECK(inner % 16 == 0,
               "[act_quantize_backward] dh.shape[1] must be a multiple of 16; got ", inner);
  check_act(check, rows, p.plan, p.probs);
  check.tensor(p.dh, "dh", {rows, inner});
  check.aligned(p.dh, "dh");
  check.tensor(p.z, "z", {rows, width}, {DType::f32, DType::f16, DType::bf16});
  check.aligned(p.z, "z");
  check.output(p.dz, "dz", {rows, width}, {ScaleLayout::row, ScaleLayout::gemm});
  if (p.dprobs.defined() || p.dprobs.is_wanted()) {
    FP8MOE_CHECK(p.probs.defined(), "[act_quantize_backward] dprobs needs probs; got none");
    check.output(p.dprobs, "dprobs", {rows}, {DType::f32});
  }
  check_columns(check, p.dz_columns, "dz_columns", width, p.plan, p.dz.data.dtype);
  check_columns(check, p.h_columns, "h_columns", inner, p.plan, DType::e4m3);
  FP8MOE_CHECK(!p.dz_columns.defined() || !p.h_columns.defined() ||
                   p.dz_columns.layout == p.h_columns.layout,
               "[act_quantize_backward] dz_columns and h_columns must have one scale layout; "
               "got ",
               name_of(p.dz_columns.layout), " and ", name_of(p.h_columns.layout));
  check.rule(p.rule);
}

void act_quantize_backward(const ActQuantizeBackward& given, Stream stream) {
  const ActQuantizeBackward p = checked(given);
  const Checker check("act_quantize_backward", p.dh.device);
  check.workspace(p.workspace, workspace_bytes(p));
  check.disjoint({{p.dz, "dz"},
                  {p.dprobs, "dprobs"},
                  {p.dz_columns, "dz_columns"},
                  {p.h_columns, "h_columns"},
                  {p.workspace, "workspace"}},
                 {{p.dh, "dh"}, {p.z, "z"}, {p.probs, "probs"}, {p.plan.buffer, "plan"}});
  if (p.dh.numel() == 0) return;
  dispatch(p, p.dh.device, stream);
}

}  // namespace fp8moe
