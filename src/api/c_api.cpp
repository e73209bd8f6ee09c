// The C ABI: converts the plain structs, calls the C++ operator, turns exceptions into statuses.
#include "fp8moe/c_api.h"

#include <algorithm>
#include <cstring>
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
static_assert(FP8MOE_SQRT_SOFTPLUS == static_cast<int>(kSqrtSoftplus));
static_assert(FP8MOE_LAYOUT_BLOCK == static_cast<int>(ScaleLayout::block));
static_assert(FP8MOE_ZERO_WORKSPACE_BYTES == kZeroWorkspaceBytes);

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
  const bool zeros = c->data == nullptr && c->ndim == 0;
  if (zeros) return t;  // as a NULL pointer
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

ScaleRule rule(fp8moe_scale_rule c) {
  return {.kind = static_cast<ScaleKind>(c.kind), .eps = c.eps};
}

Activation activation(const fp8moe_activation& c) {
  return {.kind = static_cast<ActivationKind>(c.kind),
          .alpha = c.alpha,
          .offset = c.offset,
          .limit = c.limit,
          .interleaved = c.interleaved != 0};
}

// ---- each operator's arguments
// -------------------------------------------------------------------

Quantize params(const fp8moe_quantize_args& c) {
  return {.x = tensor(c.x), .q = fp8(c.q), .rule = rule(c.rule)};
}

QuantizeWeight params(const fp8moe_quantize_weight_args& c) {
  return {.w = tensor(c.w),
          .below = tensor(c.below),
          .q = fp8(c.q),
          .q_t = fp8(c.q_t),
          .rule = rule(c.rule)};
}

TurnWeight params(const fp8moe_turn_weight_args& c) { return {.q = fp8(c.q), .q_t = fp8(c.q_t)}; }

Dequantize params(const fp8moe_dequantize_args& c) { return {.q = fp8(c.q), .x = tensor(c.x)}; }

Route params(const fp8moe_route_args& c) {
  return {.topk_idx = tensor(c.topk_idx),
          .routing_map = tensor(c.routing_map),
          .plan = plan(c.plan),
          .workspace = tensor(c.workspace)};
}

PlanFromCounts params(const fp8moe_plan_from_counts_args& c) {
  return {.tokens_per_expert = tensor(c.tokens_per_expert), .plan = plan(c.plan)};
}

PlanFromRowIdMap params(const fp8moe_plan_from_row_id_map_args& c) {
  return {.row_id_map = tensor(c.row_id_map),
          .pad_offsets = tensor(c.pad_offsets),
          .plan = plan(c.plan)};
}

// Of equal length, as tokens_per_expert has them.
int64_t sequences(const fp8moe_router_topk_args& c) {
  return std::max<int64_t>(
      1, tensor(c.tokens_per_expert).shape[0] / std::max<int64_t>(1, tensor(c.logits).shape[1]));
}

RouterTopk params(const fp8moe_router_topk_args& c) {
  return {.logits = tensor(c.logits),
          .selection_bias = tensor(c.selection_bias),
          .padding = tensor(c.padding),
          .given_idx = tensor(c.given_idx),
          .top_k = tensor(c.topk_weights).shape[1],
          .sequences = sequences(c),
          .scores = tensor(c.scores),
          .topk_idx = tensor(c.topk_idx),
          .topk_weights = tensor(c.topk_weights),
          .tokens_per_expert = tensor(c.tokens_per_expert),
          .score = c.score,
          .select_by_logits = c.select_by_logits != 0,
          .num_groups = c.num_groups,
          .topk_groups = c.topk_groups,
          .best_per_group = c.best_per_group,
          .closed_value = c.closed_value,
          .softmax_after_topk = c.softmax_after_topk != 0,
          .normalize = c.normalize != 0,
          .epsilon = c.epsilon,
          .routed_scaling_factor = c.routed_scaling_factor};
}

RouterTopkBackward params(const fp8moe_router_topk_backward_args& c) {
  return {.dweights = tensor(c.dweights),
          .dscores = tensor(c.dscores),
          .scores = tensor(c.scores),
          .topk_idx = tensor(c.topk_idx),
          .topk_weights = tensor(c.topk_weights),
          .dlogits = tensor(c.dlogits),
          .score = c.score,
          .softmax_after_topk = c.softmax_after_topk != 0,
          .normalize = c.normalize != 0,
          .epsilon = c.epsilon,
          .routed_scaling_factor = c.routed_scaling_factor};
}

PermutePad params(const fp8moe_permute_pad_args& c) {
  return {.x = fp8(c.x),
          .plan = plan(c.plan),
          .probs = tensor(c.probs),
          .y = fp8(c.y),
          .row_probs = tensor(c.row_probs),
          .zero_unweighted = c.zero_unweighted != 0};
}

PermutePadBackward params(const fp8moe_permute_pad_backward_args& c) {
  return {.dy = tensor(c.dy),
          .plan = plan(c.plan),
          .row_dprobs = tensor(c.row_dprobs),
          .dx = tensor(c.dx),
          .dprobs = tensor(c.dprobs)};
}

UnpermuteUnpad params(const fp8moe_unpermute_unpad_args& c) {
  return {.y = tensor(c.y),
          .plan = plan(c.plan),
          .probs = tensor(c.probs),
          .peers = tensor(c.peers),
          .first = tensor(c.first),
          .out = tensor(c.out)};
}

UnpermuteUnpadBackward params(const fp8moe_unpermute_unpad_backward_args& c) {
  return {.dout = tensor(c.dout),
          .plan = plan(c.plan),
          .y = tensor(c.y),
          .probs = tensor(c.probs),
          .dy = tensor(c.dy),
          .dprobs = tensor(c.dprobs)};
}

DispatchPlan params(const fp8moe_dispatch_plan_args& c) {
  return {.topk_idx = tensor(c.topk_idx),
          .num_experts = c.num_experts,
          .segment = c.segment,
          .plan = plan(c.plan),
          .counts = tensor(c.counts),
          .dropped = tensor(c.dropped),
          .workspace = tensor(c.workspace)};
}

QuantizePack params(const fp8moe_quantize_pack_args& c) {
  return {.x = tensor(c.x),
          .topk_idx = tensor(c.topk_idx),
          .probs = tensor(c.probs),
          .num_experts = c.num_experts,
          .plan = plan(c.plan),
          .peers = tensor(c.peers),
          .first = tensor(c.first),
          .packed = tensor(c.packed),
          .fp8_dtype = to_enum(c.fp8_dtype, DType::boolean, "fp8_dtype"),
          .rule = rule(c.rule)};
}

Unpack params(const fp8moe_unpack_args& c) {
  return {.packed = tensor(c.packed),
          .hidden = c.hidden,
          .slots = tensor(c.topk_idx).shape[1],
          .topk_idx = tensor(c.topk_idx),
          .probs = tensor(c.probs)};
}

ShareWords params(const fp8moe_share_words_args& c) {
  return {.words = tensor(c.words),
          .more = tensor(c.more),
          .peers = tensor(c.peers),
          .mailbox = tensor(c.mailbox),
          .calls = tensor(c.calls),
          .ended = tensor(c.ended),
          .late = tensor(c.late),
          .rank = c.rank,
          .timeout_ms = c.timeout_ms,
          .told = tensor(c.told)};
}

CopyRows params(const fp8moe_copy_rows_args& c) {
  return {.out = tensor(c.out), .places = tensor(c.places), .beside = c.beside};
}

TransposeFp8 params(const fp8moe_transpose_fp8_args& c) {
  return {.q = fp8(c.q),
          .plan = plan(c.plan),
          .columns = fp8(c.columns),
          .requantize = c.requantize != 0,
          .rule = rule(c.rule)};
}

PermuteTransposeFp8 params(const fp8moe_permute_transpose_fp8_args& c) {
  return {.q = fp8(c.q), .plan = plan(c.plan), .columns = fp8(c.columns)};
}

CountCodes params(const fp8moe_count_codes_args& c) {
  return {.q = fp8(c.q),
          .plan = plan(c.plan),
          .columns = fp8(c.columns),
          .stride = c.stride,
          .counts = tensor(c.counts)};
}

ActQuantize params(const fp8moe_act_quantize_args& c) {
  return {.z = tensor(c.z),
          .plan = plan(c.plan),
          .probs = tensor(c.probs),
          .activation = activation(c.activation),
          .rounding = c.rounding,
          .h = fp8(c.h),
          .z_q = fp8(c.z_q),
          .rule = rule(c.rule)};
}

ActQuantizeBackward params(const fp8moe_act_quantize_backward_args& c) {
  return {.dh = tensor(c.dh),
          .z = tensor(c.z),
          .plan = plan(c.plan),
          .probs = tensor(c.probs),
          .activation = activation(c.activation),
          .dz = fp8(c.dz),
          .dprobs = tensor(c.dprobs),
          .dz_columns = fp8(c.dz_columns),
          .h_columns = fp8(c.h_columns),
          .rule = rule(c.rule),
          .workspace = tensor(c.workspace)};
}

GroupedGemm params(const fp8moe_grouped_gemm_args& c) {
  return {.a = fp8(c.a),
          .w = fp8(c.w),
          .plan = plan(c.plan),
          .d = tensor(c.d),
          .a2 = fp8(c.a2),
          .w2 = fp8(c.w2)};
}

GroupedGemmWgrad params(const fp8moe_grouped_gemm_wgrad_args& c) {
  return {.dy_t = fp8(c.dy_t),
          .x_t = fp8(c.x_t),
          .plan = plan(c.plan),
          .dw = tensor(c.dw),
          .accumulate = c.accumulate != 0,
          .workspace = tensor(c.workspace)};
}

LoraProject params(const fp8moe_lora_project_args& c) {
  return {.rows = fp8(c.rows),
          .factor = tensor(c.factor),
          .plan = plan(c.plan),
          .u = tensor(c.u),
          .u_q = fp8(c.u_q),
          .rank_first = c.rank_first != 0,
          .scaling = c.scaling,
          .rule = rule(c.rule)};
}

LoraWgrad params(const fp8moe_lora_wgrad_args& c) {
  return {.u = tensor(c.u),
          .rows = fp8(c.rows),
          .plan = plan(c.plan),
          .dfactor = tensor(c.dfactor),
          .rank_first = c.rank_first != 0};
}

QuantizeLora params(const fp8moe_quantize_lora_args& c) {
  return {.factor = tensor(c.factor),
          .w2 = fp8(c.w2),
          .rank_first = c.rank_first != 0,
          .rule = rule(c.rule)};
}

// The caller's struct, of whatever size it has there; zeros where it is shorter. What a newer
// caller gives beyond ours must be zero.
template <class C>
C given(const C* args, const char* op) {
  FP8MOE_CHECK(args != nullptr, "[", op, "] args must be given; got NULL");
  constexpr size_t kFirst = sizeof(size_t);
  FP8MOE_CHECK(args->size > kFirst && args->size <= 2 * sizeof(C), "[", op,
               "] args.size must be that of the struct (", sizeof(C), " bytes here); got ",
               args->size);
  const auto* bytes = reinterpret_cast<const char*>(args);
  for (size_t i = sizeof(C); i < args->size; ++i)
    FP8MOE_CHECK(bytes[i] == 0, "[", op, "] args must be of this library's version or older; got ",
                 args->size, " bytes where ", sizeof(C), " are known");
  C c{};
  std::memcpy(&c, bytes, std::min(args->size, sizeof(C)));
  return c;
}

template <class P, class C>
fp8moe_status run(void (*op)(const P&, Stream), const C* args, void* stream) {
  return guarded([&] { op(params(given(args, P::op)), {stream}); });
}

template <class C>
fp8moe_status workspace(const C* args, int64_t* bytes, const char* op) {
  return guarded([&] {
    FP8MOE_CHECK(bytes != nullptr, "[", op, "] bytes must be given; got NULL");
    *bytes = workspace_bytes(params(given(args, op)));
  });
}

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

fp8moe_status fp8moe_quantize(const fp8moe_quantize_args* args, void* stream) {
  return run(&quantize, args, stream);
}
fp8moe_status fp8moe_quantize_weight(const fp8moe_quantize_weight_args* args, void* stream) {
  return run(&quantize_weight, args, stream);
}
fp8moe_status fp8moe_turn_weight(const fp8moe_turn_weight_args* args, void* stream) {
  return run(&turn_weight, args, stream);
}
fp8moe_status fp8moe_dequantize(const fp8moe_dequantize_args* args, void* stream) {
  return run(&dequantize, args, stream);
}
fp8moe_status fp8moe_route(const fp8moe_route_args* args, void* stream) {
  return run(&route, args, stream);
}
fp8moe_status fp8moe_route_workspace(const fp8moe_route_args* args, int64_t* bytes) {
  return workspace(args, bytes, "route_workspace");
}
fp8moe_status fp8moe_plan_from_counts(const fp8moe_plan_from_counts_args* args, void* stream) {
  return run(&plan_from_counts, args, stream);
}
fp8moe_status fp8moe_plan_from_row_id_map(const fp8moe_plan_from_row_id_map_args* args,
                                          void* stream) {
  return run(&plan_from_row_id_map, args, stream);
}
fp8moe_status fp8moe_router_topk(const fp8moe_router_topk_args* args, void* stream) {
  return run(&router_topk, args, stream);
}
fp8moe_status fp8moe_router_topk_backward(const fp8moe_router_topk_backward_args* args,
                                          void* stream) {
  return run(&router_topk_backward, args, stream);
}
fp8moe_status fp8moe_permute_pad(const fp8moe_permute_pad_args* args, void* stream) {
  return run(&permute_pad, args, stream);
}
fp8moe_status fp8moe_permute_pad_backward(const fp8moe_permute_pad_backward_args* args,
                                          void* stream) {
  return run(&permute_pad_backward, args, stream);
}
fp8moe_status fp8moe_unpermute_unpad(const fp8moe_unpermute_unpad_args* args, void* stream) {
  return run(&unpermute_unpad, args, stream);
}
fp8moe_status fp8moe_unpermute_unpad_backward(const fp8moe_unpermute_unpad_backward_args* args,
                                              void* stream) {
  return run(&unpermute_unpad_backward, args, stream);
}
fp8moe_status fp8moe_dispatch_plan(const fp8moe_dispatch_plan_args* args, void* stream) {
  return run(&dispatch_plan, args, stream);
}
fp8moe_status fp8moe_dispatch_plan_workspace(const fp8moe_dispatch_plan_args* args,
                                             int64_t* bytes) {
  return workspace(args, bytes, "dispatch_plan_workspace");
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

fp8moe_status fp8moe_quantize_pack(const fp8moe_quantize_pack_args* args, void* stream) {
  return run(&quantize_pack, args, stream);
}
fp8moe_status fp8moe_unpack(const fp8moe_unpack_args* args, void* stream) {
  return run(&unpack, args, stream);
}
fp8moe_status fp8moe_share_words(const fp8moe_share_words_args* args, void* stream) {
  return run(&share_words, args, stream);
}
fp8moe_status fp8moe_copy_rows(const fp8moe_copy_rows_args* args, void* stream) {
  return run(&copy_rows, args, stream);
}
fp8moe_status fp8moe_transpose_fp8(const fp8moe_transpose_fp8_args* args, void* stream) {
  return run(&transpose_fp8, args, stream);
}
fp8moe_status fp8moe_permute_transpose_fp8(const fp8moe_permute_transpose_fp8_args* args,
                                           void* stream) {
  return run(&permute_transpose_fp8, args, stream);
}
fp8moe_status fp8moe_count_codes(const fp8moe_count_codes_args* args, void* stream) {
  return run(&count_codes, args, stream);
}
fp8moe_status fp8moe_act_quantize(const fp8moe_act_quantize_args* args, void* stream) {
  return run(&act_quantize, args, stream);
}
fp8moe_status fp8moe_act_quantize_backward(const fp8moe_act_quantize_backward_args* args,
                                           void* stream) {
  return run(&act_quantize_backward, args, stream);
}
fp8moe_status fp8moe_act_quantize_backward_workspace(const fp8moe_act_quantize_backward_args* args,
                                                     int64_t* bytes) {
  return workspace(args, bytes, "act_quantize_backward_workspace");
}
fp8moe_status fp8moe_grouped_gemm(const fp8moe_grouped_gemm_args* args, void* stream) {
  return run(&grouped_gemm, args, stream);
}
fp8moe_status fp8moe_grouped_gemm_wgrad(const fp8moe_grouped_gemm_wgrad_args* args, void* stream) {
  return run(&grouped_gemm_wgrad, args, stream);
}
fp8moe_status fp8moe_grouped_gemm_wgrad_workspace(const fp8moe_grouped_gemm_wgrad_args* args,
                                                  int64_t* bytes) {
  return workspace(args, bytes, "grouped_gemm_wgrad_workspace");
}
fp8moe_status fp8moe_lora_project(const fp8moe_lora_project_args* args, void* stream) {
  return run(&lora_project, args, stream);
}
fp8moe_status fp8moe_lora_wgrad(const fp8moe_lora_wgrad_args* args, void* stream) {
  return run(&lora_wgrad, args, stream);
}
fp8moe_status fp8moe_quantize_lora(const fp8moe_quantize_lora_args* args, void* stream) {
  return run(&quantize_lora, args, stream);
}

}  // extern "C"
