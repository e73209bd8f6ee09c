/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI: every operator of ops.h, under the same name and contract, for C and for any language
 * that calls C. Memory belongs to the caller; nothing here allocates or throws.
 *
 *   fp8moe_quantize_args args = {.size = sizeof args, .x = &x, .q = &q, .rule = {1, 1e-10f}};
 *   fp8moe_status status = fp8moe_quantize(&args, stream);
 *
 * A struct of arguments begins with its size, as the caller was compiled: a newer library may add
 * members at its end, where zeros stand for "as before". An argument marked "optional" may be NULL.
 * A function returns FP8MOE_OK, or the kind of error,
 * whose message ("[op] rule; got value") fp8moe_last_error() gives; an invalid argument writes
 * nothing. An output overlaps no input and no other output. `stream` is the cudaStream_t of CUDA
 * tensors and is ignored (NULL) on the CPU. */
#ifndef FP8MOE_C_API_H_
#define FP8MOE_C_API_H_

#include <stddef.h>
#include <stdint.h>

#include "fp8moe/activation.h"

#if defined(_WIN32)
#define FP8MOE_C_API
#else
#define FP8MOE_C_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fp8moe_status {
  FP8MOE_OK = 0,
  FP8MOE_INVALID_ARGUMENT = 1,
  FP8MOE_DEVICE_UNAVAILABLE = 2, /* no CUDA backend in this build, or no usable driver or GPU */
  FP8MOE_UNSUPPORTED_DEVICE = 3, /* a GPU that is not compute capability 9.0 */
  FP8MOE_CUDA_ERROR = 4,         /* a CUDA call failed */
  FP8MOE_OUT_OF_MEMORY = 5,      /* host memory */
  FP8MOE_INTERNAL_ERROR = 6
} fp8moe_status;

/* Values of fp8moe_tensor.dtype. */
enum {
  FP8MOE_F32 = 0,
  FP8MOE_F16 = 1,
  FP8MOE_BF16 = 2,
  FP8MOE_E4M3 = 3,
  FP8MOE_E5M2 = 4,
  FP8MOE_I32 = 5,
  FP8MOE_I64 = 6,
  FP8MOE_U8 = 7,
  FP8MOE_BOOL = 8
};

/* Values of fp8moe_tensor.device_type. */
enum { FP8MOE_CPU = 0, FP8MOE_CUDA = 1 };

/* Values of fp8moe_fp8_tensor.layout: where the scales are (tensor.h, ScaleLayout). */
enum { FP8MOE_LAYOUT_ROW = 0, FP8MOE_LAYOUT_GEMM = 1, FP8MOE_LAYOUT_BLOCK = 2 };

/* Values of fp8moe_scale_rule.kind: how a tile's scale follows from its largest magnitude (ops.h,
 * ScaleKind). */
enum {
  FP8MOE_SCALE_FP32 = 0,
  FP8MOE_SCALE_POW2 = 1,
  FP8MOE_SCALE_AMAX = 2,
  FP8MOE_SCALE_APPROX = 3
};

/* Of a workspace that must be zero: so many bytes serve every operator that asks for one, in calls
 * that follow one another on a stream. It is zero again when each has run. Calls that may run at
 * the same time need one each. */
enum { FP8MOE_ZERO_WORKSPACE_BYTES = 576 };

/* A row-major view of at most 4 dimensions. */
typedef struct fp8moe_tensor {
  void* data;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
  int32_t ndim;
  int64_t shape[4];
  int64_t row_stride; /* elements between the rows of a 2-D input that may be strided; 0: dense */
} fp8moe_tensor;

/* value = decode(data) * scale_inv */
typedef struct fp8moe_fp8_tensor {
  fp8moe_tensor data;      /* e4m3 or e5m2, at a multiple of 16 bytes */
  fp8moe_tensor scale_inv; /* f32, in gemm layout at a multiple of 16 bytes; all zeros: none */
  int32_t layout;
} fp8moe_fp8_tensor;

/* plan.h's RoutingPlan: T tokens, S slots, E experts, A capacity; R = fp8moe_plan_rows. */
typedef struct fp8moe_plan {
  fp8moe_tensor buffer; /* i32 [fp8moe_plan_buffer_size], at a multiple of 16 bytes */
  int64_t tokens;
  int64_t slots;
  int64_t experts;
  int64_t align; /* 1, 16, 32 or 128 */
  int64_t capacity;
} fp8moe_plan;

typedef struct fp8moe_scale_rule {
  int32_t kind;
  float eps; /* floor of a tile's largest magnitude; the C++ default is 1e-10 */
} fp8moe_scale_rule;

typedef struct fp8moe_build_info {
  const char* version;
  int32_t cuda;             /* built with the CUDA backend */
  const char* cuda_toolkit; /* "" without */
  const char* cutlass;      /* "" without */
  const char* cpu_isa;
} fp8moe_build_info;

/* The message of this thread's last error; "" before the first. Valid until the next error. */
FP8MOE_C_API const char* fp8moe_last_error(void);
FP8MOE_C_API fp8moe_build_info fp8moe_get_build_info(void);

/* Sizes and sections of a plan; they follow from its numbers alone, the buffer may be missing. All
 * in elements: rows R, columns Kcap, and offsets into the int32 buffer; -1 (and the message) for
 * numbers that make no plan. */
FP8MOE_C_API int64_t fp8moe_plan_rows(const fp8moe_plan* plan);
FP8MOE_C_API int64_t fp8moe_plan_columns(const fp8moe_plan* plan);
FP8MOE_C_API int64_t fp8moe_plan_buffer_size(const fp8moe_plan* plan);
FP8MOE_C_API int64_t fp8moe_plan_tokens_per_expert_at(const fp8moe_plan* plan); /* [E] */
FP8MOE_C_API int64_t fp8moe_plan_row_offsets_at(const fp8moe_plan* plan);       /* [E+1] */
FP8MOE_C_API int64_t fp8moe_plan_col_offsets_at(const fp8moe_plan* plan);       /* [E+1] */
FP8MOE_C_API int64_t fp8moe_plan_token_of_row_at(const fp8moe_plan* plan);      /* [R] */
FP8MOE_C_API int64_t fp8moe_plan_slot_of_row_at(const fp8moe_plan* plan);       /* [R] */
FP8MOE_C_API int64_t fp8moe_plan_row_of_at(const fp8moe_plan* plan);            /* [T, S] */
FP8MOE_C_API int64_t fp8moe_plan_col_blocks_at(const fp8moe_plan* plan);        /* [Kcap/128, 4] */

/* ---- quantization ---- */

typedef struct fp8moe_quantize_args {
  size_t size;
  const fp8moe_tensor* x;
  const fp8moe_fp8_tensor* q;
  fp8moe_scale_rule rule;
} fp8moe_quantize_args;
FP8MOE_C_API fp8moe_status fp8moe_quantize(const fp8moe_quantize_args* args, void* stream);

typedef struct fp8moe_quantize_weight_args {
  size_t size;
  const fp8moe_tensor* w;
  const fp8moe_tensor* below;   /* optional */
  const fp8moe_fp8_tensor* q;   /* optional */
  const fp8moe_fp8_tensor* q_t; /* optional */
  fp8moe_scale_rule rule;
} fp8moe_quantize_weight_args;
FP8MOE_C_API fp8moe_status fp8moe_quantize_weight(const fp8moe_quantize_weight_args* args,
                                                  void* stream);

typedef struct fp8moe_turn_weight_args {
  size_t size;
  const fp8moe_fp8_tensor* q;
  const fp8moe_fp8_tensor* q_t;
} fp8moe_turn_weight_args;
FP8MOE_C_API fp8moe_status fp8moe_turn_weight(const fp8moe_turn_weight_args* args, void* stream);

typedef struct fp8moe_dequantize_args {
  size_t size;
  const fp8moe_fp8_tensor* q;
  const fp8moe_tensor* x;
} fp8moe_dequantize_args;
FP8MOE_C_API fp8moe_status fp8moe_dequantize(const fp8moe_dequantize_args* args, void* stream);

/* ---- routing ---- */

typedef struct fp8moe_route_args {
  size_t size;
  const fp8moe_tensor* topk_idx;    /* one of the two */
  const fp8moe_tensor* routing_map; /* one of the two */
  const fp8moe_plan* plan;
  const fp8moe_tensor* workspace; /* optional where fp8moe_route_workspace says 0 bytes */
} fp8moe_route_args;
FP8MOE_C_API fp8moe_status fp8moe_route(const fp8moe_route_args* args, void* stream);
/* *bytes: what fp8moe_route needs as workspace (0 is possible); of the plan alone. */
FP8MOE_C_API fp8moe_status fp8moe_route_workspace(const fp8moe_route_args* args, int64_t* bytes);

typedef struct fp8moe_plan_from_counts_args {
  size_t size;
  const fp8moe_tensor* tokens_per_expert;
  const fp8moe_plan* plan;
} fp8moe_plan_from_counts_args;
FP8MOE_C_API fp8moe_status fp8moe_plan_from_counts(const fp8moe_plan_from_counts_args* args,
                                                   void* stream);

typedef struct fp8moe_plan_from_row_id_map_args {
  size_t size;
  const fp8moe_tensor* row_id_map;
  const fp8moe_tensor* pad_offsets; /* optional */
  const fp8moe_plan* plan;
} fp8moe_plan_from_row_id_map_args;
FP8MOE_C_API fp8moe_status fp8moe_plan_from_row_id_map(const fp8moe_plan_from_row_id_map_args* args,
                                                       void* stream);

/* ---- the router ---- */

/* Values of score. */
enum { FP8MOE_SOFTMAX = 0, FP8MOE_SIGMOID = 1, FP8MOE_SQRT_SOFTPLUS = 2 };

typedef struct fp8moe_router_topk_args {
  size_t size;
  const fp8moe_tensor* logits;
  const fp8moe_tensor* selection_bias; /* optional */
  const fp8moe_tensor* padding;        /* optional */
  const fp8moe_tensor* given_idx;      /* this or topk_idx */
  const fp8moe_tensor* scores;
  const fp8moe_tensor* topk_idx; /* this or given_idx */
  const fp8moe_tensor* topk_weights;
  const fp8moe_tensor* tokens_per_expert;
  int64_t score;
  int64_t num_groups;     /* 1: none, as are the next two then */
  int64_t topk_groups;    /* at least 1 */
  int64_t best_per_group; /* at least 1 */
  int32_t select_by_logits;
  int32_t softmax_after_topk;
  int32_t normalize;
  float closed_value;          /* 0 or -INFINITY */
  float epsilon;               /* the C++ default is 1e-20 */
  float routed_scaling_factor; /* not 0 */
} fp8moe_router_topk_args;
FP8MOE_C_API fp8moe_status fp8moe_router_topk(const fp8moe_router_topk_args* args, void* stream);

typedef struct fp8moe_router_topk_backward_args {
  size_t size;
  const fp8moe_tensor* dweights; /* this or dscores, or both */
  const fp8moe_tensor* dscores;
  const fp8moe_tensor* scores;
  const fp8moe_tensor* topk_idx;
  const fp8moe_tensor* topk_weights;
  const fp8moe_tensor* dlogits;
  int64_t score;
  int32_t softmax_after_topk;
  int32_t normalize;
  float epsilon;
  float routed_scaling_factor;
} fp8moe_router_topk_backward_args;
FP8MOE_C_API fp8moe_status fp8moe_router_topk_backward(const fp8moe_router_topk_backward_args* args,
                                                       void* stream);

/* ---- movement ---- */

typedef struct fp8moe_permute_pad_args {
  size_t size;
  const fp8moe_fp8_tensor* x; /* without scales: high precision */
  const fp8moe_plan* plan;
  const fp8moe_tensor* probs;     /* optional */
  const fp8moe_fp8_tensor* y;     /* without scales: high precision */
  const fp8moe_tensor* row_probs; /* optional */
  int32_t zero_unweighted;
} fp8moe_permute_pad_args;
FP8MOE_C_API fp8moe_status fp8moe_permute_pad(const fp8moe_permute_pad_args* args, void* stream);

typedef struct fp8moe_permute_pad_backward_args {
  size_t size;
  const fp8moe_tensor* dy;
  const fp8moe_plan* plan;
  const fp8moe_tensor* row_dprobs; /* optional */
  const fp8moe_tensor* dx;
  const fp8moe_tensor* dprobs; /* optional */
} fp8moe_permute_pad_backward_args;
FP8MOE_C_API fp8moe_status fp8moe_permute_pad_backward(const fp8moe_permute_pad_backward_args* args,
                                                       void* stream);

typedef struct fp8moe_unpermute_unpad_args {
  size_t size;
  const fp8moe_tensor* y;
  const fp8moe_plan* plan;
  const fp8moe_tensor* probs; /* optional */
  const fp8moe_tensor* out;
  const fp8moe_tensor* peers; /* optional */
  const fp8moe_tensor* first; /* with peers */
} fp8moe_unpermute_unpad_args;
FP8MOE_C_API fp8moe_status fp8moe_unpermute_unpad(const fp8moe_unpermute_unpad_args* args,
                                                  void* stream);

typedef struct fp8moe_unpermute_unpad_backward_args {
  size_t size;
  const fp8moe_tensor* dout;
  const fp8moe_plan* plan;
  const fp8moe_tensor* y;     /* optional */
  const fp8moe_tensor* probs; /* optional */
  const fp8moe_tensor* dy;
  const fp8moe_tensor* dprobs; /* optional */
} fp8moe_unpermute_unpad_backward_args;
FP8MOE_C_API fp8moe_status
fp8moe_unpermute_unpad_backward(const fp8moe_unpermute_unpad_backward_args* args, void* stream);

/* ---- between ranks (expert parallelism) ---- */

typedef struct fp8moe_dispatch_plan_args {
  size_t size;
  const fp8moe_tensor* topk_idx;
  int64_t num_experts;
  int64_t segment;
  const fp8moe_plan* plan;
  const fp8moe_tensor* counts;
  const fp8moe_tensor* workspace; /* optional where fp8moe_dispatch_plan_workspace says 0 bytes */
  const fp8moe_tensor* dropped;   /* optional */
} fp8moe_dispatch_plan_args;
FP8MOE_C_API fp8moe_status fp8moe_dispatch_plan(const fp8moe_dispatch_plan_args* args,
                                                void* stream);
/* *bytes: what fp8moe_dispatch_plan needs as workspace (0 is possible); of the plan alone. */
FP8MOE_C_API fp8moe_status fp8moe_dispatch_plan_workspace(const fp8moe_dispatch_plan_args* args,
                                                          int64_t* bytes);

/* Bytes of a packed row (ops.h); -1 (and the message) for negative or absurd numbers. */
FP8MOE_C_API int64_t fp8moe_packed_row_bytes(int64_t hidden, int64_t slots);

typedef struct fp8moe_quantize_pack_args {
  size_t size;
  const fp8moe_tensor* x;
  const fp8moe_tensor* topk_idx; /* optional */
  const fp8moe_tensor* probs;    /* optional */
  int64_t num_experts;
  const fp8moe_plan* plan;
  const fp8moe_tensor* packed;
  int32_t fp8_dtype; /* FP8MOE_E4M3 or FP8MOE_E5M2 */
  fp8moe_scale_rule rule;
  const fp8moe_tensor* peers; /* optional */
  const fp8moe_tensor* first; /* optional, with peers; in host memory */
} fp8moe_quantize_pack_args;
FP8MOE_C_API fp8moe_status fp8moe_quantize_pack(const fp8moe_quantize_pack_args* args,
                                                void* stream);

typedef struct fp8moe_unpack_args {
  size_t size;
  const fp8moe_tensor* packed;
  int64_t hidden;
  const fp8moe_tensor* topk_idx;
  const fp8moe_tensor* probs;
} fp8moe_unpack_args;
FP8MOE_C_API fp8moe_status fp8moe_unpack(const fp8moe_unpack_args* args, void* stream);

typedef struct fp8moe_share_words_args {
  size_t size;
  const fp8moe_tensor* words;
  const fp8moe_tensor* peers;
  const fp8moe_tensor* mailbox;
  const fp8moe_tensor* calls;
  const fp8moe_tensor* ended;
  const fp8moe_tensor* late;
  int64_t rank;
  int64_t timeout_ms;
  const fp8moe_tensor* told;
  const fp8moe_tensor* more; /* optional */
} fp8moe_share_words_args;
FP8MOE_C_API fp8moe_status fp8moe_share_words(const fp8moe_share_words_args* args, void* stream);

typedef struct fp8moe_copy_rows_args {
  size_t size;
  const fp8moe_tensor* out;
  const fp8moe_tensor* places; /* in host memory */
  int64_t beside;              /* a cudaStream_t; 0: the call's */
} fp8moe_copy_rows_args;
FP8MOE_C_API fp8moe_status fp8moe_copy_rows(const fp8moe_copy_rows_args* args, void* stream);

/* ---- transposes in the FP8 domain ---- */

typedef struct fp8moe_transpose_fp8_args {
  size_t size;
  const fp8moe_fp8_tensor* q;
  const fp8moe_plan* plan;
  const fp8moe_fp8_tensor* columns;
  int32_t requantize;
  fp8moe_scale_rule rule;
} fp8moe_transpose_fp8_args;
FP8MOE_C_API fp8moe_status fp8moe_transpose_fp8(const fp8moe_transpose_fp8_args* args,
                                                void* stream);

typedef struct fp8moe_permute_transpose_fp8_args {
  size_t size;
  const fp8moe_fp8_tensor* q;
  const fp8moe_plan* plan;
  const fp8moe_fp8_tensor* columns;
} fp8moe_permute_transpose_fp8_args;
FP8MOE_C_API fp8moe_status
fp8moe_permute_transpose_fp8(const fp8moe_permute_transpose_fp8_args* args, void* stream);

typedef struct fp8moe_count_codes_args {
  size_t size;
  const fp8moe_fp8_tensor* q;
  const fp8moe_plan* plan;
  const fp8moe_fp8_tensor* columns; /* optional */
  int64_t stride;
  const fp8moe_tensor* counts;
} fp8moe_count_codes_args;
FP8MOE_C_API fp8moe_status fp8moe_count_codes(const fp8moe_count_codes_args* args, void* stream);

/* ---- activation ---- */

/* activation.h's Activation. SwiGLU: {FP8MOE_SWIGLU, 1.0f, 0.0f, INFINITY, 0}. */
typedef struct fp8moe_activation {
  int32_t kind; /* of activation.h */
  float alpha;
  float offset;
  float limit; /* INFINITY: none */
  int32_t interleaved;
} fp8moe_activation;

typedef struct fp8moe_act_quantize_args {
  size_t size;
  const fp8moe_tensor* z;
  const fp8moe_plan* plan;    /* optional */
  const fp8moe_tensor* probs; /* optional */
  fp8moe_activation activation;
  int64_t rounding; /* ActRounding of ops.h: 0, none */
  const fp8moe_fp8_tensor* h;
  const fp8moe_fp8_tensor* z_q; /* optional */
  fp8moe_scale_rule rule;
} fp8moe_act_quantize_args;
FP8MOE_C_API fp8moe_status fp8moe_act_quantize(const fp8moe_act_quantize_args* args, void* stream);

typedef struct fp8moe_act_quantize_backward_args {
  size_t size;
  const fp8moe_tensor* dh;
  const fp8moe_tensor* z;
  const fp8moe_plan* plan;    /* optional */
  const fp8moe_tensor* probs; /* optional */
  fp8moe_activation activation;
  const fp8moe_fp8_tensor* dz;
  const fp8moe_tensor* dprobs;         /* optional */
  const fp8moe_fp8_tensor* dz_columns; /* optional */
  const fp8moe_fp8_tensor* h_columns;  /* optional */
  fp8moe_scale_rule rule;
  const fp8moe_tensor* workspace; /* optional where its size is 0; zero before and after */
} fp8moe_act_quantize_backward_args;
FP8MOE_C_API fp8moe_status
fp8moe_act_quantize_backward(const fp8moe_act_quantize_backward_args* args, void* stream);
/* *bytes: what fp8moe_act_quantize_backward needs as workspace (0 is possible), at most
 * FP8MOE_ZERO_WORKSPACE_BYTES. */
FP8MOE_C_API fp8moe_status fp8moe_act_quantize_backward_workspace(
    const fp8moe_act_quantize_backward_args* args, int64_t* bytes);

/* ---- grouped GEMM ---- */

typedef struct fp8moe_grouped_gemm_args {
  size_t size;
  const fp8moe_fp8_tensor* a;
  const fp8moe_fp8_tensor* w;
  const fp8moe_plan* plan;
  const fp8moe_tensor* d;
  const fp8moe_fp8_tensor* a2; /* optional, with w2 */
  const fp8moe_fp8_tensor* w2; /* optional */
} fp8moe_grouped_gemm_args;
FP8MOE_C_API fp8moe_status fp8moe_grouped_gemm(const fp8moe_grouped_gemm_args* args, void* stream);

typedef struct fp8moe_grouped_gemm_wgrad_args {
  size_t size;
  const fp8moe_fp8_tensor* dy_t;
  const fp8moe_fp8_tensor* x_t;
  const fp8moe_plan* plan;
  const fp8moe_tensor* dw;
  int32_t accumulate;
  const fp8moe_tensor* workspace; /* optional where its size is 0; zero before and after */
} fp8moe_grouped_gemm_wgrad_args;
FP8MOE_C_API fp8moe_status fp8moe_grouped_gemm_wgrad(const fp8moe_grouped_gemm_wgrad_args* args,
                                                     void* stream);
/* *bytes: what fp8moe_grouped_gemm_wgrad needs as workspace (0 is possible), at most
 * FP8MOE_ZERO_WORKSPACE_BYTES. */
FP8MOE_C_API fp8moe_status
fp8moe_grouped_gemm_wgrad_workspace(const fp8moe_grouped_gemm_wgrad_args* args, int64_t* bytes);

/* ---- low-rank terms ---- */

typedef struct fp8moe_lora_project_args {
  size_t size;
  const fp8moe_fp8_tensor* rows;
  const fp8moe_tensor* factor;
  const fp8moe_plan* plan;
  const fp8moe_tensor* u;
  const fp8moe_fp8_tensor* u_q;
  int32_t rank_first;
  float scaling;
  fp8moe_scale_rule rule;
} fp8moe_lora_project_args;
FP8MOE_C_API fp8moe_status fp8moe_lora_project(const fp8moe_lora_project_args* args, void* stream);

typedef struct fp8moe_lora_wgrad_args {
  size_t size;
  const fp8moe_tensor* u;
  const fp8moe_fp8_tensor* rows;
  const fp8moe_plan* plan;
  const fp8moe_tensor* dfactor;
  int32_t rank_first;
} fp8moe_lora_wgrad_args;
FP8MOE_C_API fp8moe_status fp8moe_lora_wgrad(const fp8moe_lora_wgrad_args* args, void* stream);

typedef struct fp8moe_quantize_lora_args {
  size_t size;
  const fp8moe_tensor* factor;
  const fp8moe_fp8_tensor* w2;
  int32_t rank_first;
  fp8moe_scale_rule rule;
} fp8moe_quantize_lora_args;
FP8MOE_C_API fp8moe_status fp8moe_quantize_lora(const fp8moe_quantize_lora_args* args,
                                                void* stream);

#ifdef __cplusplus
}
#endif

#endif /* FP8MOE_C_API_H_ */
