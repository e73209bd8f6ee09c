"""Applies the list of renames below to every tracked file: `python scripts/rename.py [--check]`.

For branches that began before the renames: run it there, commit, then merge. It changes names only;
scripts/gate_ptx.py shows that kernels stay the same but for names.
"""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent
PY = "python/fp8moe_cutlass"
NOT_HERE = (
    "docs/notes/*",
    "docs/benchmarks/*",
    "scripts/*",
    "LICENSE",
    "third_party/*",
    "CHANGELOG.md",
)
GEMM = (
    "src/cuda/gemm/*",
    "src/cuda/grouped_gemm*",
    "tests/cpp/test_schedule.cpp",
    "src/core/explain.cpp",
    "src/cuda/explain.cpp",
)

EXPLAIN = (
    "include/fp8moe/explain.h",
    "src/cuda/gemm/explain.cpp",
    "src/bindings/module.cpp",
    "python/fp8moe_cutlass/doctor.py",
    "tests/test_explain.py",
)

# old file -> new file: every include and import follows by FILE_WORDS below
FILES = {
    r"src/(.*)/hd\.h": r"src/\1/host_device.h",
    r"src/cpu/clones\.h": r"src/cpu/multiversion.h",
    r"src/cpu/lines\.(h|cpp)": r"src/cpu/transpose_band.\1",
    r"tests/cpp/test_lines\.cpp": r"tests/cpp/test_transpose_band.cpp",
    r"(.*)swiglu_quantize(.*)": r"\1act_quantize\2",
    rf"{PY}/autograd/once\.py": f"{PY}/autograd/no_double_backward.py",
    rf"{PY}/autograd/saving\.py": f"{PY}/autograd/ctx_io.py",
    rf"{PY}/distributed/terms\.py": f"{PY}/distributed/rank_agreement.py",
    r"src/cuda/gemm/instances/rows_(.*)": r"src/cuda/gemm/instances/fprop_\1",
    r"src/cuda/gemm/instances/tokens_block_(.*)": r"src/cuda/gemm/instances/wgrad_128x128_\1",
    r"src/cuda/gemm/instances/tokens_column_(.*)": r"src/cuda/gemm/instances/wgrad_1x128_\1",
}

# (files, what: code | comment | all, pattern, replacement), in this order
ALL = ("*",)
NO_TE = (
    "!python/fp8moe_cutlass/integrations/*",
    "!tests/test_integrations*",
    "!tests/reference_te.py",
    "!docs/how-to/from-transformer-engine.md",
)
RENAMES: list[tuple[tuple[str, ...], str, str, str]] = [
    # one word per operator
    (ALL, "all", r"swiglu_quantize", "act_quantize"),
    (ALL, "all", r"SwigluQuantize", "ActQuantize"),
    ((*ALL, *NO_TE), "all", r"\bpermuted_(d?probs)\b", r"row_\1"),
    # the plan's buffer
    (("*", *(f"!{g}" for g in GEMM)), "all", r"\bplan_slab_size\b", "plan_buffer_size"),
    (("*", *(f"!{g}" for g in GEMM)), "all", r"(?<![A-Za-z])slab(s?)(?![A-Za-z])", r"buffer\1"),
    (("*", *(f"!{g}" for g in GEMM)), "all", r"\bSlab\b", "Buffer"),
    # files
    (ALL, "all", r"common/hd\.h", "common/host_device.h"),
    (ALL, "all", r"cpu/clones\.h", "cpu/multiversion.h"),
    (ALL, "all", r"cpu/lines\.h", "cpu/transpose_band.h"),
    (ALL, "all", r"\btest_lines\b", "test_transpose_band"),
    (ALL, "all", r"autograd\.once\b", "autograd.no_double_backward"),
    (ALL, "all", r"autograd\.saving\b", "autograd.ctx_io"),
    (ALL, "all", r"distributed\.terms\b", "distributed.rank_agreement"),
    (ALL, "all", r"autograd import once\b", "autograd import no_double_backward"),
    # Python
    (("python/*", "tests/*", "benchmarks/*"), "all", r"\bgive_back\b", "combine"),
    (("python/*", "tests/*", "benchmarks/*"), "all", r"\bannounce\b", "exchange_sizes"),
    (("python/*", "tests/*", "benchmarks/*"), "all", r"\bBeside\b", "SideStream"),
    # vectors, the order of partial sums
    (("src/*",), "all", r"\bEight\b", "Vec8"),
    (("src/*",), "all", r"\bhanded_on\b", "carry_ready"),
    # the grouped GEMM: kinds are the field's passes
    (("src/*", "tests/*"), "all", r"\bKind::rows\b", "Kind::fprop"),
    (("src/*", "tests/*"), "all", r"\btokens_block\b", "wgrad_128x128"),
    (("src/*", "tests/*"), "all", r"\btokens_column\b", "wgrad_1x128"),
    (("src/*", "tests/*"), "all", r"\btokens_config\b", "wgrad_config"),
    (("src/*", "tests/*"), "all", r"\brows_config\b", "fprop_config"),
    (("src/*", "tests/*"), "all", r"\btokens_problem\b", "wgrad_problem"),
    (("src/*", "tests/*"), "all", r"\brows_problem\b", "fprop_problem"),
    (GEMM, "comment", r"\btokens_\*", "wgrad"),
    (("src/cuda/gemm/config.h",), "code", r"^  rows,", "  fprop,"),
    # tiles
    (GEMM, "all", r"\bkTallM\b", "kTileM192"),
    (GEMM, "code", r"\bkTall\b", "kIs192"),
    (GEMM, "code", r"\btall_rows\b", "fprop_takes_192x128"),
    (GEMM, "code", r"\btall_tiles\b", "wgrad_takes_192x128"),
    (GEMM, "code", r"\btall\b", "m192"),
    (GEMM, "code", r"\bkLow(Boxes|Columns)\b", r"kTailM\1"),
    (GEMM, "code", r"\bkFlank(Boxes|Rows)\b", r"kTailN\1"),
    (GEMM, "code", r"\bhas_low\b", "has_tail_m"),
    (GEMM, "code", r"\bhas_flank\b", "has_tail_n"),
    (GEMM, "code", r"\blow\b", "tail_m"),
    (GEMM, "code", r"\bflank\b", "tail_n"),
    (GEMM, "code", r"\bkThin(\w*)\b", r"kSplit\1"),
    (GEMM, "code", r"\bthin\b", "split"),
    (GEMM, "comment", r"\b(T|t)all tile(s?)\b", r"192x128 tile\2"),
    (GEMM, "comment", r"\b[Tt]all\b", "192x128"),
    (GEMM, "comment", r"\b[Ll]ow tile(s?)\b", r"tail tile\1 in M"),
    (GEMM, "comment", r"\b[Ff]lank tile(s?)\b", r"tail tile\1 in N"),
    (GEMM, "comment", r"\b[Tt]hin tile(s?)\b", r"split tile\1"),
    (GEMM, "comment", r"\blow\b", "tail-M"),
    (GEMM, "comment", r"\bflank\b", "tail-N"),
    (GEMM, "comment", r"\bthin\b", "split"),
    # raster groups
    (GEMM, "code", r"\bplace_in_bands\b", "place_in_raster_groups"),
    (GEMM, "code", r"\brows_band\b", "fprop_raster_group"),
    (GEMM, "code", r"\btokens_band\b", "wgrad_raster_group"),
    (GEMM, "code", r"\bin_band\b", "in_group"),
    (GEMM, "code", r"\bband\b", "raster_group"),
    (GEMM, "comment", r"\bplace_in_bands\b", "place_in_raster_groups"),
    (GEMM, "comment", r"\bband(s?)\b", r"raster group\1"),
    (EXPLAIN, "all", r"\bband\b", "raster_group"),
    (EXPLAIN, "all", r"\btaken\b(?= *[;=(\"'\])])", "dynamic"),
    # staging buffers of the epilogue
    (GEMM, "code", r"\bkSlabBarriers\b", "kStagingBarriers"),
    (GEMM, "code", r"\bk(Half)?Slab(Rows|Bytes)\b", r"k\1Staging\2"),
    (GEMM, "code", r"\bkSlabs\b", "kStagingBuffers"),
    (GEMM, "code", r"\bSlabs\b", "Buffers"),
    (GEMM, "code", r"\bSlabPlace\b", "StagingPlace"),
    (GEMM, "code", r"\bslab_place\b", "staging_place"),
    (GEMM, "code", r"\b(send|fill)_slab\b", r"\1_staging"),
    (GEMM, "code", r"\bawait_slabs\b", "await_staging"),
    (GEMM, "code", r"\bslabs_(full|written)\b", r"staging_\1"),
    (GEMM, "code", r"\bslabs\b", "staging"),
    (GEMM, "code", r"\bslab\b", "buffer"),
    (GEMM, "comment", r"Stage::kSlabs", "Stage::kStagingBuffers"),
    (GEMM, "comment", r"`slabs`", "`staging`"),
    (GEMM, "comment", r"\bslab(s?)\b", r"staging buffer\1"),
    (GEMM, "comment", r"\bSlab S\b", "Staging buffer S"),
    (GEMM, "comment", r"\bSlabs\b", "Buffers"),
    # scale batches
    (GEMM, "code", r"\bkRunLength\b", "kScaleBatch"),
    (GEMM, "code", r"\bkRuns\b", "kScaleBatches"),
    (GEMM, "code", r"\bkRunBytes\b", "kScaleBatchBytes"),
    (GEMM, "code", r"\brun_(full|empty)\b", r"batch_\1"),
    (GEMM, "code", r"\bring\.run\b", "ring.scale_batch"),
    (GEMM, "code", r"\bfloat4\* run\(", "float4* scale_batch("),
    (GEMM, "code", r"\brun\(kScaleBatches\)", "scale_batch(kScaleBatches)"),
    (GEMM, "code", r"\bruns\b", "batches"),
    (GEMM, "code", r"\bin_run\b", "in_batch"),
    (GEMM, "code", r"\bclose_run\b", "close_batch"),
    (GEMM, "comment", r"\brun_full\b", "batch_full"),
    (
        GEMM,
        "comment",
        r"\b(in|a|the|its|new|so is its|of a|of|has the|once the) run\b",
        r"\1 batch",
    ),
    (GEMM, "comment", r"\bruns of K-blocks\b", "batches of K-blocks"),
    (GEMM, "comment", r"\bring of runs\b", "ring of scale batches"),
    # roles
    (GEMM, "code", r"\bhalf\b", "consumer_index"),
    (GEMM, "code", r"\bhalf_\b", "consumer_index_"),
    (("src/cuda/gemm/produce.cuh",), "code", r"\bvoid plan\(", "void schedule_tiles("),
    (("src/cuda/gemm/kernel.cuh",), "code", r"\bplan<", "schedule_tiles<"),
    (GEMM, "code", r"\bpass\(", "skip_tile("),
    (GEMM, "code", r"\btake(?=[(<])", "claim_next_tile"),
    (GEMM, "code", r"\bskip\(", "jump_to("),
    (GEMM, "comment", r"`skip`", "`jump_to`"),
    (GEMM, "code", r"\bfetches_output\b", "loads_output"),
    (GEMM, "code", r"\bfetch_first\b", "load_d_first"),
    (GEMM, "code", r"\bkFetched\b", "kLoadedBuffers"),
    (GEMM, "code", r"\bfetch\b", "load_d"),
    (GEMM, "code", r"\btakes_tiles\b", "dynamic_schedule"),
    (GEMM, "comment", r"\bfetched\b", "loaded"),
    (GEMM, "comment", r"\bdealt in turn\b", "scheduled statically"),
    (GEMM, "comment", r"\bdealt\b", "scheduled statically"),
]


def wanted(path: str, globs: tuple[str, ...]) -> bool:
    if any(fnmatch(path, g[1:]) for g in globs if g.startswith("!")):
        return False
    return any(fnmatch(path, g) for g in globs if not g.startswith("!"))


def rename(path: str, text: str) -> str:
    mine = [(what, re.compile(p), r) for globs, what, p, r in RENAMES if wanted(path, globs)]
    lines = text.split("\n")
    for n, line in enumerate(lines):
        code, slashes, comment = line.partition("//")
        for what, pattern, new in mine:
            if what == "all":
                code, comment = pattern.sub(new, code), pattern.sub(new, comment)
            elif what == "code":
                code = pattern.sub(new, code)
            else:
                comment = pattern.sub(new, comment)
        lines[n] = code + slashes + comment
    return "\n".join(lines)


def main() -> int:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    changed = []
    for path in listed.stdout.split("\n"):
        if not path or wanted(path, NOT_HERE) or not (ROOT / path).is_file():
            continue
        try:
            text = (ROOT / path).read_text()
        except UnicodeDecodeError:
            continue
        new_text, new_path = rename(path, text), path
        for old, new in FILES.items():
            new_path = re.sub(f"^{old}$", new, new_path)
        if new_text != text or new_path != path:
            changed.append(path)
        if "--check" in sys.argv:
            continue
        if new_text != text:
            (ROOT / path).write_text(new_text)
        if new_path != path:
            subprocess.run(["git", "mv", path, new_path], cwd=ROOT, check=True)
    print(*changed, sep="\n")
    return int("--check" in sys.argv and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
