// The extension _C: one m.def an op, arguments as in fp8moe/ops.h, flattened.
//
// An Fp8Tensor argument `q` is `q`, `q_scale` and, where more than one is legal, `q_layout` ("row",
// "gemm" or "block"); a RoutingPlan is `plan` (its buffer) and its five sizes, zero without a plan.
// None leaves an optional array out; (array, "e4m3") names the format of uint8 codes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>

#include "call.h"
#include "eager.h"
#include "errors.h"
#include "fp8moe/explain.h"
#include "fp8moe/ops.h"

namespace fp8moe {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

using In = const TensorArg&;
using Out = const OutArg&;
using Layout = const char*;

// A plan's sizes travel as plain integers: torch's dispatcher is twice as slow with a list.
#define PLAN_SIZES int64_t tokens, int64_t slots, int64_t experts, int64_t align, int64_t capacity
#define PLAN_NAMES "tokens"_a, "slots"_a, "experts"_a, "align"_a, "capacity"_a

ScaleRule rule(bool pow2, double eps) { return {.pow2 = pow2, .eps = static_cast<float>(eps)}; }

void bind_quantization(nb::module_& m) {
  m.def(
      "quantize",
      [](In x, Out q, Out q_scale, Layout q_layout, bool pow2, double eps) {
        Call op("quantize");
        op.run(quantize, op.tensor(x, "x"), op.fp8(q, q_scale, q_layout, "q"), rule(pow2, eps));
      },
      "x"_a, "q"_a, "q_scale"_a, "q_layout"_a, "pow2"_a, "eps"_a);

  m.def(
      "quantize_weight",
      [](In w, Out q, Out q_scale, Out q_t, Out q_t_scale, bool pow2, double eps) {
        Call op("quantize_weight");
        op.run(quantize_weight, op.tensor(w, "w"), op.fp8(q, q_scale, "block", "q"),
               op.fp8(q_t, q_t_scale, "block", "q_t"), rule(pow2, eps));
      },
      "w"_a, "q"_a.none(), "q_scale"_a.none(), "q_t"_a.none(), "q_t_scale"_a.none(), "pow2"_a,
      "eps"_a);

  m.def(
      "dequantize",
      [](In q, In q_scale, Layout q_layout, Out x) {
        Call op("dequantize");
        op.run(dequantize, op.fp8(q, q_scale, q_layout, "q"), op.tensor(x, "x"));
      },
      "q"_a, "q_scale"_a, "q_layout"_a, "x"_a);
}

void bind_routing(nb::module_& m) {
  m.def(
      "route_workspace",
      [](In plan, PLAN_SIZES) {
        return route_workspace(Call("route").plan(plan, {tokens, slots, experts, align, capacity}));
      },
      "plan"_a, PLAN_NAMES, "Bytes of scratch `route` needs for a plan of this shape.");

  m.def(
      "route",
      [](In topk_idx, In routing_map, Out plan, PLAN_SIZES, Out workspace) {
        Call op("route");
        op.run(route, op.tensor(topk_idx, "topk_idx"), op.tensor(routing_map, "routing_map"),
               op.plan(plan, {tokens, slots, experts, align, capacity}),
               op.tensor(workspace, "workspace"));
      },
      "topk_idx"_a.none(), "routing_map"_a.none(), "plan"_a, PLAN_NAMES, "workspace"_a);

  m.def(
      "plan_from_counts",
      [](In tokens_per_expert, Out plan, PLAN_SIZES) {
        Call op("plan_from_counts");
        op.run(plan_from_counts, op.tensor(tokens_per_expert, "tokens_per_expert"),
               op.plan(plan, {tokens, slots, experts, align, capacity}));
      },
      "tokens_per_expert"_a, "plan"_a, PLAN_NAMES);
}

void bind_movement(nb::module_& m) {
  m.def(
      "permute_pad",
      [](In x, In x_scale, Layout x_layout, In plan, PLAN_SIZES, In probs, Out y, Out y_scale,
         Layout y_layout, Out row_probs, bool zero_unweighted) {
        Call op("permute_pad");
        if (x_scale.given || y_scale.given) {
          using F = void (*)(const Fp8Tensor&, const RoutingPlan&, const Tensor&, const Fp8Tensor&,
                             const Tensor&, bool, Stream);
          op.run(static_cast<F>(permute_pad), op.fp8(x, x_scale, x_layout, "x", true),
                 op.plan(plan, {tokens, slots, experts, align, capacity}),
                 op.tensor(probs, "probs"), op.fp8(y, y_scale, y_layout, "y"),
                 op.tensor(row_probs, "row_probs"), zero_unweighted);
        } else {
          using F = void (*)(const Tensor&, const RoutingPlan&, const Tensor&, const Tensor&,
                             const Tensor&, bool, Stream);
          op.run(static_cast<F>(permute_pad), op.tensor(x, "x"),
                 op.plan(plan, {tokens, slots, experts, align, capacity}),
                 op.tensor(probs, "probs"), op.tensor(y, "y"), op.tensor(row_probs, "row_probs"),
                 zero_unweighted);
        }
      },
      "x"_a, "x_scale"_a.none(), "x_layout"_a, "plan"_a, PLAN_NAMES, "probs"_a.none(), "y"_a,
      "y_scale"_a.none(), "y_layout"_a, "row_probs"_a.none(), "zero_unweighted"_a);

  m.def(
      "permute_pad_backward",
      [](In dy, In plan, PLAN_SIZES, In row_dprobs, Out dx, Out dprobs) {
        Call op("permute_pad_backward");
        op.run(permute_pad_backward, op.tensor(dy, "dy"),
               op.plan(plan, {tokens, slots, experts, align, capacity}),
               op.tensor(row_dprobs, "row_dprobs"), op.tensor(dx, "dx"),
               op.tensor(dprobs, "dprobs"));
      },
      "dy"_a, "plan"_a, PLAN_NAMES, "row_dprobs"_a.none(), "dx"_a, "dprobs"_a.none());

  m.def(
      "unpermute_unpad",
      [](In y, In plan, PLAN_SIZES, In probs, Out out) {
        Call op("unpermute_unpad");
        op.run(unpermute_unpad, op.tensor(y, "y"),
               op.plan(plan, {tokens, slots, experts, align, capacity}), op.tensor(probs, "probs"),
               op.tensor(out, "out"));
      },
      "y"_a, "plan"_a, PLAN_NAMES, "probs"_a.none(), "out"_a);

  m.def(
      "unpermute_unpad_backward",
      [](In dout, In plan, PLAN_SIZES, In y, In probs, Out dy, Out dprobs) {
        Call op("unpermute_unpad_backward");
        op.run(unpermute_unpad_backward, op.tensor(dout, "dout"),
               op.plan(plan, {tokens, slots, experts, align, capacity}), op.tensor(y, "y"),
               op.tensor(probs, "probs"), op.tensor(dy, "dy"), op.tensor(dprobs, "dprobs"));
      },
      "dout"_a, "plan"_a, PLAN_NAMES, "y"_a.none(), "probs"_a.none(), "dy"_a, "dprobs"_a.none());
}

void bind_dispatch(nb::module_& m) {
  m.def(
      "dispatch_plan_workspace",
      [](In plan, PLAN_SIZES) {
        return dispatch_plan_workspace(
            Call("dispatch_plan").plan(plan, {tokens, slots, experts, align, capacity}));
      },
      "plan"_a, PLAN_NAMES, "Bytes of scratch `dispatch_plan` needs for a plan of this shape.");

  m.def(
      "dispatch_plan",
      [](In topk_idx, int64_t num_experts, int64_t segment, Out plan, PLAN_SIZES, Out counts,
         Out workspace) {
        Call op("dispatch_plan");
        op.run(dispatch_plan, op.tensor(topk_idx, "topk_idx"), num_experts, segment,
               op.plan(plan, {tokens, slots, experts, align, capacity}),
               op.tensor(counts, "counts"), op.tensor(workspace, "workspace"));
      },
      "topk_idx"_a, "num_experts"_a, "segment"_a, "plan"_a, PLAN_NAMES, "counts"_a, "workspace"_a);

  m.def(
      "quantize_pack",
      [](In x, In topk_idx, In probs, int64_t num_experts, In plan, PLAN_SIZES, Out packed,
         const char* fp8_dtype, bool pow2, double eps) {
        Call op("quantize_pack");
        op.run(quantize_pack, op.tensor(x, "x"), op.tensor(topk_idx, "topk_idx"),
               op.tensor(probs, "probs"), num_experts,
               op.plan(plan, {tokens, slots, experts, align, capacity}),
               op.tensor(packed, "packed"), op.format(fp8_dtype), rule(pow2, eps));
      },
      "x"_a, "topk_idx"_a.none(), "probs"_a.none(), "num_experts"_a, "plan"_a, PLAN_NAMES,
      "packed"_a, "fp8_dtype"_a, "pow2"_a, "eps"_a);

  m.def(
      "unpack",
      [](In packed, int64_t hidden, Out topk_idx, Out probs) {
        Call op("unpack");
        op.run(unpack, op.tensor(packed, "packed"), hidden, op.tensor(topk_idx, "topk_idx"),
               op.tensor(probs, "probs"));
      },
      "packed"_a, "hidden"_a, "topk_idx"_a, "probs"_a);
}

void bind_transposes(nb::module_& m) {
  m.def(
      "transpose_fp8",
      [](In q, In q_scale, Layout q_layout, Out plan, PLAN_SIZES, Out columns, Out columns_scale,
         Layout columns_layout, bool requantize, bool pow2, double eps) {
        Call op("transpose_fp8");
        op.run(transpose_fp8, op.fp8(q, q_scale, q_layout, "q"),
               op.plan(plan, {tokens, slots, experts, align, capacity}),
               op.fp8(columns, columns_scale, columns_layout, "columns"), requantize,
               rule(pow2, eps));
      },
      "q"_a, "q_scale"_a, "q_layout"_a, "plan"_a, PLAN_NAMES, "columns"_a, "columns_scale"_a,
      "columns_layout"_a, "requantize"_a, "pow2"_a, "eps"_a);

  m.def(
      "permute_transpose_fp8",
      [](In q, In q_scale, Layout q_layout, Out plan, PLAN_SIZES, Out columns, Out columns_scale,
         Layout columns_layout) {
        Call op("permute_transpose_fp8");
        op.run(permute_transpose_fp8, op.fp8(q, q_scale, q_layout, "q", true),
               op.plan(plan, {tokens, slots, experts, align, capacity}),
               op.fp8(columns, columns_scale, columns_layout, "columns"));
      },
      "q"_a, "q_scale"_a, "q_layout"_a, "plan"_a, PLAN_NAMES, "columns"_a, "columns_scale"_a,
      "columns_layout"_a);

  m.def(
      "count_codes",
      [](In q, In q_scale, Layout q_layout, In plan, PLAN_SIZES, In columns, In columns_scale,
         Layout columns_layout, int64_t stride, Out counts) {
        Call op("count_codes");
        op.run(count_codes, op.fp8(q, q_scale, q_layout, "q", true),
               op.plan(plan, {tokens, slots, experts, align, capacity}),
               op.fp8(columns, columns_scale, columns_layout, "columns"), stride,
               op.tensor(counts, "counts"));
      },
      "q"_a, "q_scale"_a, "q_layout"_a, "plan"_a, PLAN_NAMES, "columns"_a.none(),
      "columns_scale"_a.none(), "columns_layout"_a, "stride"_a, "counts"_a);
}

void bind_activation(nb::module_& m) {
  m.def(
      "act_quantize",
      [](In z, In plan, PLAN_SIZES, In probs, double limit, Out h, Out h_scale, Layout h_layout,
         Out z_q, Out z_q_scale, Layout z_q_layout, bool pow2, double eps) {
        Call op("act_quantize");
        op.run(act_quantize, op.tensor(z, "z"),
               op.plan(plan, {tokens, slots, experts, align, capacity}), op.tensor(probs, "probs"),
               static_cast<float>(limit), op.fp8(h, h_scale, h_layout, "h"),
               op.fp8(z_q, z_q_scale, z_q_layout, "z_q"), rule(pow2, eps));
      },
      "z"_a, "plan"_a.none(), PLAN_NAMES, "probs"_a.none(), "limit"_a, "h"_a, "h_scale"_a,
      "h_layout"_a, "z_q"_a.none(), "z_q_scale"_a.none(), "z_q_layout"_a, "pow2"_a, "eps"_a);

  m.def(
      "act_quantize_backward",
      [](In dh, In z, In plan, PLAN_SIZES, In probs, double limit, Out dz, Out dz_scale,
         Layout dz_layout, Out dprobs, Out dz_columns, Out dz_columns_scale,
         Layout dz_columns_layout, Out h_columns, Out h_columns_scale, Layout h_columns_layout,
         bool pow2, double eps) {
        Call op("act_quantize_backward");
        op.run(act_quantize_backward, op.tensor(dh, "dh"), op.tensor(z, "z"),
               op.plan(plan, {tokens, slots, experts, align, capacity}), op.tensor(probs, "probs"),
               static_cast<float>(limit), op.fp8(dz, dz_scale, dz_layout, "dz"),
               op.tensor(dprobs, "dprobs"),
               op.fp8(dz_columns, dz_columns_scale, dz_columns_layout, "dz_columns"),
               op.fp8(h_columns, h_columns_scale, h_columns_layout, "h_columns"), rule(pow2, eps));
      },
      "dh"_a, "z"_a, "plan"_a.none(), PLAN_NAMES, "probs"_a.none(), "limit"_a, "dz"_a, "dz_scale"_a,
      "dz_layout"_a, "dprobs"_a.none(), "dz_columns"_a.none(), "dz_columns_scale"_a.none(),
      "dz_columns_layout"_a, "h_columns"_a.none(), "h_columns_scale"_a.none(), "h_columns_layout"_a,
      "pow2"_a, "eps"_a);
}

void bind_gemm(nb::module_& m) {
  m.def(
      "grouped_gemm",
      [](In a, In a_scale, In w, In w_scale, In plan, PLAN_SIZES, Out d) {
        Call op("grouped_gemm");
        op.run(grouped_gemm, op.fp8(a, a_scale, "gemm", "a"), op.fp8(w, w_scale, "block", "w"),
               op.plan(plan, {tokens, slots, experts, align, capacity}), op.tensor(d, "d"));
      },
      "a"_a, "a_scale"_a, "w"_a, "w_scale"_a, "plan"_a, PLAN_NAMES, "d"_a);

  m.def(
      "grouped_gemm_wgrad",
      [](In dy_t, In dy_t_scale, Layout dy_t_layout, In x_t, In x_t_scale, Layout x_t_layout,
         In plan, PLAN_SIZES, Out dw, bool accumulate) {
        Call op("grouped_gemm_wgrad");
        op.run(grouped_gemm_wgrad, op.fp8(dy_t, dy_t_scale, dy_t_layout, "dy_t"),
               op.fp8(x_t, x_t_scale, x_t_layout, "x_t"),
               op.plan(plan, {tokens, slots, experts, align, capacity}), op.tensor(dw, "dw"),
               accumulate);
      },
      "dy_t"_a, "dy_t_scale"_a, "dy_t_layout"_a, "x_t"_a, "x_t_scale"_a, "x_t_layout"_a, "plan"_a,
      PLAN_NAMES, "dw"_a, "accumulate"_a);
}

// Sizes and options of a grouped GEMM, as words.
GemmQuery query(const char* gemm, int64_t m, int64_t n, int64_t k, int64_t experts,
                int64_t sm_count, const char* out_dtype, bool accumulate, const char* columns,
                double memory_tb_s) {
  // The place of `given` among the words.
  const auto word = [](const char* what, std::string_view given,
                       std::initializer_list<std::string_view> words) {
    const auto at = std::find(words.begin(), words.end(), given);
    if (at != words.end()) return at - words.begin();
    std::string text = std::string("[explain_grouped_gemm] ") + what + " must be ";
    for (std::string_view w : words) text.append(w).append(w == words.end()[-1] ? "" : " or ");
    throw InvalidArgument(text + "; got " + std::string(given));
  };
  return {.pass = static_cast<GemmPass>(word("gemm", gemm, {"fprop", "dgrad", "wgrad"})),
          .m = m,
          .n = n,
          .k = k,
          .experts = experts,
          .board = {.sm_count = sm_count, .memory_tb_s = memory_tb_s},
          .out = word("out_dtype", out_dtype, {"bfloat16", "float32"}) ? DType::f32 : DType::bf16,
          .accumulate = accumulate,
          .columns = word("columns", columns, {"block", "column"}) ? ScaleLayout::gemm
                                                                   : ScaleLayout::block};
}

using Words = nb::typed<nb::dict, nb::str, nb::any>;

Words words(const GemmCandidate& c) {
  Words d;
  d["tile"] = nb::make_tuple(c.tile_m, c.tile_n);
  d["raster_group"] = c.raster_group;
  d["dynamic"] = c.dynamic;
  d["load_d"] = c.load_d;
  return d;
}

// What a grouped GEMM runs on CUDA.
void bind_choice(nb::module_& m) {
#define QUERY_NAMES                                                              \
  "gemm"_a, "m"_a, "n"_a, "k"_a, "experts"_a, "sm_count"_a,                      \
      "out_dtype"_a = "bfloat16", "accumulate"_a = false, "columns"_a = "block", \
      "memory_tb_s"_a = GemmBoard{}.memory_tb_s
  m.def(
      "explain_grouped_gemm",
      [](const char* gemm, int64_t rows, int64_t n, int64_t k, int64_t experts, int64_t sm_count,
         const char* out_dtype, bool accumulate, const char* columns, double memory_tb_s) {
        const GemmChoice c = explain_grouped_gemm(query(
            gemm, rows, n, k, experts, sm_count, out_dtype, accumulate, columns, memory_tb_s));
        Words d = words(c);
        d["stages"] = c.stages;
        d["shared_bytes"] = c.shared_bytes;
        d["tiles"] = c.tiles;
        d["waves"] = c.waves;
        d["idle"] = c.idle;
        d["waste"] = c.waste;
        return d;
      },
      QUERY_NAMES,
      "The kernel that a grouped GEMM of these sizes runs on CUDA, and how its tiles fit.");
  m.def(
      "gemm_board",
      [](int device) {
        const GemmBoard board = gemm_board(device);
        return std::pair(board.sm_count, board.memory_tb_s);
      },
      "device"_a = 0, "SMs of that GPU, and the bandwidth of its memory in TB/s.");
  m.def(
      "grouped_gemm_candidates",
      [](const char* gemm, int64_t rows, int64_t n, int64_t k, int64_t experts, int64_t sm_count,
         const char* out_dtype, bool accumulate, const char* columns, double memory_tb_s) {
        nb::typed<nb::list, Words> all;
        for (const GemmCandidate& c : grouped_gemm_candidates(query(
                 gemm, rows, n, k, experts, sm_count, out_dtype, accumulate, columns, memory_tb_s)))
          all.append(words(c));
        return all;
      },
      QUERY_NAMES, "For measuring and tests: every way to run it. All give the same bits.");
  m.def(
      "force_grouped_gemm",
      [](std::optional<nb::dict> given) {
        if (!given) return force_grouped_gemm(nullptr);
        const auto of = [&](const char* name) { return (*given)[name]; };
        const auto [tile_m, tile_n] = nb::cast<std::pair<int, int>>(of("tile"));
        const GemmCandidate c{.tile_m = tile_m,
                              .tile_n = tile_n,
                              .raster_group = nb::cast<int>(of("raster_group")),
                              .dynamic = nb::cast<bool>(of("dynamic")),
                              .load_d = nb::cast<bool>(of("load_d"))};
        force_grouped_gemm(&c);
      },
      "candidate"_a.none(),
      "For measuring and tests: what this thread's grouped GEMMs run from now on; None: the "
      "choice.");
#undef QUERY_NAMES
}

}  // namespace
}  // namespace fp8moe

NB_MODULE(_C, m) {
  using namespace fp8moe;
  bind_errors(m);
  bind_quantization(m);
  bind_routing(m);
  bind_movement(m);
  bind_dispatch(m);
  bind_transposes(m);
  bind_activation(m);
  bind_gemm(m);
  m.def("attach_torch", &attach_torch, nb::sig("def attach_torch(objects: dict[str, Any]) -> None"),
        "Hands over what eager calls ask of torch.");
  m.def(
      "eager", &eager,
      nb::sig("def eager(direct: Any, watched: Any, kinds: str, arrays: int, written: int) -> Any"),
      "A function of an op's arguments: `direct` of the flat ones, or `watched` where torch "
      "watches.");
  m.def("empty", &empty, "like"_a.none(), "shape"_a, "dtype"_a.none(),
        nb::sig("def empty(like: Any, shape: Any, dtype: Any) -> Any"),
        "A tensor beside `like` without torch's dispatcher, or None.");
  m.def("empty_fp8", &empty_fp8, "like"_a.none(), "shape"_a, "layout"_a.none(),
        "fp8_dtype"_a.none(), "pow2"_a,
        nb::sig("def empty_fp8(like: Any, shape: Any, layout: Any, fp8_dtype: Any, pow2: bool) -> "
                "Any"),
        "An Fp8Tensor beside `like` without torch's dispatcher, or None.");
  m.def("empty_plan", &empty_plan, "like"_a.none(), "sizes"_a,
        nb::sig("def empty_plan(like: Any, sizes: tuple[int, ...]) -> Any"),
        "A RoutingPlan beside `like` without torch's dispatcher, or None.");
  m.def("set_stream", &set_stream, "handle"_a,
        "Sets this thread's stream for arrays whose framework names none; returns the one before.");
  bind_choice(m);
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
