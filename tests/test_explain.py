"""How the tiles of the chosen GEMM fit, against tiles counted one by one; benchmarks/explain.py."""

from __future__ import annotations

from typing import Any

import pytest

import explain
from fp8moe_cutlass import _C


def counted(
    name: str, m: int, n: int, k: int, experts: int, tile_m: int, tile_n: int, whole: bool
) -> tuple[int, int]:
    """Tiles, and multiply-adds over them, of `whole` tiles or in parts of 64 rows, walked tile by
    tile. Of fprop and dgrad beside tiles of 128x192 or 192x128, at most 64 last rows of an expert
    are tail tiles of 64x256, in halves of 128 columns."""
    if name == "dgrad":
        n, k = k, n
    tiles = work = 0
    for e in range(experts):
        rows = len(range(e, m, experts))
        height, width, depth = (n, k, rows) if name == "wgrad" else (rows, n, k)
        k_blocks, tails = len(range(0, depth, 128)), name != "wgrad" and tile_m + tile_n == 320
        if tails and 0 < height % tile_m <= 64:
            for left in range(0, width, 256):
                tiles += 1
                work += 64 * (256 if width - left > 128 else 128) * 128 * k_blocks
            height -= height % tile_m
        for top in range(0, height, tile_m):
            for _ in range(0, width, tile_n):
                tiles += 1
                rows = tile_m if whole else 64 * -(-min(height - top, tile_m) // 64)
                work += rows * tile_n * 128 * k_blocks
    return tiles, work


@pytest.mark.parametrize(
    "product",
    [
        *(("fprop", "bfloat16"), ("fprop", "float32"), ("dgrad", "bfloat16")),
        *(("wgrad", *options) for options in (("bfloat16",), ("float32",), ("float32", True))),
        *(("wgrad", out, adds, "column") for out, adds in (("bfloat16", False), ("float32", True))),
    ],
)
@pytest.mark.parametrize(
    ("m", "n", "k", "experts"),
    [
        (32768, 4096, 7168, 8),
        (32700, 1408, 1536, 7),
        (20000, 2816, 2048, 64),
        (1000, 2816, 2048, 7),
        (300, 144, 272, 5),
        (3, 16, 16, 4),
    ],
)
def test_counts_are_those_of_a_walk(product: Any, m: int, n: int, k: int, experts: int) -> None:
    name, *options = product
    c = _C.explain_grouped_gemm(name, m, n, k, experts, 20, *options)
    tiles, work = counted(name, m, n, k, experts, *c["tile"], "column" not in options)
    assert c["tiles"] == tiles
    assert c["waves"] == pytest.approx(tiles / 20)
    assert c["idle"] == pytest.approx(1 - tiles / 20 / -(-tiles // 20))
    assert c["waste"] == pytest.approx(1 - m * n * k / work)


@pytest.mark.parametrize("bad", [(-1, 1, 1, 1, 1), (1, 1, 1, 0, 1), (1, 1, 1, 1, 0)])
def test_bad_sizes_are_refused(bad: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="experts and SMs positive"):
        _C.explain_grouped_gemm("fprop", *bad)
    with pytest.raises(ValueError, match="at most 1073741824; got M 2147483648"):
        _C.explain_grouped_gemm("fprop", 2**31, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="gemm must be fprop or dgrad or wgrad; got sideways"):
        _C.explain_grouped_gemm("sideways", 1, 1, 1, 1, 1)
    for options, message in (
        (("float16",), "out_dtype must be bfloat16 or float32; got float16"),
        (("float32", True), "accumulate and columns are of wgrad alone; got them with another"),
        (("bfloat16", False, "column"), "accumulate and columns are of wgrad alone"),
        (("bfloat16", False, "row"), "columns must be block or column; got row"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.explain_grouped_gemm("fprop", 1, 1, 1, 1, 1, *options)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("32768,4096,7168,8 --sms 132", ["5504 tiles = 41.70 waves", "fprop", "dgrad", "wgrad"]),
        ("32768,4096,7168,64 --sms 132", ["dynamic schedule"]),
        ("32768,768,1408,32 --sms 132 --accumulate --wgrad-dtype float32", ["wgrad: tile 192x128"]),
        ("16,16,16,1", ["7 SMs"]),
    ],
)
def test_script(monkeypatch: pytest.MonkeyPatch, args: str, words: list[str]) -> None:
    monkeypatch.setattr(_C, "sm_count", lambda: 7)
    printed = "\n".join(explain.explain(explain.parser().parse_args(args.split())))
    assert all(word in printed for word in words)
