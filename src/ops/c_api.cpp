// The C ABI: converts the plain structs, calls the C++ operator, turns exceptions into statuses.
#include "fp8moe/c_api.h"

#include <new>
#include <string>

#include "common/check.h"
#include "fp8moe/ops.h"

namespace fp8moe {
namespace {

static_assert(FP8MOE_F32 == static_cast<int>(DType::f32));
static_assert(FP8MOE_BF16 == static_cast<int>(DType::bf16));
static_assert(FP8MOE_E5M2 == static_cast<int>(DType::e5m2));
static_assert(FP8MOE_BOOL == static_cast<int>(DType::boolean));
static_assert(FP8MOE_CUDA == static_cast<int>(DeviceType::cuda));
static_assert(FP8MOE_LAYOUT_BLOCK == static_cast<int>(ScaleLayout::block));

thread_local std::string last_error;

fp8moe_status failed(fp8moe_status status, const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {  // no memory for the text: the status must do
    last_error.clear();
  }
  return status;
}

template <typename Body>
fp8moe_status guarded(Body&& body) noexcept {
  try {
    body();
    return FP8MOE_OK;
  } catch (const std::invalid_argument& e) {
    return failed(FP8MOE_INVALID_ARGUMENT, e.what());
  } catch (const DeviceUnavailable& e) {
    return failed(FP8MOE_DEVICE_UNAVAILABLE, e.what());
  } catch (const UnsupportedDevice& e) {
    return failed(FP8MOE_UNSUPPORTED_DEVICE, e.what());
  } catch (const CudaError& e) {
    return failed(FP8MOE_CUDA_ERROR, e.what());
  } catch (const std::bad_alloc&) {
    return failed(FP8MOE_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::exception& e) {
    return failed(FP8MOE_INTERNAL_ERROR, e.what());
  } catch (...) {
    return failed(FP8MOE_INTERNAL_ERROR, "unknown error");
  }
}

// A number from C that must name a member of an enum whose last member is `last`.
template <typename Enum>
Enum to_enum(int32_t value, Enum last, const char* what) {
  FP8MOE_CHECK(value >= 0 && value <= static_cast<int32_t>(last), "[c_api] ", what,
               " must be between 0 and ", static_cast<int32_t>(last), "; got ", value);
  return static_cast<Enum>(value);
}

Tensor tensor(const fp8moe_tensor* c) {
  Tensor t;
  if (c == nullptr) return t;
  FP8MOE_CHECK(c->ndim >= 0 && c->ndim <= Tensor::kMaxDims, "[c_api] ndim must be between 0 and ",
               Tensor::kMaxDims, "; got ", c->ndim);
  t.data = c->data;
  t.dtype = to_enum(c->dtype, DType::boolean, "dtype");
  t.device = {to_enum(c->device_type, DeviceType::cuda, "device_type"), c->device_index};
  t.ndim = c->ndim;
  int64_t bytes = size_of(t.dtype);
  for (int i = 0; i < c->ndim; ++i) {
    FP8MOE_CHECK(c->shape[i] >= 0, "[c_api] shape must not be negative; got ", c->shape[i]);
    FP8MOE_CHECK(!__builtin_mul_overflow(bytes, std::max<int64_t>(c->shape[i], 1), &bytes),
                 "[c_api] shape must have less than 2^63 bytes; got ", c->shape[i],
                 " in dimension ", i);
    t.shape[i] = c->shape[i];
  }
  FP8MOE_CHECK(c->row_stride >= 0 && (c->row_stride == 0 || c->ndim == 2),
               "[c_api] row_stride must be 0, or positive with 2 dimensions; got ", c->row_stride,
               " with ", c->ndim);
  FP8MOE_CHECK(!__builtin_mul_overflow(size_of(t.dtype) * std::max<int64_t>(t.shape[0], 1),
                                       c->row_stride, &bytes),
               "[c_api] rows must span less than 2^63 bytes; got row_stride ", c->row_stride);
  t.row_stride = c->row_stride;
  return t;
}

Fp8Tensor fp8(const fp8moe_fp8_tensor* c) {
  if (c == nullptr) return {};
  return {.data = tensor(&c->data),
          .scale_inv = tensor(&c->scale_inv),
          .layout = to_enum(c->layout, ScaleLayout::block, "layout")};
}

RoutingPlan sizes(const fp8moe_plan& c) {
  RoutingPlan plan;
  plan.tokens = c.tokens;
  plan.slots = c.slots;
  plan.experts = c.experts;
  plan.align = c.align;
  plan.capacity = c.capacity;
  return plan;
}

RoutingPlan plan(const fp8moe_plan* c) {
  if (c == nullptr) return {};
  RoutingPlan plan = sizes(*c);
  plan.buffer = tensor(&c->buffer);
  return plan;
}

// What `f` returns, or -1 where it throws.
template <typename F>
int64_t number(F f) {
  int64_t result = -1;
  guarded([&] { result = f(); });
  return result;
}

// One of the plan's sizes, or -1 where its numbers make none.
int64_t size(const fp8moe_plan* c, int64_t (RoutingPlan::*of)() const) {
  return number([&] {
    FP8MOE_CHECK(c != nullptr, "[c_api] plan must be given; got NULL");
    const RoutingPlan plan = sizes(*c);
    Checker("c_api", {}).plan_sizes(plan);
    return (plan.*of)();
  });
}

ScaleRule rule(fp8moe_scale_rule c) { return {.pow2 = c.pow2 != 0, .eps = c.eps}; }

}  // namespace
}  // namespace fp8moe

using namespace fp8moe;

extern "C" {

const char* fp8moe_last_error(void) { return last_error.c_str(); }

fp8moe_build_info fp8moe_get_build_info(void) {
  const BuildInfo info = build_info();
  return {info.version, info.cuda, info.cuda_toolkit, info.cutlass, info.cpu_isa};
}

int64_t fp8moe_plan_rows(const fp8moe_plan* p) { return size(p, &RoutingPlan::rows); }
int64_t fp8moe_plan_columns(const fp8moe_plan* p) { return size(p, &RoutingPlan::columns); }
int64_t fp8moe_plan_buffer_size(const fp8moe_plan* p) { return size(p, &RoutingPlan::buffer_size); }
int64_t fp8moe_plan_tokens_per_expert_at(const fp8moe_plan* p) {
  return size(p, &RoutingPlan::tokens_per_expert_at);
}
int64_t fp8moe_plan_row_offsets_at(const fp8moe_plan* p) {
  return size(p, &RoutingPlan::row_offsets_at);
}
int64_t fp8moe_plan_col_offsets_at(const fp8moe_plan* p) {
  return size(p, &RoutingPlan::col_offsets_at);
}
int64_t fp8moe_plan_token_of_row_at(const fp8moe_plan* p) {
  return size(p, &RoutingPlan::token_of_row_at);
}
int64_t fp8moe_plan_slot_of_row_at(const fp8moe_plan* p) {
  return size(p, &RoutingPlan::slot_of_row_at);
}
int64_t fp8moe_plan_row_of_at(const fp8moe_plan* p) { return size(p, &RoutingPlan::row_of_at); }
int64_t fp8moe_plan_col_blocks_at(const fp8moe_plan* p) {
  return size(p, &RoutingPlan::col_blocks_at);
}

fp8moe_status fp8moe_quantize(const fp8moe_tensor* x, const fp8moe_fp8_tensor* q,
                              fp8moe_scale_rule r, void* stream) {
  return guarded([&] { quantize(tensor(x), fp8(q), rule(r), {stream}); });
}

fp8moe_status fp8moe_quantize_weight(const fp8moe_tensor* w, const fp8moe_fp8_tensor* q,
                                     const fp8moe_fp8_tensor* q_t, fp8moe_scale_rule r,
                                     void* stream) {
  return guarded([&] { quantize_weight(tensor(w), fp8(q), fp8(q_t), rule(r), {stream}); });
}

fp8moe_status fp8moe_dequantize(const fp8moe_fp8_tensor* q, const fp8moe_tensor* x, void* stream) {
  return guarded([&] { dequantize(fp8(q), tensor(x), {stream}); });
}

fp8moe_status fp8moe_route_workspace(const fp8moe_plan* p, int64_t* bytes) {
  return guarded([&] {
    FP8MOE_CHECK(bytes != nullptr, "[route_workspace] bytes must be given; got NULL");
    *bytes = route_workspace(plan(p));
  });
}

fp8moe_status fp8moe_route(const fp8moe_tensor* topk_idx, const fp8moe_tensor* routing_map,
                           const fp8moe_plan* p, const fp8moe_tensor* workspace, void* stream) {
  return guarded(
      [&] { route(tensor(topk_idx), tensor(routing_map), plan(p), tensor(workspace), {stream}); });
}

fp8moe_status fp8moe_plan_from_counts(const fp8moe_tensor* tokens_per_expert, const fp8moe_plan* p,
                                      void* stream) {
  return guarded([&] { plan_from_counts(tensor(tokens_per_expert), plan(p), {stream}); });
}

fp8moe_status fp8moe_permute_pad(const fp8moe_tensor* x, const fp8moe_plan* p,
                                 const fp8moe_tensor* probs, const fp8moe_tensor* y,
                                 const fp8moe_tensor* row_probs, void* stream) {
  return guarded([&] {
    permute_pad(tensor(x), plan(p), tensor(probs), tensor(y), tensor(row_probs), false, {stream});
  });
}

fp8moe_status fp8moe_permute_pad_fp8(const fp8moe_fp8_tensor* x, const fp8moe_plan* p,
                                     const fp8moe_tensor* probs, const fp8moe_fp8_tensor* y,
                                     const fp8moe_tensor* row_probs, void* stream) {
  return guarded([&] {
    permute_pad(fp8(x), plan(p), tensor(probs), fp8(y), tensor(row_probs), false, {stream});
  });
}

fp8moe_status fp8moe_permute_pad_backward(const fp8moe_tensor* dy, const fp8moe_plan* p,
                                          const fp8moe_tensor* row_dprobs, const fp8moe_tensor* dx,
                                          const fp8moe_tensor* dprobs, void* stream) {
  return guarded([&] {
    permute_pad_backward(tensor(dy), plan(p), tensor(row_dprobs), tensor(dx), tensor(dprobs),
                         {stream});
  });
}

fp8moe_status fp8moe_unpermute_unpad(const fp8moe_tensor* y, const fp8moe_plan* p,
                                     const fp8moe_tensor* probs, const fp8moe_tensor* out,
                                     void* stream) {
  return guarded(
      [&] { unpermute_unpad(tensor(y), plan(p), tensor(probs), tensor(out), {stream}); });
}

fp8moe_status fp8moe_unpermute_unpad_backward(const fp8moe_tensor* dout, const fp8moe_plan* p,
                                              const fp8moe_tensor* y, const fp8moe_tensor* probs,
                                              const fp8moe_tensor* dy, const fp8moe_tensor* dprobs,
                                              void* stream) {
  return guarded([&] {
    unpermute_unpad_backward(tensor(dout), plan(p), tensor(y), tensor(probs), tensor(dy),
                             tensor(dprobs), {stream});
  });
}

fp8moe_status fp8moe_dispatch_plan_workspace(const fp8moe_plan* p, int64_t* bytes) {
  return guarded([&] {
    FP8MOE_CHECK(bytes != nullptr, "[dispatch_plan_workspace] bytes must be given; got NULL");
    *bytes = dispatch_plan_workspace(plan(p));
  });
}

fp8moe_status fp8moe_dispatch_plan(const fp8moe_tensor* topk_idx, int64_t num_experts,
                                   int64_t segment, const fp8moe_plan* p,
                                   const fp8moe_tensor* counts, const fp8moe_tensor* workspace,
                                   void* stream) {
  return guarded([&] {
    dispatch_plan(tensor(topk_idx), num_experts, segment, plan(p), tensor(counts),
                  tensor(workspace), {stream});
  });
}

int64_t fp8moe_packed_row_bytes(int64_t hidden, int64_t slots) {
  return number([&] {
    constexpr int64_t kMost = INT64_MAX / 32;
    FP8MOE_CHECK(hidden >= 0 && hidden <= kMost && slots >= 0 && slots <= kMost,
                 "[packed_row_bytes] hidden and slots must be in [0, 2^58); got ", hidden, " and ",
                 slots);
    return packed_row_bytes(hidden, slots);
  });
}

fp8moe_status fp8moe_quantize_pack(const fp8moe_tensor* x, const fp8moe_tensor* topk_idx,
                                   const fp8moe_tensor* probs, int64_t num_experts,
                                   const fp8moe_plan* p, const fp8moe_tensor* packed,
                                   int32_t fp8_dtype, fp8moe_scale_rule r, void* stream) {
  return guarded([&] {
    quantize_pack(tensor(x), tensor(topk_idx), tensor(probs), num_experts, plan(p), tensor(packed),
                  to_enum(fp8_dtype, DType::boolean, "fp8_dtype"), rule(r), {stream});
  });
}

fp8moe_status fp8moe_unpack(const fp8moe_tensor* packed, int64_t hidden,
                            const fp8moe_tensor* topk_idx, const fp8moe_tensor* probs,
                            void* stream) {
  return guarded(
      [&] { unpack(tensor(packed), hidden, tensor(topk_idx), tensor(probs), {stream}); });
}

fp8moe_status fp8moe_transpose_fp8(const fp8moe_fp8_tensor* q, const fp8moe_plan* p,
                                   const fp8moe_fp8_tensor* columns, int32_t requantize,
                                   fp8moe_scale_rule r, void* stream) {
  return guarded(
      [&] { transpose_fp8(fp8(q), plan(p), fp8(columns), requantize != 0, rule(r), {stream}); });
}

fp8moe_status fp8moe_permute_transpose_fp8(const fp8moe_fp8_tensor* q, const fp8moe_plan* p,
                                           const fp8moe_fp8_tensor* columns, void* stream) {
  return guarded([&] { permute_transpose_fp8(fp8(q), plan(p), fp8(columns), {stream}); });
}

fp8moe_status fp8moe_count_codes(const fp8moe_fp8_tensor* q, const fp8moe_plan* p,
                                 const fp8moe_fp8_tensor* columns, int64_t stride,
                                 const fp8moe_tensor* counts, void* stream) {
  return guarded(
      [&] { count_codes(fp8(q), plan(p), fp8(columns), stride, tensor(counts), {stream}); });
}

fp8moe_status fp8moe_act_quantize(const fp8moe_tensor* z, const fp8moe_plan* p,
                                  const fp8moe_tensor* probs, float limit,
                                  const fp8moe_fp8_tensor* h, const fp8moe_fp8_tensor* z_q,
                                  fp8moe_scale_rule r, void* stream) {
  return guarded([&] {
    act_quantize(tensor(z), plan(p), tensor(probs), limit, fp8(h), fp8(z_q), rule(r), {stream});
  });
}

fp8moe_status fp8moe_act_quantize_backward(const fp8moe_tensor* dh, const fp8moe_tensor* z,
                                           const fp8moe_plan* p, const fp8moe_tensor* probs,
                                           float limit, const fp8moe_fp8_tensor* dz,
                                           const fp8moe_tensor* dprobs,
                                           const fp8moe_fp8_tensor* dz_columns,
                                           const fp8moe_fp8_tensor* h_columns, fp8moe_scale_rule r,
                                           void* stream) {
  return guarded([&] {
    act_quantize_backward(tensor(dh), tensor(z), plan(p), tensor(probs), limit, fp8(dz),
                          tensor(dprobs), fp8(dz_columns), fp8(h_columns), rule(r), {stream});
  });
}

fp8moe_status fp8moe_grouped_gemm(const fp8moe_fp8_tensor* a, const fp8moe_fp8_tensor* w,
                                  const fp8moe_plan* p, const fp8moe_tensor* d, void* stream) {
  return guarded([&] { grouped_gemm(fp8(a), fp8(w), plan(p), tensor(d), {stream}); });
}

fp8moe_status fp8moe_grouped_gemm_wgrad(const fp8moe_fp8_tensor* dy_t, const fp8moe_fp8_tensor* x_t,
                                        const fp8moe_plan* p, const fp8moe_tensor* dw,
                                        int32_t accumulate, void* stream) {
  return guarded([&] {
    grouped_gemm_wgrad(fp8(dy_t), fp8(x_t), plan(p), tensor(dw), accumulate != 0, {stream});
  });
}

}  // extern "C"
