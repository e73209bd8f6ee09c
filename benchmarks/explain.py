"""Which grouped GEMMs run on CUDA: python benchmarks/explain.py M,N,K,E

M rows of all E experts, spread evenly, by weight [E, N, K]. fprop and dgrad write bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from fp8moe_cutlass import _C


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("sizes", metavar="M,N,K,E")
    made.add_argument("--sms", type=int, help="default: of the GPU here")
    made.add_argument("--wgrad-dtype", default="bfloat16", choices=("bfloat16", "float32"))
    made.add_argument("--accumulate", action="store_true", help="wgrad adds to what is there")
    made.add_argument("--columns", default="block", choices=("block", "column"),
                      help="wgrad's operands: 128x128 or 1x128")  # fmt: skip
    return made


def explain(given: argparse.Namespace) -> Iterator[str]:
    """A title, then a line per product: the choice of kernel, and how its tiles fit."""
    m, n, k, experts = (int(part) for part in given.sizes.split(","))
    sms = given.sms or _C.sm_count()
    yield f"M {m}, weight [{experts}, {n}, {k}], {sms} SMs"
    wgrad = {
        "out_dtype": given.wgrad_dtype,
        "accumulate": given.accumulate,
        "columns": given.columns,
    }
    for name in ("fprop", "dgrad", "wgrad"):
        options = wgrad if name == "wgrad" else {}
        c = _C.explain_grouped_gemm(name, m, n, k, experts, sms, **options)
        tile_m, tile_n = c["tile"]
        yield (
            f"{name}: tile {tile_m}x{tile_n}, {c['stages']} stages "
            f"({c['shared_bytes'] / 1024:.0f} KB), "
            f"raster groups of {c['raster_group']} rows of tiles, "
            f"{'dynamic' if c['dynamic'] else 'static'} schedule, "
            f"{c['launches']} launch{'es' * (c['launches'] > 1)}; "
            f"{c['tiles']} tiles = {c['waves']:.2f} waves ({100 * c['idle']:.1f}% idle), "
            f"{100 * c['waste']:.1f}% of the arithmetic wasted"
        )


if __name__ == "__main__":
    print(*explain(parser().parse_args()), sep="\n")
