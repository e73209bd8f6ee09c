// The expert block over the operators of libfp8moe: forward, backward and weight gradients, for a
// runtime that owns all memory. It has the bits of the Python layer with its default recipe.
//
//   out[t] = sum over slots of down_e h,  h = silu(gate) * up * prob,  [gate | up] = gate_up_e x[t]
//
// The caller gives two buffers per call, u8 at a multiple of 16 bytes: one that the next call
// reads, one of scratch. Functions say how many bytes. Nothing here allocates or waits.
#pragma once

#include <algorithm>
#include <string>

#include "fp8moe/ops.h"

namespace experts {

using namespace fp8moe;

// Letters: T tokens, S slots, E experts, H hidden, I intermediate; R rows, Kcap as in plan.h.
struct Sizes {
  int64_t tokens = 0, slots = 0, experts = 0, hidden = 0, intermediate = 0;
  int64_t capacity = 0;      // so many assignments get a row; T S: all
  bool came_in_fp8 = false;  // x and dout are FP8 rows already, in row layout
  Device device{};

  RoutingPlan plan() const {  // without memory
    RoutingPlan p{{}, tokens, slots, experts, /*align=*/1, capacity};
    p.buffer.device = device;
    return p;
  }
  int64_t rows() const { return plan().rows(); }
  int64_t columns() const { return plan().columns(); }
};

// Places tensors one behind the other in a buffer; in none it only counts their bytes.
class Memory {
 public:
  explicit Memory(const Tensor& buffer = {}) : buffer_(buffer) {}

  Tensor tensor(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t(nullptr, dtype, shape, buffer_.device);
    const int64_t at = used_;
    used_ += round_up(t.numel() * size_of(dtype), 256);
    most_ = std::max(most_, used_);
    if (!buffer_.defined()) return t;
    if (used_ > buffer_.numel())
      throw InvalidArgument("[experts] a buffer must have at least " + std::to_string(used_) +
                            " bytes; got " + std::to_string(buffer_.numel()));
    t.data = buffer_.as<char>() + at;
    return t;
  }
  Fp8Tensor rows(int64_t m, int64_t k) {
    return {tensor(DType::e4m3, {m, k}), tensor(DType::f32, {m, cdiv(k, kTile)}), ScaleLayout::row};
  }
  Fp8Tensor operand(int64_t m, int64_t k) {  // of a grouped GEMM
    return {tensor(DType::e4m3, {m, k}), tensor(DType::f32, {cdiv(k, kTile), pad4(m)}),
            ScaleLayout::gemm};
  }
  Fp8Tensor columns(int64_t c, int64_t k) {  // tokens contiguous: an operand of a weight gradient
    return {tensor(DType::e4m3, {c, k}), tensor(DType::f32, {cdiv(c, kTile), cdiv(k, kTile)}),
            ScaleLayout::block};
  }
  Fp8Tensor weight(int64_t e, int64_t n, int64_t k) {
    return {tensor(DType::e4m3, {e, n, k}), tensor(DType::f32, {e, cdiv(n, kTile), cdiv(k, kTile)}),
            ScaleLayout::block};
  }

  // What was placed behind `mark` is no longer needed by what follows on the stream.
  int64_t mark() const { return used_; }
  void rewind(int64_t mark) { used_ = mark; }
  int64_t most() const { return most_; }

 private:
  Tensor buffer_;
  int64_t used_ = 0, most_ = 0;
};

// What forward keeps for backward.
struct Saved {
  RoutingPlan plan;
  Fp8Tensor x{};  // [T, H], unless it came in FP8: then whoever has it keeps it
  Tensor row_probs, z;
  Fp8Tensor gate_up_t, down_t;  // [E, H, 2I], [E, I, H]: as dgrad reads them

  Saved(const Sizes& s, Memory& m, bool backward = true) : plan(s.plan()) {
    const int64_t two_i = 2 * s.intermediate;
    plan.buffer = m.tensor(DType::i32, {plan.buffer_size()});
    if (!s.came_in_fp8) x = m.rows(s.tokens, s.hidden);
    row_probs = m.tensor(DType::f32, {s.rows()});
    z = m.tensor(DType::bf16, {s.rows(), two_i});
    if (!backward) return;
    gate_up_t = m.weight(s.experts, s.hidden, two_i);
    down_t = m.weight(s.experts, s.intermediate, s.hidden);
  }
};

// What backward keeps for the weight gradients.
struct Kept {
  Fp8Tensor dout{};  // [T, H], unless it came in FP8
  Fp8Tensor dz, h;   // [2I, Kcap], [I, Kcap]

  Kept(const Sizes& s, Memory& m) {
    if (!s.came_in_fp8) dout = m.rows(s.tokens, s.hidden);
    dz = m.columns(2 * s.intermediate, s.columns());
    h = m.columns(s.intermediate, s.columns());
  }
};

// ---- scratch -----------------------------------------------------------------------------------

struct ForwardScratch {
  Tensor route;
  Fp8Tensor gate_up, rows;
  Fp8Tensor down, h;  // over the three above, which have been read by then
  Tensor y;

  ForwardScratch(const Sizes& s, Memory& m) {
    const int64_t start = m.mark();
    route = m.tensor(DType::u8, {workspace_bytes(Route{.plan = s.plan()})});
    gate_up = m.weight(s.experts, 2 * s.intermediate, s.hidden);
    rows = m.operand(s.rows(), s.hidden);
    m.rewind(start);
    down = m.weight(s.experts, s.hidden, s.intermediate);
    h = m.operand(s.rows(), s.intermediate);
    y = m.tensor(DType::bf16, {s.rows(), s.hidden});
  }
};

struct BackwardScratch {
  Tensor dh;
  Fp8Tensor dy;
  Fp8Tensor dz;  // over dy
  Tensor row_dprobs, dx;

  BackwardScratch(const Sizes& s, Memory& m) {
    dh = m.tensor(DType::bf16, {s.rows(), s.intermediate});
    const int64_t start = m.mark();
    dy = m.operand(s.rows(), s.hidden);
    m.rewind(start);
    dz = m.operand(s.rows(), 2 * s.intermediate);
    row_dprobs = m.tensor(DType::f32, {s.rows()});
    dx = m.tensor(DType::bf16, {s.rows(), s.hidden});
  }
};

struct GradientScratch {
  Fp8Tensor columns;  // of x or dout

  GradientScratch(const Sizes& s, Memory& m) : columns(m.columns(s.hidden, s.columns())) {}
};

// ---- how many bytes ----------------------------------------------------------------------------

template <class Part>
int64_t bytes_of(const Sizes& s) {
  Memory counted;
  Part(s, counted);
  return counted.most();
}
inline int64_t saved_bytes(const Sizes& s) { return bytes_of<Saved>(s); }
inline int64_t kept_bytes(const Sizes& s) { return bytes_of<Kept>(s); }
inline int64_t forward_scratch_bytes(const Sizes& s, bool backward = true) {
  Memory counted;
  if (!backward) Saved(s, counted, false);
  ForwardScratch(s, counted);
  return counted.most();
}
inline int64_t backward_scratch_bytes(const Sizes& s) { return bytes_of<BackwardScratch>(s); }
inline int64_t gradient_scratch_bytes(const Sizes& s) { return bytes_of<GradientScratch>(s); }

// ---- the block ---------------------------------------------------------------------------------

struct Forward {
  Fp8Tensor x{};    // [T, H] f32/f16/bf16, without scales; or FP8 rows, which may lie apart
  Tensor topk_idx;  // [T, S] i32/i64; -1: none
  Tensor probs;     // [T, S] f32
  Tensor gate_up;   // [E, 2I, H] f32/f16/bf16
  Tensor down;      // [E, H, I]
  Tensor out;       // [T, H] bf16
  Tensor saved{};   // saved_bytes(s); left out: there is no backward
  Tensor scratch;   // forward_scratch_bytes(s, whether there is one)
};

inline void forward(const Sizes& s, const Forward& f, Stream stream = {}) {
  Memory kept(f.saved), scratch(f.scratch);
  const bool backward = f.saved.defined();
  const Saved saved(s, backward ? kept : scratch, backward);
  const ForwardScratch made(s, scratch);
  const RoutingPlan& plan = saved.plan;
  route({.topk_idx = f.topk_idx, .plan = plan, .workspace = made.route}, stream);
  if (!s.came_in_fp8) quantize({.x = f.x.data, .q = saved.x}, stream);
  quantize_weight({.w = f.gate_up, .q = made.gate_up, .q_t = saved.gate_up_t}, stream);
  permute_pad({.x = s.came_in_fp8 ? f.x : saved.x,
               .plan = plan,
               .probs = f.probs,
               .y = made.rows,
               .row_probs = saved.row_probs},
              stream);
  grouped_gemm({.a = made.rows, .w = made.gate_up, .plan = plan, .d = saved.z}, stream);
  quantize_weight({.w = f.down, .q = made.down, .q_t = saved.down_t}, stream);
  act_quantize({.z = saved.z, .plan = plan, .probs = saved.row_probs, .h = made.h}, stream);
  grouped_gemm({.a = made.h, .w = made.down, .plan = plan, .d = made.y}, stream);
  unpermute_unpad({.y = made.y, .plan = plan, .out = f.out}, stream);
}

struct Backward {
  Fp8Tensor dout{};  // [T, H], as x came
  Tensor saved;      // forward's
  Tensor dx;         // [T, H] bf16
  Tensor dprobs;     // [T, S] f32
  Tensor kept;       // kept_bytes(s)
  Tensor workspace;  // kZeroWorkspaceBytes of zeros, which the calls on one stream may share
  Tensor scratch;    // backward_scratch_bytes(s)
};

inline void backward(const Sizes& s, const Backward& b, Stream stream = {}) {
  Memory saving(b.saved), keeping(b.kept), scratch(b.scratch);
  const Saved saved(s, saving);
  const Kept kept(s, keeping);
  const BackwardScratch made(s, scratch);
  const RoutingPlan& plan = saved.plan;
  if (!s.came_in_fp8) quantize({.x = b.dout.data, .q = kept.dout}, stream);
  permute_pad({.x = s.came_in_fp8 ? b.dout : kept.dout, .plan = plan, .y = made.dy}, stream);
  grouped_gemm({.a = made.dy, .w = saved.down_t, .plan = plan, .d = made.dh}, stream);
  act_quantize_backward({.dh = made.dh,
                         .z = saved.z,
                         .plan = plan,
                         .probs = saved.row_probs,
                         .dz = made.dz,
                         .dprobs = made.row_dprobs,
                         .dz_columns = kept.dz,
                         .h_columns = kept.h,
                         .workspace = b.workspace},
                        stream);
  grouped_gemm({.a = made.dz, .w = saved.gate_up_t, .plan = plan, .d = made.dx}, stream);
  permute_pad_backward(
      {.dy = made.dx, .plan = plan, .row_dprobs = made.row_dprobs, .dx = b.dx, .dprobs = b.dprobs},
      stream);
}

struct WeightGradient {
  bool of_down = false;  // else of gate_up
  Fp8Tensor rows{};      // x of gate_up, dout of down, where they came in FP8
  Tensor saved, kept;    // forward's, backward's
  Tensor dw;             // of the weight's shape, f32/bf16
  bool accumulate = false;
  Tensor workspace;  // as of backward
  Tensor scratch;    // gradient_scratch_bytes(s)
};

inline void weight_gradient(const Sizes& s, const WeightGradient& g, Stream stream = {}) {
  Memory saving(g.saved), keeping(g.kept), scratch(g.scratch);
  const Saved saved(s, saving);
  const Kept kept(s, keeping);
  const Fp8Tensor columns = GradientScratch(s, scratch).columns;
  const Fp8Tensor& rows = s.came_in_fp8 ? g.rows : g.of_down ? kept.dout : saved.x;
  permute_transpose_fp8({.q = rows, .plan = saved.plan, .columns = columns}, stream);
  grouped_gemm_wgrad({.dy_t = g.of_down ? columns : kept.dz,
                      .x_t = g.of_down ? kept.h : columns,
                      .plan = saved.plan,
                      .dw = g.dw,
                      .accumulate = g.accumulate,
                      .workspace = g.workspace},
                     stream);
}

}  // namespace experts
