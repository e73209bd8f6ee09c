// SPDX-License-Identifier: Apache-2.0
// The operators. Each runs on the device of its tensors: CPU, or CUDA (sm_90a) on `stream`.
//
// Every op checks its arguments before it writes (InvalidArgument), writes only the outputs the
// caller gives, allocates nothing on the device and never synchronizes with it. Outputs are the
// arguments after the inputs; a default-constructed Tensor leaves an optional one out. No output
// shares memory with an input, with another output or, of an Fp8Tensor, with its own scales
// (InvalidArgument). Codes, high-precision data and plans start at a multiple of 16 bytes. On the
// CPU, memory that runs out inside a parallel region ends the process: some ops hold a few rows a
// thread there. What lies in a plan's buffer is trusted on CUDA, where nobody on the host can read
// it; the CPU checks it (InvalidArgument) before it indexes by it. Letters: plan.h.
// docs/reference/numerics.md states what each op guarantees bit by bit.
#pragma once

#include "fp8moe/error.h"
#include "fp8moe/plan.h"
#include "fp8moe/tensor.h"

namespace fp8moe {

// How a tile's scale follows from its largest magnitude (docs/reference/numerics.md, "Scale rule").
struct ScaleRule {
  bool pow2 = true;    // power-of-two scales; false: float32 scales
  float eps = 1e-10f;  // floor of the magnitude
};

// ---- quantization -------------------------------------------------------------------------------

// q = Q(x) by 1x128 tiles. x [M, K] f32/f16/bf16; q.layout row or gemm.
FP8MOE_API void quantize(const Tensor& x, const Fp8Tensor& q, ScaleRule rule, Stream stream = {});

// q = Q(w) by 128x128 tiles of w [E, N, K], in e4m3, and q_t [E, K, N], its exact transpose with
// its scales. q or q_t may be left out.
FP8MOE_API void quantize_weight(const Tensor& w, const Fp8Tensor& q, const Fp8Tensor& q_t,
                                ScaleRule rule, Stream stream = {});

// x = q * scale_inv. q [M, K] in any layout, or [E, M, K] in block. The product is rounded to f32
// and that to x's dtype: a product with a power of two is exact unless it leaves f32's range, so
// that one rounding is left; one with a float32 scale may round twice.
FP8MOE_API void dequantize(const Fp8Tensor& q, const Tensor& x, Stream stream = {});

// ---- routing ------------------------------------------------------------------------------------

FP8MOE_API int64_t route_workspace(const RoutingPlan& plan);  // bytes

// Fills the plan from topk_idx [T, S] i32/i64 (-1: dropped), or from routing_map [T, E]
// bool/u8/i32/i64 with S == E and slot e standing for expert e. Exactly one of the two is given.
// Assignments whose expert-major rank is not below plan.capacity are dropped and counted.
// workspace: u8, at least route_workspace(plan) bytes, whatever they hold.
FP8MOE_API void route(const Tensor& topk_idx, const Tensor& routing_map, const RoutingPlan& plan,
                      const Tensor& workspace, Stream stream = {});

// Fills the plan for rows that arrive grouped: tokens_per_expert [E] i32/i64, token i of the plan
// (T == capacity, S == 1) being the i-th row of the packed groups.
FP8MOE_API void plan_from_counts(const Tensor& tokens_per_expert, const RoutingPlan& plan,
                                 Stream stream = {});

// ---- movement -----------------------------------------------------------------------------------

// y[row_of[t,s]] = x[t]; padding rows are zero (data, scale, prob).
// x [T, C] f32/f16/bf16 or FP8 (x_scale in row or gemm layout); y [R, C] likewise (y_scale too).
// Rows of an FP8 x, and its scales in row layout, may lie row_stride apart: multiples of 16 bytes
// (4 for scales), at least a row.
// probs [T, S] f32 -> row_probs [R] f32, both or neither.
// zero_unweighted: a row whose prob is 0 is written as padding is, data and scale zero.
FP8MOE_API void permute_pad(const Tensor& x, const RoutingPlan& plan, const Tensor& probs,
                            const Tensor& y, const Tensor& row_probs, bool zero_unweighted = false,
                            Stream stream = {});
FP8MOE_API void permute_pad(const Fp8Tensor& x, const RoutingPlan& plan, const Tensor& probs,
                            const Fp8Tensor& y, const Tensor& row_probs,
                            bool zero_unweighted = false, Stream stream = {});

// dx[t] = sum over slots ascending of dy[row_of[t,s]] (f32, rounded once); dprobs[t,s] is
// row_dprobs[row_of[t,s]], 0 for a dropped slot. dy [R, C], dx [T, C].
FP8MOE_API void permute_pad_backward(const Tensor& dy, const RoutingPlan& plan,
                                     const Tensor& row_dprobs, const Tensor& dx,
                                     const Tensor& dprobs, Stream stream = {});

// out[t] = sum over slots ascending of (probs[t,s] *) y[row_of[t,s]], f32, rounded once.
FP8MOE_API void unpermute_unpad(const Tensor& y, const RoutingPlan& plan, const Tensor& probs,
                                const Tensor& out, Stream stream = {});

// dy[row] = (probs[t,s] *) dout[t], padding rows zero; dprobs[t,s] = <y[row], dout[t]> in the
// pinned order of common/reduce.h, 0 for a dropped slot. y, probs and dprobs: all or none.
// The backward of an FP8 gradient without probs is permute_pad.
FP8MOE_API void unpermute_unpad_backward(const Tensor& dout, const RoutingPlan& plan,
                                         const Tensor& y, const Tensor& probs, const Tensor& dy,
                                         const Tensor& dprobs, Stream stream = {});

// ---- between ranks (expert parallelism) ---------------------------------------------------------

FP8MOE_API int64_t dispatch_plan_workspace(const RoutingPlan& plan);  // bytes

// The plan by which tokens travel to plan.experts ranks, rank r owning num_experts / ranks experts
// from r num_experts / ranks on. plan.slots == plan.experts == ranks and align == 1: slot r of a
// token IS rank r, and a token has one row for a rank however many of its experts live there. Rows
// are rank-major, within a rank in token order.
// segment 0: rank r's rows follow those of r - 1; those not below plan.capacity are dropped.
// segment > 0: rank r owns rows [r segment, (r+1) segment), plan.capacity == ranks segment; what
// a segment has no row for is dropped. Dropped: row_of -1, counted in status[kOverflow].
// topk_idx [T, S] i32/i64, -1: none. counts [ranks, 2] i32: rows that carry a token, and entries of
// topk_idx that travel on them.
// Of other ops, permute_pad, unpermute_unpad and their backward without probs take such a plan; a
// segment's rows without a token are padding to them.
// workspace: u8, at least dispatch_plan_workspace(plan) bytes, whatever they hold.
FP8MOE_API void dispatch_plan(const Tensor& topk_idx, int64_t num_experts, int64_t segment,
                              const RoutingPlan& plan, const Tensor& counts,
                              const Tensor& workspace, Stream stream = {});

// Bytes of a row on the wire: hidden codes | cdiv(hidden, 128) f32 scales | slots i32 ids | slots
// f32 probs | zeros up to a multiple of 16. slots 0: a gradient, codes and scales alone.
constexpr int64_t packed_row_bytes(int64_t hidden, int64_t slots) {
  return round_up(hidden + 4 * cdiv(hidden, kTile) + 8 * slots, 16);
}

// packed[row_of[t,r]] = Q(x[t]) by 1x128 tiles, as quantize has it in row layout, and for each slot
// of topk_idx its expert counted from rank r's first (-1: it lives elsewhere) and its prob (0
// there). plan: of dispatch_plan. x [T, H] f32/f16/bf16; topk_idx [T, S] i32/i64 and probs [T, S]
// f32, both or neither (S is then 0, num_experts not read); packed [R, packed_row_bytes(H, S)] u8.
// fp8: e4m3 or e5m2. Rows of a segment without a token: ids -1, probs 0, else unspecified.
FP8MOE_API void quantize_pack(const Tensor& x, const Tensor& topk_idx, const Tensor& probs,
                              int64_t num_experts, const RoutingPlan& plan, const Tensor& packed,
                              DType fp8, ScaleRule rule, Stream stream = {});

// topk_idx [R, S] i32 and probs [R, S] f32 of packed [R, packed_row_bytes(hidden, S)] u8. Codes and
// scales are read where they are: at bytes 0 and hidden, a row every packed_row_bytes.
FP8MOE_API void unpack(const Tensor& packed, int64_t hidden, const Tensor& topk_idx,
                       const Tensor& probs, Stream stream = {});

// ---- transposes in the FP8 domain ---------------------------------------------------------------

// columns = the rows of q as the contracted dimension, shifted to one scale a tile:
// code' = RNE(code 2^-k).
// q [R, C] with 1x128 power-of-two scales; columns [C, Kcap] of q's format, layout block (128x128
// tiles) or gemm (1x128 tiles along tokens, scales [Kcap/128, pad4(C)]).
// requantize: dequantize and quantize again by `rule` instead (any scales; a second rounding).
FP8MOE_API void transpose_fp8(const Fp8Tensor& q, const RoutingPlan& plan, const Fp8Tensor& columns,
                              bool requantize = false, ScaleRule rule = {}, Stream stream = {});

// transpose_fp8(permute_pad(q)) without the intermediate; q [T, C], bit-equal to the two ops. Its
// rows may lie row_stride apart, as permute_pad's.
FP8MOE_API void permute_transpose_fp8(const Fp8Tensor& q, const RoutingPlan& plan,
                                      const Fp8Tensor& columns, Stream stream = {});

// ---- what FP8 costs -----------------------------------------------------------------------------

// Adds to counts [kCodeCounts] i64 what rows 0, stride, 2 stride, ... of q hold, reading their
// codes once. q [T, C] in row layout (rows may lie apart), or [R, C] in gemm layout, of which rows
// without an assignment are left out. `columns`: the operand permute_transpose_fp8 made of q in row
// layout, power-of-two scales; its scales alone are read. Words: CodeCount.
FP8MOE_API void count_codes(const Fp8Tensor& q, const RoutingPlan& plan, const Fp8Tensor& columns,
                            int64_t stride, const Tensor& counts, Stream stream = {});

// A live tile is a 1x128 tile that holds a nonzero code. In one, a code of 0 stands for a value
// that underflowed or was 0. Words from kMoved on are counted for every kept assignment of a row.
enum CodeCount : int {
  kLive = 0,         // codes in live tiles
  kUnderflowed = 1,  // those of them that are 0
  kMoved = 2,        // nonzero codes
  kFlushed = 3,      // those of them that the shift onto the columns' scales makes 0
  kFirstShift =
      4,  // live tiles by their shift k = log2 S - log2 s: k <= 0, 1, ..., 15, 16 and more
  kCodeCounts = 4 + 17  // (of 128 channels with an S each: the largest S)
};

// ---- activation ---------------------------------------------------------------------------------

// h = Q(silu(gate) * up * prob), z = [gate | up] [R, 2I] f32/f16/bf16, probs [R] f32 or none.
// limit > 0: gate at most limit, up within [-limit, limit]; infinity: none. `plan` may be
// undefined: all R rows are then ordinary. Outputs in e4m3, row or gemm layout: h [R, I]; optional
// z_q [R, 2I] = Q(z), the FP8 pre-activation.
FP8MOE_API void act_quantize(const Tensor& z, const RoutingPlan& plan, const Tensor& probs,
                             float limit, const Fp8Tensor& h, const Fp8Tensor& z_q, ScaleRule rule,
                             Stream stream = {});

// The gradient: dh [R, I] f32/f16/bf16, z as given forward. dz [R, 2I] = Q([dgate | dup]); dprobs
// [R] f32 = sum of silu*up*dh in the pinned order; optional, with a plan and as in transpose_fp8,
// dz_columns [2I, Kcap] in dz's format, and h_columns [I, Kcap] in e4m3 of h, which is recomputed.
FP8MOE_API void act_quantize_backward(const Tensor& dh, const Tensor& z, const RoutingPlan& plan,
                                      const Tensor& probs, float limit, const Fp8Tensor& dz,
                                      const Tensor& dprobs, const Fp8Tensor& dz_columns,
                                      const Fp8Tensor& h_columns, ScaleRule rule,
                                      Stream stream = {});

// ---- grouped GEMM -------------------------------------------------------------------------------

// d[rows of e] = a[rows of e] w[e]^T. a [R, K] e4m3 or e5m2, gemm layout; w [E, N, K] e4m3, block
// layout; d [R, N] bf16/f32.
FP8MOE_API void grouped_gemm(const Fp8Tensor& a, const Fp8Tensor& w, const RoutingPlan& plan,
                             const Tensor& d, Stream stream = {});

// dw[e] (+)= dy_t[:, tokens of e] x_t[:, tokens of e]^T. dy_t [N, Kcap] e4m3 or e5m2, x_t [K, Kcap]
// e4m3, both block or both gemm layout; dw [E, N, K] f32/bf16. Without accumulate an empty expert's
// dw is zero.
FP8MOE_API void grouped_gemm_wgrad(const Fp8Tensor& dy_t, const Fp8Tensor& x_t,
                                   const RoutingPlan& plan, const Tensor& dw, bool accumulate,
                                   Stream stream = {});

// ---- what is here -------------------------------------------------------------------------------

struct BuildInfo {
  const char* version;
  bool cuda;                 // built with the CUDA backend
  const char* cuda_toolkit;  // "13.0", or "" without CUDA
  const char* cutlass;       // "4.2.0", or ""
  const char* cpu_isa;       // the clone this machine runs: "x86-64-v4", "x86-64-v3" or "baseline"
};
FP8MOE_API BuildInfo build_info();

// Returns where this build can run on that GPU; else throws what the first CUDA tensor would:
// DeviceUnavailable (no backend, no driver, one too old, no GPU) or UnsupportedDevice.
FP8MOE_API void require_cuda(int device = 0);

}  // namespace fp8moe
