// SPDX-License-Identifier: Apache-2.0
// The operators. Each runs on the device of its tensors: CPU, or CUDA (sm_90a) on `stream`.
//
//   permute_pad({.x = x, .plan = plan, .y = y}, stream);
//
// Of each a struct of parameters and a function. A member left out is not given: an optional array,
// or an option with its default. `fields` says which is which, and is all that bindings know.
//
// outputs(p) checks all arguments, and gives each output that is wanted (Tensor::wanted) its shape,
// dtype, device and layout; its memory is the caller's to add. An op runs with outputs that have
// it.
//
// Every op checks its arguments before it writes (InvalidArgument), writes only the outputs the
// caller gives, allocates nothing on the device and never synchronizes with it. No output
// shares memory with an input, with another output or, of an Fp8Tensor, with its own scales
// (InvalidArgument). Codes, scales in gemm layout, high-precision data and plans start at a
// multiple of 16 bytes. On the CPU, memory that runs out inside a parallel region ends the process:
// some ops hold a few rows per thread there. What lies in a plan's buffer is trusted on CUDA, where
// nobody on the host can read it; the CPU checks it (InvalidArgument) before it indexes by it.
// Letters: plan.h. docs/reference/numerics.md states what each op guarantees bit by bit.
#pragma once

#include <limits>
#include <tuple>

#include "fp8moe/activation.h"
#include "fp8moe/error.h"
#include "fp8moe/fields.h"
#include "fp8moe/plan.h"
#include "fp8moe/tensor.h"

namespace fp8moe {

// How a tile's scale follows from its largest magnitude (docs/reference/numerics.md, "Scale rule").
// fp32: FP8's largest over the magnitude, which values are multiplied by. pow2: the same, rounded
// down to a power of two. amax: the magnitude over FP8's largest, which values are divided by.
// approx: values times FP8's largest over the magnitude, by the GPU's approximate division, and a
// stored scale that is the magnitude times the rounded 1 / FP8's largest.
enum class ScaleKind : int32_t { fp32 = 0, pow2 = 1, amax = 2, approx = 3 };
struct ScaleRule {
  ScaleKind kind = ScaleKind::pow2;
  float eps = 1e-10f;  // floor of the magnitude
};

// A zero workspace: what an operator counts by on a CUDA device. u8, at a multiple of 16 bytes;
// zero when given and zero again when the operator has run. One of so many bytes serves every
// operator, in calls that follow one another on a stream. Calls that may run at the same time need
// one each.
inline constexpr int64_t kZeroWorkspaceBytes = 576;

// Ranks that `first` may speak of.
inline constexpr int64_t kMostPeers = 64;

// ---- quantization ------------------------------------------------------------------------------

// q = Q(x) by 1x128 tiles. x [M, K] f32/f16/bf16; q.layout row or gemm.
struct Quantize {
  static constexpr const char* op = "quantize";

  Tensor x{};
  Fp8Tensor q{};
  ScaleRule rule{};

  static constexpr auto fields = std::tuple{in("x", &Quantize::x, kAligned), out("q", &Quantize::q),
                                            option("rule", &Quantize::rule)};
};
FP8MOE_API void outputs(Quantize& p);
FP8MOE_API void quantize(const Quantize& p, Stream stream = {});

// q = Q(w) by 128x128 tiles of w [E, N, K], in e4m3, and q_t [E, K, N], its exact transpose with
// its scales. q or q_t may be left out. With `below` [E, M, K], of w's dtype, each expert is w's
// rows and then those of `below`, as if they were one tensor [E, N + M, K]; N is a multiple of 128.
struct QuantizeWeight {
  static constexpr const char* op = "quantize_weight";

  Tensor w{};
  Tensor below{};
  Fp8Tensor q{};
  Fp8Tensor q_t{};
  ScaleRule rule{};

  static constexpr auto fields = std::tuple{
      in("w", &QuantizeWeight::w, kAligned), optional_in("below", &QuantizeWeight::below, kAligned),
      optional_out("q", &QuantizeWeight::q), optional_out("q_t", &QuantizeWeight::q_t),
      option("rule", &QuantizeWeight::rule)};

  int64_t rows() const { return w.shape[1] + (below.defined() ? below.shape[1] : 0); }
};
FP8MOE_API void outputs(QuantizeWeight& p);
FP8MOE_API void quantize_weight(const QuantizeWeight& p, Stream stream = {});

// q_t [E, K, N] = q [E, N, K] transposed, e4m3 codes and their scales, in block layout. Exact, for
// 128x128 tiles turn onto themselves: what quantize_weight writes as q_t, from q alone. Scales are
// copied, whatever they are.
struct TurnWeight {
  static constexpr const char* op = "turn_weight";

  Fp8Tensor q{};
  Fp8Tensor q_t{};

  static constexpr auto fields = std::tuple{in("q", &TurnWeight::q), out("q_t", &TurnWeight::q_t)};
};
FP8MOE_API void outputs(TurnWeight& p);
FP8MOE_API void turn_weight(const TurnWeight& p, Stream stream = {});

// x = q * scale_inv. q [M, K] in any layout, or [E, M, K] in block. The product is rounded to f32
// and that to x's dtype: a product with a power of two is exact unless it leaves f32's range, so
// that one rounding is left; one with a float32 scale may round twice.
struct Dequantize {
  static constexpr const char* op = "dequantize";

  Fp8Tensor q{};
  Tensor x{};

  static constexpr auto fields =
      std::tuple{in("q", &Dequantize::q), out("x", &Dequantize::x, kAligned)};
};
FP8MOE_API void outputs(Dequantize& p);
FP8MOE_API void dequantize(const Dequantize& p, Stream stream = {});

// ---- routing -----------------------------------------------------------------------------------

// Fills the plan from topk_idx [T, S] i32/i64 (-1: dropped), or from routing_map [T, E]
// bool/u8/i32/i64 with S == E and slot e standing for expert e. Exactly one of the two is given.
// Assignments whose expert-major rank is not below plan.capacity are dropped and counted.
// workspace: u8, whatever it holds.
struct Route {
  static constexpr const char* op = "route";

  Tensor topk_idx{};
  Tensor routing_map{};
  RoutingPlan plan{};
  Tensor workspace{};

  static constexpr auto fields = std::tuple{
      optional_in("topk_idx", &Route::topk_idx), optional_in("routing_map", &Route::routing_map),
      out("plan", &Route::plan), scratch("workspace", &Route::workspace)};
};
FP8MOE_API void outputs(Route& p);
FP8MOE_API void route(const Route& p, Stream stream = {});
FP8MOE_API int64_t workspace_bytes(const Route& p);  // of the plan's sizes and device

// Fills the plan for rows that arrive grouped: tokens_per_expert [E] i32/i64, token i of the plan
// (T == capacity, S == 1) being the i-th row of the packed groups.
struct PlanFromCounts {
  static constexpr const char* op = "plan_from_counts";

  Tensor tokens_per_expert{};
  RoutingPlan plan{};

  static constexpr auto fields =
      std::tuple{in("tokens_per_expert", &PlanFromCounts::tokens_per_expert),
                 out("plan", &PlanFromCounts::plan)};
};
FP8MOE_API void outputs(PlanFromCounts& p);
FP8MOE_API void plan_from_counts(const PlanFromCounts& p, Stream stream = {});

// Fills the plan, of 1 expert, align 1 and capacity R, by which unpermute_unpad, its backward and
// permute_pad move R rows that another library has permuted, by TransformerEngine's row_id_map:
// [T, 2S+1] i32, of a mask: the rows of a token's n slots in columns [0, n), the slots in [S, S+n),
// n in the last one; pad_offsets [S] i64 (optional) is added to the rows of each slot. Or [S*T]
// i32, of indices: cell s*T + t is the row of slot s of token t, -1 for none. All R rows are of the
// one expert, and those the map does not name are padding, wherever they lie. A row at or past R, a
// slot outside [0, S), a row named twice: InvalidArgument on the CPU. CUDA drops the first two and
// counts them in status as overflow and bad expert ids; of tokens that share a row one has it.
struct PlanFromRowIdMap {
  static constexpr const char* op = "plan_from_row_id_map";

  Tensor row_id_map{};
  Tensor pad_offsets{};
  RoutingPlan plan{};

  static constexpr auto fields =
      std::tuple{in("row_id_map", &PlanFromRowIdMap::row_id_map),
                 optional_in("pad_offsets", &PlanFromRowIdMap::pad_offsets),
                 out("plan", &PlanFromRowIdMap::plan)};
};
FP8MOE_API void outputs(PlanFromRowIdMap& p);
FP8MOE_API void plan_from_row_id_map(const PlanFromRowIdMap& p, Stream stream = {});

// ---- the router -------------------------------------------------------------------------------

// How logits become scores: over a token's experts, or each by itself. An `int64_t score`.
enum RouterScore : int64_t { kSoftmax = 0, kSigmoid = 1, kSqrtSoftplus = 2 };

constexpr int64_t kMaxRoutedExperts = 1024;
constexpr int64_t kMaxTopK = 32;

// The k best experts of each token and their weights. E <= kMaxRoutedExperts, k <= kMaxTopK.
//   scores = score(logits)
//   compared = scores, or logits, plus selection_bias
//   experts outside the topk_groups best of num_groups equal groups compare as closed_value (0 or
//     -inf); a group's value is the sum of its best_per_group best
//   topk_idx: the k largest, best first; of equal ones the lower expert, or group, comes first. NaN
//     is above every number.
//   topk_weights: the softmax of the k logits (softmax_after_topk), or the k scores, with
//     `normalize` over (their sum + epsilon); times routed_scaling_factor
// logits [T, E] f32; selection_bias [E] f32; padding [T] bool/u8: tokens that are not counted.
// given_idx [T, k] i64: take these experts, of which a token may name one twice; topk_idx is then
// not given. -1 names none: weight 0, no part in sums, not counted. Other ids outside [0, E): an
// error on the CPU; on CUDA weights NaN, and not counted.
// scores [T, E] f32; topk_idx [T, k] i64; topk_weights [T, k] f32; tokens_per_expert [B E] i64 of
// each of B sequences of equal length, one after the other (B = 1: of all tokens).
struct RouterTopk {
  static constexpr const char* op = "router_topk";

  Tensor logits{};
  Tensor selection_bias{};
  Tensor padding{};
  Tensor given_idx{};
  int64_t top_k = 0;
  int64_t sequences = 1;
  Tensor scores{};
  Tensor topk_idx{};
  Tensor topk_weights{};
  Tensor tokens_per_expert{};
  int64_t score = kSoftmax;
  bool select_by_logits = false;
  int64_t num_groups = 1;
  int64_t topk_groups = 1;
  int64_t best_per_group = 1;
  float closed_value = -std::numeric_limits<float>::infinity();
  bool softmax_after_topk = false;
  bool normalize = true;
  float epsilon = 1e-20f;
  float routed_scaling_factor = 1.0f;

  static constexpr auto fields =
      std::tuple{in("logits", &RouterTopk::logits),
                 optional_in("selection_bias", &RouterTopk::selection_bias),
                 optional_in("padding", &RouterTopk::padding),
                 optional_in("given_idx", &RouterTopk::given_idx),
                 option("top_k", &RouterTopk::top_k),
                 option("sequences", &RouterTopk::sequences),
                 out("scores", &RouterTopk::scores),
                 optional_out("topk_idx", &RouterTopk::topk_idx),
                 out("topk_weights", &RouterTopk::topk_weights),
                 out("tokens_per_expert", &RouterTopk::tokens_per_expert),
                 option("score", &RouterTopk::score),
                 option("select_by_logits", &RouterTopk::select_by_logits),
                 option("num_groups", &RouterTopk::num_groups),
                 option("topk_groups", &RouterTopk::topk_groups),
                 option("best_per_group", &RouterTopk::best_per_group),
                 option("closed_value", &RouterTopk::closed_value),
                 option("softmax_after_topk", &RouterTopk::softmax_after_topk),
                 option("normalize", &RouterTopk::normalize),
                 option("epsilon", &RouterTopk::epsilon),
                 option("routed_scaling_factor", &RouterTopk::routed_scaling_factor)};
};
FP8MOE_API void outputs(RouterTopk& p);
FP8MOE_API void router_topk(const RouterTopk& p, Stream stream = {});

// The gradient of the logits from those of topk_weights [T, k] and of scores [T, E], one at least.
// scores, topk_idx (or given_idx), topk_weights and options as forward. dlogits [T, E] f32.
// A score of sqrt(softplus) at its floor of 2^-63 has no gradient.
struct RouterTopkBackward {
  static constexpr const char* op = "router_topk_backward";

  Tensor dweights{};
  Tensor dscores{};
  Tensor scores{};
  Tensor topk_idx{};
  Tensor topk_weights{};
  Tensor dlogits{};
  int64_t score = kSoftmax;
  bool softmax_after_topk = false;
  bool normalize = true;
  float epsilon = 1e-20f;
  float routed_scaling_factor = 1.0f;

  static constexpr auto fields =
      std::tuple{optional_in("dweights", &RouterTopkBackward::dweights),
                 optional_in("dscores", &RouterTopkBackward::dscores),
                 in("scores", &RouterTopkBackward::scores),
                 in("topk_idx", &RouterTopkBackward::topk_idx),
                 in("topk_weights", &RouterTopkBackward::topk_weights),
                 out("dlogits", &RouterTopkBackward::dlogits),
                 option("score", &RouterTopkBackward::score),
                 option("softmax_after_topk", &RouterTopkBackward::softmax_after_topk),
                 option("normalize", &RouterTopkBackward::normalize),
                 option("epsilon", &RouterTopkBackward::epsilon),
                 option("routed_scaling_factor", &RouterTopkBackward::routed_scaling_factor)};
};
FP8MOE_API void outputs(RouterTopkBackward& p);
FP8MOE_API void router_topk_backward(const RouterTopkBackward& p, Stream stream = {});

// ---- movement ----------------------------------------------------------------------------------

// y[row_of[t,s]] = x[t]; padding rows are zero (data, scale, prob).
// x [T, C] f32/f16/bf16, or FP8 with scales in row or gemm layout; y [R, C] likewise.
// Rows of an FP8 x, and its scales in row layout, may lie row_stride apart: multiples of 16 bytes
// (4 for scales), at least a row.
// probs [T, S] f32 -> row_probs [R] f32, both or neither.
// zero_unweighted: a row whose prob is 0 is written as padding is, data and scale zero.
struct PermutePad {
  static constexpr const char* op = "permute_pad";

  Fp8Tensor x{};
  RoutingPlan plan{};
  Tensor probs{};
  Fp8Tensor y{};
  Tensor row_probs{};
  bool zero_unweighted = false;

  static constexpr auto fields =
      std::tuple{in("x", &PermutePad::x, kStridedRows | kPlainToo),
                 in("plan", &PermutePad::plan),
                 optional_in("probs", &PermutePad::probs),
                 out("y", &PermutePad::y, kPlainToo),
                 optional_out("row_probs", &PermutePad::row_probs),
                 option("zero_unweighted", &PermutePad::zero_unweighted)};
};
FP8MOE_API void outputs(PermutePad& p);
FP8MOE_API void permute_pad(const PermutePad& p, Stream stream = {});

// dx[t] = sum over slots ascending of dy[row_of[t,s]] (f32, rounded once); dprobs[t,s] is
// row_dprobs[row_of[t,s]], 0 for a dropped slot. dy [R, C], dx [T, C].
struct PermutePadBackward {
  static constexpr const char* op = "permute_pad_backward";

  Tensor dy{};
  RoutingPlan plan{};
  Tensor row_dprobs{};
  Tensor dx{};
  Tensor dprobs{};

  static constexpr auto fields =
      std::tuple{in("dy", &PermutePadBackward::dy, kAligned), in("plan", &PermutePadBackward::plan),
                 optional_in("row_dprobs", &PermutePadBackward::row_dprobs),
                 out("dx", &PermutePadBackward::dx, kAligned),
                 optional_out("dprobs", &PermutePadBackward::dprobs)};
};
FP8MOE_API void outputs(PermutePadBackward& p);
FP8MOE_API void permute_pad_backward(const PermutePadBackward& p, Stream stream = {});

// out[t] = sum over slots ascending of (probs[t,s] *) y[row_of[t,s]], f32, rounded once. C is a
// multiple of 16, in f32 of 4.
// peers, first: both or neither. With a plan of dispatch_plan, the rows of slot r are then read
// where rank r has them (see ShareWords): peers [ranks] i64 are addresses, and this rank's rows for
// r begin first[r] rows behind peers[r]; first [ranks] i32 lies in host memory and is read by the
// call; at most kMostPeers ranks. y [n, C] is what peers[this rank] points at.
struct UnpermuteUnpad {
  static constexpr const char* op = "unpermute_unpad";

  Tensor y{};
  RoutingPlan plan{};
  Tensor probs{};
  Tensor peers{};
  Tensor first{};
  Tensor out{};

  static constexpr auto fields = std::tuple{in("y", &UnpermuteUnpad::y, kAligned),
                                            in("plan", &UnpermuteUnpad::plan),
                                            optional_in("probs", &UnpermuteUnpad::probs),
                                            optional_in("peers", &UnpermuteUnpad::peers),
                                            optional_in("first", &UnpermuteUnpad::first),
                                            fp8moe::out("out", &UnpermuteUnpad::out, kAligned)};
};
FP8MOE_API void outputs(UnpermuteUnpad& p);
FP8MOE_API void unpermute_unpad(const UnpermuteUnpad& p, Stream stream = {});

// dy[row] = (probs[t,s] *) dout[t], padding rows zero; dprobs[t,s] = <y[row], dout[t]> in the
// pinned order of common/reduce.h, 0 for a dropped slot. y, probs and dprobs: all or none. C as of
// unpermute_unpad.
// The backward of an FP8 gradient without probs is permute_pad.
struct UnpermuteUnpadBackward {
  static constexpr const char* op = "unpermute_unpad_backward";

  Tensor dout{};
  RoutingPlan plan{};
  Tensor y{};
  Tensor probs{};
  Tensor dy{};
  Tensor dprobs{};

  static constexpr auto fields =
      std::tuple{in("dout", &UnpermuteUnpadBackward::dout, kAligned),
                 in("plan", &UnpermuteUnpadBackward::plan),
                 optional_in("y", &UnpermuteUnpadBackward::y, kAligned),
                 optional_in("probs", &UnpermuteUnpadBackward::probs),
                 out("dy", &UnpermuteUnpadBackward::dy, kAligned),
                 optional_out("dprobs", &UnpermuteUnpadBackward::dprobs)};
};
FP8MOE_API void outputs(UnpermuteUnpadBackward& p);
FP8MOE_API void unpermute_unpad_backward(const UnpermuteUnpadBackward& p, Stream stream = {});

// ---- between ranks (expert parallelism) --------------------------------------------------------

// The plan by which tokens travel to plan.experts ranks, rank r owning num_experts / ranks experts
// from r num_experts / ranks on. plan.slots == plan.experts == ranks and align == 1: slot r of a
// token IS rank r, and a token has one row for a rank however many of its experts live there. Rows
// are rank-major, within a rank in token order.
// segment 0: rank r's rows follow those of r - 1; those not below plan.capacity are dropped.
// segment > 0: rank r owns plan.capacity / ranks rows, a whole number of at least `segment`; tokens
// past the first `segment` are dropped. Dropped: row_of -1, counted in status[kOverflow].
// topk_idx [T, S] i32/i64, -1: none. counts [ranks, 2] i32: rows that carry a token, and entries of
// topk_idx that travel on them. dropped [3] i64: the first words of the plan's status are added to
// it.
// Of other ops, permute_pad, unpermute_unpad and their backward without probs take such a plan; a
// segment's rows without a token are padding to them.
// workspace: u8, whatever it holds.
struct DispatchPlan {
  static constexpr const char* op = "dispatch_plan";

  Tensor topk_idx{};
  int64_t num_experts = 0;
  int64_t segment = 0;
  RoutingPlan plan{};
  Tensor counts{};
  Tensor dropped{};
  Tensor workspace{};

  static constexpr auto fields = std::tuple{in("topk_idx", &DispatchPlan::topk_idx),
                                            option("num_experts", &DispatchPlan::num_experts),
                                            option("segment", &DispatchPlan::segment),
                                            out("plan", &DispatchPlan::plan),
                                            out("counts", &DispatchPlan::counts),
                                            optional_out("dropped", &DispatchPlan::dropped),
                                            scratch("workspace", &DispatchPlan::workspace)};
};
FP8MOE_API void outputs(DispatchPlan& p);
FP8MOE_API void dispatch_plan(const DispatchPlan& p, Stream stream = {});
FP8MOE_API int64_t workspace_bytes(const DispatchPlan& p);  // of the plan's sizes and device

// Bytes of a packed row: hidden codes | cdiv(hidden, 128) f32 scales | slots i32 ids | slots
// f32 probs | zeros up to a multiple of 16. slots 0: a gradient, codes and scales alone.
constexpr int64_t packed_row_bytes(int64_t hidden, int64_t slots) {
  return round_up(hidden + 4 * cdiv(hidden, kTile) + 8 * slots, 16);
}

// packed[row_of[t,r]] = Q(x[t]) by 1x128 tiles, as quantize has it in row layout, and for each slot
// of topk_idx its expert counted from rank r's first (-1: it lives elsewhere) and its prob (0
// there). plan: of dispatch_plan. x [T, H] f32/f16/bf16; topk_idx [T, S] i32/i64 and probs [T, S]
// f32, both or neither (S is then 0, num_experts not read); packed [R, packed_row_bytes(H, S)] u8.
// fp8_dtype: e4m3 or e5m2. Rows of a segment without a token: ids -1, probs 0, else unspecified.
// peers [ranks] i64: the rows of rank r are stored there instead, from address peers[r] on, the
// first n of them (see ShareWords). packed [n, bytes] is what peers[this rank] points at. first
// [ranks] i32, with peers, in host memory: this rank's rows for r begin first[r] rows behind
// peers[r], and end at row n; at most kMostPeers ranks.
struct QuantizePack {
  static constexpr const char* op = "quantize_pack";

  Tensor x{};
  Tensor topk_idx{};
  Tensor probs{};
  int64_t num_experts = 0;
  RoutingPlan plan{};
  Tensor peers{};
  Tensor first{};
  Tensor packed{};
  DType fp8_dtype = DType::e4m3;
  ScaleRule rule{};

  static constexpr auto fields = std::tuple{in("x", &QuantizePack::x, kAligned),
                                            optional_in("topk_idx", &QuantizePack::topk_idx),
                                            optional_in("probs", &QuantizePack::probs),
                                            option("num_experts", &QuantizePack::num_experts),
                                            in("plan", &QuantizePack::plan),
                                            optional_in("peers", &QuantizePack::peers),
                                            optional_in("first", &QuantizePack::first),
                                            out("packed", &QuantizePack::packed, kAligned),
                                            option("fp8_dtype", &QuantizePack::fp8_dtype),
                                            option("rule", &QuantizePack::rule)};
};
FP8MOE_API void outputs(QuantizePack& p);
FP8MOE_API void quantize_pack(const QuantizePack& p, Stream stream = {});

// topk_idx [R, S] i32 and probs [R, S] f32 of packed [R, packed_row_bytes(hidden, S)] u8. Codes and
// scales are read where they are: at bytes 0 and hidden, a row every packed_row_bytes.
struct Unpack {
  static constexpr const char* op = "unpack";

  Tensor packed{};
  int64_t hidden = 0;
  int64_t slots = 0;
  Tensor topk_idx{};
  Tensor probs{};

  static constexpr auto fields =
      std::tuple{in("packed", &Unpack::packed, kAligned), option("hidden", &Unpack::hidden),
                 option("slots", &Unpack::slots), out("topk_idx", &Unpack::topk_idx),
                 out("probs", &Unpack::probs)};
};
FP8MOE_API void outputs(Unpack& p);
FP8MOE_API void unpack(const Unpack& p, Stream stream = {});

// The ranks of one host, which can address each other's memory, tell each other words [k] i32 and,
// behind them, more [m, l] i32, n in all (row r of told [ranks, n] has rank r's), and meet: told is
// written when every rank has come here, and what a rank's stream had written to its peers' memory
// before is there then. Collective: every rank calls it, in the same order on one stream, for
// mailboxes of one shape. peers [ranks] i64: the address of each rank's mailbox, as this device has
// it. mailbox, this rank's: [2, ranks, stride] i32, zero at first, stride > n, 0 <= rank < ranks.
// calls [1] i32, zero at first: how often the ranks have met here (mod 2^32).
// ended [1] i32, zero at first: whether one was late; several mailboxes may have one.
// late [ranks] i32 and told may lie in pinned host memory, too. late counts the calls that ended
// without rank r, timeout_ms after they began. Its words are then zeros, and from then on every
// call ends at once, with zeros.
struct ShareWords {
  static constexpr const char* op = "share_words";

  Tensor words{};
  Tensor more{};
  Tensor peers{};
  Tensor mailbox{};
  Tensor calls{};
  Tensor ended{};
  Tensor late{};
  int64_t rank = 0;
  int64_t timeout_ms = 0;
  Tensor told{};

  int64_t count() const { return words.numel() + (more.defined() ? more.numel() : 0); }

  static constexpr auto fields = std::tuple{in("words", &ShareWords::words),
                                            optional_in("more", &ShareWords::more),
                                            in("peers", &ShareWords::peers),
                                            status("mailbox", &ShareWords::mailbox),
                                            status("calls", &ShareWords::calls),
                                            status("ended", &ShareWords::ended),
                                            status("late", &ShareWords::late),
                                            option("rank", &ShareWords::rank),
                                            option("timeout_ms", &ShareWords::timeout_ms),
                                            out("told", &ShareWords::told)};
};
FP8MOE_API void outputs(ShareWords& p);
FP8MOE_API void share_words(const ShareWords& p, Stream stream = {});

// out [R, C] f32/f16/bf16/i32/u8 = rows from elsewhere. places [n, 3] i64, in host memory: the
// address of a place's first row, as out's device has it, its number of rows, and the row of out
// where they go. The numbers add up to R; addresses are trusted. On CUDA the driver copies the
// places one by one: from another GPU by a copy engine, which takes no SMs. beside: a cudaStream_t
// on which it copies, behind what the call's stream has until then; 0: on the call's.
struct CopyRows {
  static constexpr const char* op = "copy_rows";

  Tensor out{};
  Tensor places{};
  int64_t beside = 0;

  static constexpr auto fields =
      std::tuple{fp8moe::out("out", &CopyRows::out), in("places", &CopyRows::places),
                 option("beside", &CopyRows::beside)};
};
FP8MOE_API void outputs(CopyRows& p);
FP8MOE_API void copy_rows(const CopyRows& p, Stream stream = {});

// ---- transposes in the FP8 domain --------------------------------------------------------------

// columns = the rows of q as the contracted dimension, shifted to one scale per tile:
// code' = RNE(code 2^-k).
// q [R, C] with 1x128 power-of-two scales; columns [C, Kcap] of q's format, layout block (128x128
// tiles) or gemm (1x128 tiles along tokens, scales [Kcap/128, pad4(C)]).
// requantize: dequantize and quantize again by `rule` instead (any scales; a second rounding).
struct TransposeFp8 {
  static constexpr const char* op = "transpose_fp8";

  Fp8Tensor q{};
  RoutingPlan plan{};
  Fp8Tensor columns{};
  bool requantize = false;
  ScaleRule rule{};

  static constexpr auto fields = std::tuple{
      in("q", &TransposeFp8::q), status("plan", &TransposeFp8::plan),
      out("columns", &TransposeFp8::columns), option("requantize", &TransposeFp8::requantize),
      option("rule", &TransposeFp8::rule)};
};
FP8MOE_API void outputs(TransposeFp8& p);
FP8MOE_API void transpose_fp8(const TransposeFp8& p, Stream stream = {});

// transpose_fp8(permute_pad(q)) without the intermediate; q [T, C], bit-equal to the two ops. Its
// rows may lie row_stride apart, as permute_pad's.
struct PermuteTransposeFp8 {
  static constexpr const char* op = "permute_transpose_fp8";

  Fp8Tensor q{};
  RoutingPlan plan{};
  Fp8Tensor columns{};

  static constexpr auto fields = std::tuple{in("q", &PermuteTransposeFp8::q, kStridedRows),
                                            status("plan", &PermuteTransposeFp8::plan),
                                            out("columns", &PermuteTransposeFp8::columns)};
};
FP8MOE_API void outputs(PermuteTransposeFp8& p);
FP8MOE_API void permute_transpose_fp8(const PermuteTransposeFp8& p, Stream stream = {});

// ---- what FP8 costs ----------------------------------------------------------------------------

// Adds to counts [kCodeCounts] i64 what rows 0, stride, 2 stride, ... of q hold, reading their
// codes once. q [T, C] in row layout (rows may lie apart), or [R, C] in gemm layout, of which rows
// without an assignment are left out. `columns`: the operand permute_transpose_fp8 made of q in row
// layout, power-of-two scales; its scales alone are read. Words: CodeCount.
struct CountCodes {
  static constexpr const char* op = "count_codes";

  Fp8Tensor q{};
  RoutingPlan plan{};
  Fp8Tensor columns{};
  int64_t stride = 1;
  Tensor counts{};

  static constexpr auto fields =
      std::tuple{in("q", &CountCodes::q, kStridedRows), in("plan", &CountCodes::plan),
                 optional_in("columns", &CountCodes::columns),
                 option("stride", &CountCodes::stride), out("counts", &CountCodes::counts)};
};
FP8MOE_API void outputs(CountCodes& p);
FP8MOE_API void count_codes(const CountCodes& p, Stream stream = {});

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

// ---- activation --------------------------------------------------------------------------------

// h = Q(act(z) * prob), z f32/f16/bf16 [R, 2I] or [R, I] as the activation says, probs [R] f32 or
// none. `plan` may be undefined: all R rows are then ordinary. Outputs in e4m3, row or gemm layout:
// h [R, I]; optional z_q = Q(z) of z's shape, the FP8 pre-activation.
struct ActQuantize {
  static constexpr const char* op = "act_quantize";

  Tensor z{};
  RoutingPlan plan{};
  Tensor probs{};
  Activation activation{};
  int64_t rounding = kRoundNothing;
  Fp8Tensor h{};
  Fp8Tensor z_q{};
  ScaleRule rule{};

  static constexpr auto fields = std::tuple{
      in("z", &ActQuantize::z, kAligned),         optional_in("plan", &ActQuantize::plan),
      optional_in("probs", &ActQuantize::probs),  option("activation", &ActQuantize::activation),
      option("rounding", &ActQuantize::rounding), out("h", &ActQuantize::h),
      optional_out("z_q", &ActQuantize::z_q),     option("rule", &ActQuantize::rule)};
};
FP8MOE_API void outputs(ActQuantize& p);
FP8MOE_API void act_quantize(const ActQuantize& p, Stream stream = {});

// The gradient: dh [R, I] f32/f16/bf16, z as given forward. dz = Q(gradient of z), of z's shape;
// dprobs [R] f32 = sum of act(z)*dh in the pinned order; optional, with a plan and as in
// transpose_fp8, dz_columns [2I, Kcap] (or [I, Kcap]) in dz's format, and h_columns [I, Kcap] in
// e4m3 of h, which is recomputed.
// workspace: a zero workspace, where dprobs and columns are computed on CUDA.
struct ActQuantizeBackward {
  static constexpr const char* op = "act_quantize_backward";

  Tensor dh{};
  Tensor z{};
  RoutingPlan plan{};
  Tensor probs{};
  Activation activation{};
  Fp8Tensor dz{};
  Tensor dprobs{};
  Fp8Tensor dz_columns{};
  Fp8Tensor h_columns{};
  ScaleRule rule{};
  Tensor workspace{};

  static constexpr auto fields =
      std::tuple{in("dh", &ActQuantizeBackward::dh, kAligned),
                 in("z", &ActQuantizeBackward::z, kAligned),
                 optional_in("plan", &ActQuantizeBackward::plan),
                 optional_in("probs", &ActQuantizeBackward::probs),
                 option("activation", &ActQuantizeBackward::activation),
                 out("dz", &ActQuantizeBackward::dz),
                 optional_out("dprobs", &ActQuantizeBackward::dprobs),
                 optional_out("dz_columns", &ActQuantizeBackward::dz_columns),
                 optional_out("h_columns", &ActQuantizeBackward::h_columns),
                 option("rule", &ActQuantizeBackward::rule),
                 zero_scratch("workspace", &ActQuantizeBackward::workspace)};
};
FP8MOE_API void outputs(ActQuantizeBackward& p);
FP8MOE_API void act_quantize_backward(const ActQuantizeBackward& p, Stream stream = {});
FP8MOE_API int64_t workspace_bytes(const ActQuantizeBackward& p);  // of the outputs given

// ---- grouped GEMM ------------------------------------------------------------------------------

// d[rows of e] = a[rows of e] w[e]^T + a2[rows of e] w2[e]^T. a [R, K] e4m3 or e5m2, gemm layout;
// w [E, N, K] e4m3, block layout; d [R, N] bf16/f32. a2 [R, K2] in a's format and w2 [E, N, K2],
// both or neither: one more K-block, the last one summed; K2 at most 128.
struct GroupedGemm {
  static constexpr const char* op = "grouped_gemm";

  Fp8Tensor a{};
  Fp8Tensor w{};
  RoutingPlan plan{};
  Tensor d{};
  Fp8Tensor a2{};
  Fp8Tensor w2{};

  static constexpr auto fields = std::tuple{in("a", &GroupedGemm::a),
                                            in("w", &GroupedGemm::w),
                                            in("plan", &GroupedGemm::plan),
                                            out("d", &GroupedGemm::d, kAligned),
                                            optional_in("a2", &GroupedGemm::a2),
                                            optional_in("w2", &GroupedGemm::w2)};
};
FP8MOE_API void outputs(GroupedGemm& p);
FP8MOE_API void grouped_gemm(const GroupedGemm& p, Stream stream = {});

// dw[e] (+)= dy_t[:, tokens of e] x_t[:, tokens of e]^T. dy_t [N, Kcap] e4m3 or e5m2, x_t [K, Kcap]
// e4m3, both block or both gemm layout; dw [E, N, K] f32/bf16. Without accumulate an empty expert's
// dw is zero. workspace: a zero workspace, on CUDA.
struct GroupedGemmWgrad {
  static constexpr const char* op = "grouped_gemm_wgrad";

  Fp8Tensor dy_t{};
  Fp8Tensor x_t{};
  RoutingPlan plan{};
  Tensor dw{};
  bool accumulate = false;
  Tensor workspace{};

  static constexpr auto fields =
      std::tuple{in("dy_t", &GroupedGemmWgrad::dy_t),
                 in("x_t", &GroupedGemmWgrad::x_t),
                 in("plan", &GroupedGemmWgrad::plan),
                 out("dw", &GroupedGemmWgrad::dw, kAligned),
                 option("accumulate", &GroupedGemmWgrad::accumulate),
                 zero_scratch("workspace", &GroupedGemmWgrad::workspace)};
};
FP8MOE_API void outputs(GroupedGemmWgrad& p);
FP8MOE_API void grouped_gemm_wgrad(const GroupedGemmWgrad& p, Stream stream = {});
FP8MOE_API int64_t workspace_bytes(const GroupedGemmWgrad& p);  // of dw's device alone

// ---- low-rank terms (LoRA) ---------------------------------------------------------------------
// d = a w^T + s (a A^T) B^T per expert. u = s a A^T is small; as FP8 it is the a2 of a grouped_gemm
// whose w2 is B. Factors lie as A does, [E, r, C] (rank_first), or as B does, [E, C, r]; r is a
// multiple of 8, 8 to kMaxLoraRank.

constexpr int64_t kMaxLoraRank = 64;

// Of u and B a K-block holds parts: the codes `high` of E4M3 or E5M2, and `low`, those of what
// rounding to `high` left, at the same scale. r' is r rounded up to 16; each part has r' columns,
// zero from r on.
//   r' <= 32: a2 = [high low high],  w2 = [high high low]
//   else:     a2 = [high low],       w2 = [high high]
constexpr int64_t lora_depth(int64_t rank) {
  const int64_t columns = round_up(rank, 16);
  return (columns <= 32 ? 3 : 2) * columns;
}

// u[row] = scaling * rows[row] factor[e]^T of an expert's rows, summed over K-blocks in f32 and
// rounded to bf16; u_q: the parts of that u in rows' format, one scale per row. rows [R, C] in gemm
// layout, or [T, C] in row layout, which the plan takes to their experts (rows and scales may lie
// apart); factor bf16; u [R, r]; u_q [R, lora_depth(r)], gemm layout.
struct LoraProject {
  static constexpr const char* op = "lora_project";

  Fp8Tensor rows{};
  Tensor factor{};
  RoutingPlan plan{};
  Tensor u{};
  Fp8Tensor u_q{};
  bool rank_first = true;
  float scaling = 1.0f;
  ScaleRule rule{};

  static constexpr auto fields = std::tuple{in("rows", &LoraProject::rows, kStridedRows),
                                            in("factor", &LoraProject::factor, kAligned),
                                            in("plan", &LoraProject::plan),
                                            out("u", &LoraProject::u, kAligned),
                                            out("u_q", &LoraProject::u_q),
                                            option("rank_first", &LoraProject::rank_first),
                                            option("scaling", &LoraProject::scaling),
                                            option("rule", &LoraProject::rule)};
};
FP8MOE_API void outputs(LoraProject& p);
FP8MOE_API void lora_project(const LoraProject& p, Stream stream = {});

// dfactor[e] = u[rows of e]^T rows[rows of e], [E, r, C] or its transpose [E, C, r]: the values of
// u times the scales of rows, rounded to bf16, times the codes, summed in f32 over rows in
// ascending order. rows as of lora_project; u [R, r] bf16; dfactor f32/bf16, zero of an expert
// without tokens.
struct LoraWgrad {
  static constexpr const char* op = "lora_wgrad";

  Tensor u{};
  Fp8Tensor rows{};
  RoutingPlan plan{};
  Tensor dfactor{};
  bool rank_first = true;

  static constexpr auto fields =
      std::tuple{in("u", &LoraWgrad::u, kAligned), in("rows", &LoraWgrad::rows, kStridedRows),
                 in("plan", &LoraWgrad::plan), out("dfactor", &LoraWgrad::dfactor, kAligned),
                 option("rank_first", &LoraWgrad::rank_first)};
};
FP8MOE_API void outputs(LoraWgrad& p);
FP8MOE_API void lora_wgrad(const LoraWgrad& p, Stream stream = {});

// w2 [E, C, lora_depth(r)], e4m3, block layout: the parts of a factor, bf16, one scale per 128 of
// C.
struct QuantizeLora {
  static constexpr const char* op = "quantize_lora";

  Tensor factor{};
  Fp8Tensor w2{};
  bool rank_first = false;
  ScaleRule rule{};

  static constexpr auto fields = std::tuple{
      in("factor", &QuantizeLora::factor, kAligned), out("w2", &QuantizeLora::w2),
      option("rank_first", &QuantizeLora::rank_first), option("rule", &QuantizeLora::rule)};
};
FP8MOE_API void outputs(QuantizeLora& p);
FP8MOE_API void quantize_lora(const QuantizeLora& p, Stream stream = {});

// ---- what is here ------------------------------------------------------------------------------

// All of them: what bindings and tests fold over.
inline constexpr auto operators = std::tuple{&quantize,
                                             &quantize_weight,
                                             &turn_weight,
                                             &dequantize,
                                             &route,
                                             &plan_from_counts,
                                             &plan_from_row_id_map,
                                             &router_topk,
                                             &router_topk_backward,
                                             &permute_pad,
                                             &permute_pad_backward,
                                             &unpermute_unpad,
                                             &unpermute_unpad_backward,
                                             &dispatch_plan,
                                             &quantize_pack,
                                             &unpack,
                                             &share_words,
                                             &copy_rows,
                                             &transpose_fp8,
                                             &permute_transpose_fp8,
                                             &count_codes,
                                             &act_quantize,
                                             &act_quantize_backward,
                                             &grouped_gemm,
                                             &grouped_gemm_wgrad,
                                             &lora_project,
                                             &lora_wgrad,
                                             &quantize_lora};

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
