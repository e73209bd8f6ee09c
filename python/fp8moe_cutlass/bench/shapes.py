"""The shapes each op is timed at, as data. Letters as in docs/layouts.md.

cuda: the sizes of DeepSeek-V3, Qwen3 and DeepSeek-V2-Lite layers. cpu: small ones, yet past the
caches, as the activations of a layer are.
"""

from __future__ import annotations

Shape = dict[str, int]


def moe(tokens: int, experts: int, slots: int, hidden: int, align: int = 1) -> Shape:
    return {"T": tokens, "E": experts, "S": slots, "H": hidden, "align": align}


def routing(tokens: int, experts: int, slots: int) -> Shape:
    return {"T": tokens, "E": experts, "S": slots, "align": 1}


def ranks(tokens: int, experts: int, slots: int, hidden: int, world: int = 2) -> Shape:
    return {"T": tokens, "E": experts, "S": slots, "H": hidden, "W": world}


def grouped(rows: int, hidden: int, experts: int) -> Shape:
    return {"R": rows, "C": hidden, "E": experts}


def gemm(rows: int, n: int, k: int, experts: int) -> Shape:
    return {"M": rows, "N": n, "K": k, "E": experts}


def matrix(rows: int, columns: int) -> Shape:
    return {"M": rows, "K": columns}


_PERMUTE = [
    moe(4096, 64, 7, 1280, 16),
    moe(4096, 64, 6, 2048, 16),
    moe(4096, 160, 6, 5120, 16),
    *(moe(4096, 256, 8, 7168, align) for align in (1, 16, 128)),
    moe(4096, 384, 8, 8192, 16),
    moe(4096, 512, 8, 9216, 16),
]
_DISPATCH = [
    *(ranks(4096, 256, 8, 7168, world) for world in (2, 8, 32)),
    ranks(4096, 128, 8, 4096, 8),
    ranks(4096, 128, 8, 2048, 8),
]
_TRANSPOSE = [
    grouped(32768, 7168, 8),
    grouped(28672, 1280, 16),
    grouped(12288, 2048, 8),
    grouped(12288, 5120, 20),
    grouped(6144, 7168, 8),
    grouped(3072, 8192, 6),
    grouped(3072, 9216, 8),
]
_SWIGLU = [
    grouped(32768, 2048, 32),
    grouped(28672, 1024, 64),
    grouped(24576, 1408, 64),
    grouped(24576, 1536, 16),
]
_LAYERS = [  # rows, hidden, intermediate, experts
    (32768, 7168, 2048, 32),
    (32768, 7168, 2048, 8),
    (32768, 4096, 1536, 16),
    (24576, 2048, 1408, 64),
    (32768, 2048, 768, 128),
]

SHAPES: dict[str, dict[str, list[Shape]]] = {
    "cuda": {
        "quantize": [matrix(32768, 7168), matrix(4096, 7168), matrix(32768, 2048)],
        "quantize_weight": [{"E": 32, "N": 4096, "K": 7168}, {"E": 128, "N": 1536, "K": 2048}],
        "dequantize": [matrix(32768, 7168)],
        "route": [routing(4096, 256, 8), routing(4096, 512, 8), routing(65536, 256, 8)],
        "permute_pad": _PERMUTE,
        "permute_pad_backward": _PERMUTE,
        "unpermute_unpad": _PERMUTE,
        "unpermute_unpad_backward": _PERMUTE,
        "dispatch_plan": _DISPATCH,
        "quantize_pack": _DISPATCH,
        "unpack": _DISPATCH,
        "transpose_fp8": _TRANSPOSE,
        "permute_transpose_fp8": [moe(4096, 32, 8, 7168)],
        "count_codes": [moe(4096, 32, 8, 7168)],
        "swiglu_quantize": _SWIGLU,
        "swiglu_quantize_backward": _SWIGLU,
        "grouped_gemm": [
            gemm(m, n, k, e)
            for m, h, i, e in _LAYERS
            for n, k in ((2 * i, h), (h, i), (i, h), (h, 2 * i))
        ],
        "grouped_gemm_wgrad": [
            gemm(m, n, k, e) for m, h, i, e in _LAYERS for n, k in ((2 * i, h), (h, i))
        ],
    },
    "cpu": {
        "quantize": [matrix(32768, 1024)],
        "quantize_weight": [{"E": 16, "N": 2048, "K": 1024}],
        "dequantize": [matrix(32768, 1024)],
        "route": [routing(4096, 64, 8)],
        "permute_pad": [moe(16384, 8, 2, 1024)],
        "permute_pad_backward": [moe(16384, 8, 2, 1024)],
        "unpermute_unpad": [moe(16384, 8, 2, 1024)],
        "unpermute_unpad_backward": [moe(16384, 8, 2, 1024)],
        "dispatch_plan": [ranks(4096, 64, 8, 1024)],
        "quantize_pack": [ranks(4096, 64, 8, 1024)],
        "unpack": [ranks(4096, 64, 8, 1024)],
        "transpose_fp8": [grouped(32768, 1024, 8)],
        "permute_transpose_fp8": [moe(16384, 8, 2, 1024)],
        "count_codes": [moe(16384, 8, 2, 1024)],
        "swiglu_quantize": [grouped(32768, 512, 8)],
        "swiglu_quantize_backward": [grouped(32768, 512, 8)],
        "grouped_gemm": [gemm(4096, 1024, 1024, 8)],
        "grouped_gemm_wgrad": [gemm(4096, 1024, 1024, 8)],
    },
}
# What --quick times: one tiny shape an op, to see that all of it runs.
QUICK: dict[str, Shape] = {
    "quantize": matrix(256, 256),
    "quantize_weight": {"E": 2, "N": 256, "K": 256},
    "dequantize": matrix(256, 256),
    "route": routing(128, 4, 2),
    "permute_pad": moe(128, 4, 2, 256),
    "permute_pad_backward": moe(128, 4, 2, 256),
    "unpermute_unpad": moe(128, 4, 2, 256),
    "unpermute_unpad_backward": moe(128, 4, 2, 256),
    "dispatch_plan": ranks(128, 4, 2, 256),
    "quantize_pack": ranks(128, 4, 2, 256),
    "unpack": ranks(128, 4, 2, 256),
    "transpose_fp8": grouped(256, 256, 2),
    "permute_transpose_fp8": moe(128, 4, 2, 256),
    "count_codes": moe(128, 4, 2, 256),
    "swiglu_quantize": grouped(256, 256, 2),
    "swiglu_quantize_backward": grouped(256, 256, 2),
    "grouped_gemm": gemm(256, 256, 256, 2),
    "grouped_gemm_wgrad": gemm(256, 256, 256, 2),
}
