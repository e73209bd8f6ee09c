#include "gemm_choice.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "fp8moe/explain.h"

namespace fp8moe {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

// Sizes and options of a grouped GEMM, as words.
GemmQuery query(const char* gemm, int64_t m, int64_t n, int64_t k, int64_t experts,
                int64_t sm_count, const char* out_dtype, bool accumulate, const char* columns) {
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
          .sm_count = sm_count,
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
  d["launches"] = c.launches;
  return d;
}

}  // namespace

void bind_gemm_choice(nb::module_& m) {
#define QUERY_NAMES                                         \
  "gemm"_a, "m"_a, "n"_a, "k"_a, "experts"_a, "sm_count"_a, \
      "out_dtype"_a = "bfloat16", "accumulate"_a = false, "columns"_a = "block"
  m.def(
      "explain_grouped_gemm",
      [](const char* gemm, int64_t rows, int64_t n, int64_t k, int64_t experts, int64_t sm_count,
         const char* out_dtype, bool accumulate, const char* columns) {
        const GemmChoice c = explain_grouped_gemm(
            query(gemm, rows, n, k, experts, sm_count, out_dtype, accumulate, columns));
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
      "sm_count", [](int device) { return sm_count(device); }, "device"_a = 0, "SMs of that GPU.");
  m.def(
      "grouped_gemm_candidates",
      [](const char* gemm, int64_t rows, int64_t n, int64_t k, int64_t experts, int64_t sm_count,
         const char* out_dtype, bool accumulate, const char* columns) {
        nb::typed<nb::list, Words> all;
        for (const GemmCandidate& c : grouped_gemm_candidates(
                 query(gemm, rows, n, k, experts, sm_count, out_dtype, accumulate, columns)))
          all.append(words(c));
        return all;
      },
      QUERY_NAMES, "For measuring and tests: every way to run it. All give the same bits.");
  m.def(
      "force_grouped_gemm",
      [](std::optional<Words> given) {
        if (!given) return force_grouped_gemm(nullptr);
        const auto of = [&](const char* name) { return (*given)[name]; };
        const auto [tile_m, tile_n] = nb::cast<std::pair<int, int>>(of("tile"));
        const GemmCandidate c{.tile_m = tile_m,
                              .tile_n = tile_n,
                              .raster_group = nb::cast<int>(of("raster_group")),
                              .dynamic = nb::cast<bool>(of("dynamic")),
                              .load_d = nb::cast<bool>(of("load_d")),
                              .launches = nb::cast<int>(of("launches"))};
        force_grouped_gemm(&c);
      },
      "candidate"_a.none(),
      "For measuring and tests: what this thread's grouped GEMMs run from now on; None: the "
      "choice.");
#undef QUERY_NAMES
}

}  // namespace fp8moe
