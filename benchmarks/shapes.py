"""The shapes at which ops.py times each operator, by kind of operator. Letters as in
docs/reference/layouts.md.

cuda: layers of DeepSeek-V3, DeepSeek-V2-Lite and Qwen3. cpu: smaller, yet past the caches. quick:
one tiny shape, to see that everything runs.
"""

from __future__ import annotations

from collections.abc import Callable

Shape = dict[str, int]


def shape_of(names: str) -> Callable[..., Shape]:
    """Makes shapes of these names: shape_of("M K")(32, 128) is {"M": 32, "K": 128}."""
    return lambda *sizes: dict(zip(names.split(), sizes, strict=True))


matrix, weight, grouped = shape_of("M K"), shape_of("E N K"), shape_of("R C E")
routing, moe, ranks = shape_of("T E S align"), shape_of("T E S H align"), shape_of("T E S H W")
gemm = shape_of("M N K E")

_LAYERS = [  # rows, hidden, intermediate, experts
    (32768, 7168, 2048, 32),
    (32768, 7168, 2048, 8),
    (32768, 4096, 1536, 16),
    (24576, 2048, 1408, 64),
    (32768, 2048, 768, 128),
]

SHAPES: dict[str, dict[str, list[Shape]]] = {
    "cuda": {
        "matrix": [matrix(32768, 7168), matrix(4096, 7168), matrix(32768, 2048)],
        "weight": [weight(e, n, k) for _, h, i, e in _LAYERS for n, k in ((2 * i, h), (h, i))],
        "routing": [routing(4096, 256, 8, 1), routing(4096, 512, 8, 1), routing(65536, 256, 8, 1)],
        "permute": [
            moe(4096, 64, 7, 1280, 16),
            moe(4096, 64, 6, 2048, 16),
            moe(4096, 160, 6, 5120, 16),
            *(moe(4096, 256, 8, 7168, align) for align in (1, 16, 128)),
            moe(4096, 384, 8, 8192, 16),
            moe(4096, 512, 8, 9216, 16),
        ],
        "ranks": [
            *(ranks(4096, 256, 8, 7168, world) for world in (2, 8, 32)),
            ranks(4096, 128, 8, 4096, 8),
            ranks(4096, 128, 8, 2048, 8),
        ],
        "rows": [
            grouped(32768, 7168, 8),
            grouped(28672, 1280, 16),
            grouped(12288, 2048, 8),
            grouped(12288, 5120, 20),
            grouped(6144, 7168, 8),
            grouped(3072, 8192, 6),
            grouped(3072, 9216, 8),
        ],
        "layer": [moe(4096, 32, 8, 7168, 1)],
        "activation": [
            grouped(32768, 2048, 32),
            grouped(28672, 1024, 64),
            grouped(24576, 1408, 64),
            grouped(24576, 1536, 16),
        ],
        "gemm": [
            gemm(m, n, k, e)
            for m, h, i, e in _LAYERS
            for n, k in ((2 * i, h), (h, i), (i, h), (h, 2 * i))
        ],
        "wgrad": [gemm(m, n, k, e) for m, h, i, e in _LAYERS for n, k in ((2 * i, h), (h, i))],
    },
    "cpu": {
        "matrix": [matrix(32768, 1024)],
        "weight": [weight(16, 2048, 1024)],
        "routing": [routing(4096, 64, 8, 1)],
        "permute": [moe(16384, 8, 2, 1024, 1)],
        "ranks": [ranks(4096, 64, 8, 1024, 2)],
        "rows": [grouped(32768, 1024, 8)],
        "layer": [moe(16384, 8, 2, 1024, 1)],
        "activation": [grouped(32768, 512, 8)],
        "gemm": [gemm(4096, 1024, 1024, 8)],
        "wgrad": [gemm(4096, 1024, 1024, 8)],
    },
    "quick": {
        "matrix": [matrix(256, 256)],
        "weight": [weight(2, 256, 256)],
        "routing": [routing(128, 4, 2, 1)],
        "permute": [moe(128, 4, 2, 256, 1)],
        "ranks": [ranks(128, 4, 2, 256, 2)],
        "rows": [grouped(256, 256, 2)],
        "layer": [moe(128, 4, 2, 256, 1)],
        "activation": [grouped(256, 256, 2)],
        "gemm": [gemm(256, 256, 256, 2)],
        "wgrad": [gemm(256, 256, 256, 2)],
    },
}
