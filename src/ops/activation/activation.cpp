// act_quantize and its gradient: what they take.
#include <cmath>

#include "common/backends.h"
#include "common/check.h"

namespace fp8moe {

namespace {

// [rows, width] of z = [gate | up], the plan if any, probs [rows] if any.
void check_act(const Checker& check, int64_t rows, int64_t width, const RoutingPlan& plan,
               const Tensor& probs, float limit) {
  FP8MOE_CHECK(width % 32 == 0, "[", check.op(),
               "] z.shape[1] must be twice a multiple of 16; got ", width);
  if (plan.defined()) {
    check.plan(plan);
    FP8MOE_CHECK(rows == plan.rows(), "[", check.op(), "] z must have the plan's ", plan.rows(),
                 " rows; got ", rows);
  }
  if (probs.defined()) {
    check.tensor(probs, "probs", {rows});
    check.dtype(probs, "probs", {DType::f32});
  }
  FP8MOE_CHECK(limit > 0.0f, "[", check.op(), "] limit must be positive, infinity for none; got ",
               limit);
}

// As the backends have it: 0 stands for no limit.
float backend_limit(float limit) { return std::isinf(limit) ? 0.0f : limit; }

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
  const int64_t inner = p.z.shape[1] / 2;
  check_act(check, rows, p.z.shape[1], p.plan, p.probs, p.limit);
  check.tensor(p.z, "z", {rows, 2 * inner});
  check.aligned(p.z, "z");
  const auto layouts = {ScaleLayout::row, ScaleLayout::gemm};
  check.output(p.h, "h", {rows, inner}, layouts, {DType::e4m3});
  if (p.z_q.defined() || p.z_q.is_wanted())
    check.output(p.z_q, "z_q", {rows, 2 * inner}, layouts, {DType::e4m3});
  check.rule(p.rule);
}

void act_quantize(const ActQuantize& given, Stream stream) {
  const ActQuantize p = checked(given);
  const Checker check("act_quantize", p.z.device);
  check.disjoint({{p.h, "h"}, {p.z_q, "z_q"}},
                 {{p.z, "z"}, {p.probs, "probs"}, {p.plan.buffer, "plan"}});
  if (p.z.numel() == 0) return;
  ActQuantize backends = p;
  backends.limit = backend_limit(p.limit);
  dispatch(backends, p.z.device, stream);
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
  check_act(check, rows, 2 * inner, p.plan, p.probs, p.limit);
  check.tensor(p.dh, "dh", {rows, inner});
  check.aligned(p.dh, "dh");
  check.tensor(p.z, "z", {rows, 2 * inner});
  check.dtype(p.z, "z", {DType::f32, DType::f16, DType::bf16});
  check.aligned(p.z, "z");
  check.output(p.dz, "dz", {rows, 2 * inner}, {ScaleLayout::row, ScaleLayout::gemm});
  if (p.dprobs.defined() || p.dprobs.is_wanted()) {
    FP8MOE_CHECK(p.probs.defined(), "[act_quantize_backward] dprobs needs probs; got none");
    check.output(p.dprobs, "dprobs", {rows}, {DType::f32});
  }
  check_columns(check, p.dz_columns, "dz_columns", 2 * inner, p.plan, p.dz.data.dtype);
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
  ActQuantizeBackward backends = p;
  backends.limit = backend_limit(p.limit);
  dispatch(backends, p.dh.device, stream);
}

}  // namespace fp8moe
