#include "common/backends.h"
#include "common/check.h"

namespace fp8moe {

int64_t workspace_bytes(const GroupedGemmWgrad& p) {
  return p.dw.device.type == DeviceType::cuda ? kZeroWorkspaceBytes : 0;
}

void outputs(GroupedGemmWgrad& p) {
  const Checker check("grouped_gemm_wgrad", p.dy_t.data.device);
  check.ndim(p.dy_t.data, "dy_t", 2);
  check.ndim(p.x_t.data, "x_t", 2);
  check.plan(p.plan);
  const int64_t n = p.dy_t.data.shape[0];
  const int64_t k = p.x_t.data.shape[0];
  check.columns(p.dy_t, "dy_t", n, p.plan);
  check.columns(p.x_t, "x_t", k, p.plan);
  check.e4m3(p.x_t, "x_t");
  FP8MOE_CHECK(p.dy_t.layout == p.x_t.layout,
               "[grouped_gemm_wgrad] dy_t and x_t must have one scale "
               "layout; got ",
               name_of(p.dy_t.layout), " and ", name_of(p.x_t.layout));
  check.multiple(n, "N", 16);
  check.multiple(k, "K", 16);
  check.output(p.dw, "dw", {p.plan.experts, n, k}, {DType::f32, DType::bf16}, true);
}

void grouped_gemm_wgrad(const GroupedGemmWgrad& given, Stream stream) {
  const GroupedGemmWgrad p = checked(given);
  const Checker check("grouped_gemm_wgrad", p.dy_t.data.device);
  check.workspace(p.workspace, workspace_bytes(p));
  check.disjoint({{p.dw, "dw"}, {p.workspace, "workspace"}},
                 {{p.dy_t, "dy_t"}, {p.x_t, "x_t"}, {p.plan.buffer, "plan"}});
  if (p.dw.numel() == 0) return;
  dispatch(p, p.dy_t.data.device, stream);
}

}  // namespace fp8moe
