"""doctor --explain: the kernel's choice and how its tiles fit, against tiles counted one by one."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from fp8moe_cutlass import _C, cli, doctor

DTYPES = ("bfloat16", "float32")


def counted(
    name: str, m: int, n: int, k: int, experts: int, tile_m: int, tile_n: int
) -> tuple[int, int]:
    """Tiles, and multiply-adds over them in parts of 64 rows, walked tile by tile. Of fprop and
    dgrad beside tiles of 128x192 or 192x128, at most 64 last rows of an expert are tiles of 64x256,
    in halves of 128 columns, and beside 192 columns at most 64 last ones tiles of 256x64 (not
    where experts have few rows), in halves of two times 64 rows, 128 apart."""
    if name == "dgrad":
        n, k = k, n
    tiles = work = 0
    for e in range(experts):
        rows = len(range(e, m, experts))
        height, width, depth = (n, k, rows) if name == "wgrad" else (rows, n, k)
        k_blocks, edges = len(range(0, depth, 128)), name != "wgrad" and tile_m + tile_n == 320
        if edges and 0 < height % tile_m <= 64:
            for left in range(0, width, 256):
                tiles += 1
                work += 64 * (256 if width - left > 128 else 128) * 128 * k_blocks
            height -= height % tile_m
        if edges and tile_n == 192 and 0 < width % 192 <= 64 and m >= 256 * experts:
            for top in range(0, height, 256):
                tiles += 1
                work += 64 * (256 if height - top > 64 else 128) * 128 * k_blocks
            width -= width % 192
        for top in range(0, height, tile_m):
            for _ in range(0, width, tile_n):
                tiles += 1
                work += 64 * -(-min(height - top, tile_m) // 64) * tile_n * 128 * k_blocks
    return tiles, work


PRODUCTS = {
    "fprop": ("fprop", "bfloat16"),
    "fprop_f32": ("fprop", "float32"),
    "dgrad": ("dgrad", "bfloat16"),
    "wgrad": ("wgrad", "bfloat16"),
    "wgrad_f32": ("wgrad", "float32"),
    "wgrad_main_grad": ("wgrad", "float32", True),
    "wgrad_1x128": ("wgrad", "bfloat16", False, "column"),
    "wgrad_1x128_main_grad": ("wgrad", "float32", True, "column"),
}


@pytest.mark.parametrize("product", PRODUCTS)
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
def test_counts_are_those_of_a_walk(product: str, m: int, n: int, k: int, experts: int) -> None:
    name, *options = PRODUCTS[product]
    c = _C.explain_grouped_gemm(name, m, n, k, experts, 20, *options)
    tiles, work = counted(name, m, n, k, experts, *c["tile"])
    assert c["tiles"] == tiles
    assert c["waves"] == pytest.approx(tiles / 20)
    full, left = divmod(tiles, 20)
    # Of few waves the last one's tiles are split where these fit into it.
    columns = -(-(k if name == "dgrad" else n) // 192)
    few = name != "wgrad" and sum(c["tile"]) == 320 and columns * (m // 128 + experts) < 10 * 20
    cut = few and 3 * left <= 20
    time = full + (0 if left == 0 else 0.67 if cut else 1)
    assert c["idle"] == pytest.approx(1 - tiles / 20 / time)
    assert c["waste"] == pytest.approx(1 - m * n * k / work)


def test_whole_tiles_waste_nothing() -> None:
    c = _C.explain_grouped_gemm("fprop", 8 * 512, 1536, 4096, 8, 132)
    assert c["waste"] == 0.0
    assert c["tile"] == (128, 192)
    # What a stage holds at least, and what a CTA can have at most.
    assert c["stages"] * (128 + 192) * 128 < c["shared_bytes"] <= 227 * 1024


def test_a_narrow_tile_where_the_wide_one_wastes() -> None:
    rows, experts = 180_000, 600
    assert _C.explain_grouped_gemm("fprop", rows, 128, 512, experts, 132)["tile"] == (128, 128)
    assert _C.explain_grouped_gemm("dgrad", rows, 512, 128, experts, 132)["tile"] == (128, 128)


def test_tall_tiles_where_experts_have_rows_enough() -> None:
    def tile(*sizes: int) -> object:
        return _C.explain_grouped_gemm("fprop", *sizes, 132)["tile"]

    m192, wide = (192, 128), (128, 192)
    assert [tile(32768, 4096, 7168, e) for e in (32, 33)] == [m192, wide]
    assert [tile(32768, 4096, 2048, e) for e in (8, 16)] == [m192, wide]
    assert [tile(32768, 2048, 768, e) for e in (64, 128)] == [m192, wide]  # 10.67 columns of tiles
    assert tile(32768, 2880, 2880, 8) == wide  # 15 columns of tiles, of 192x128 22.5


def test_few_waves_are_of_the_tiles_that_take_least_time() -> None:
    def tile(*sizes: int) -> object:
        return _C.explain_grouped_gemm("fprop", *sizes, 132)["tile"]

    assert tile(4096, 4096, 7168, 1) == (192, 128)  # 5 and a split one, as of 128x192
    assert tile(4096, 4096, 7168, 8) == (128, 192)  # 5 and a split one, and of 192x128 6
    assert tile(512, 4096, 7168, 1) == (128, 128)  # one, as of the larger ones


def test_bands_are_as_high_as_a_wave_that_takes_all_columns() -> None:
    def raster_group(name: str, *sizes: int) -> object:
        return _C.explain_grouped_gemm(name, *sizes, 132)["raster_group"]

    assert raster_group("fprop", 32768, 2048, 7168, 128) == 132 // 11  # columns of tiles
    assert raster_group("fprop", 32768, 2048, 7168, 8) == 16  # of 192x128 tiles a wave takes 8 rows
    assert (
        raster_group("fprop", 32768, 4096, 7168, 8)
        == raster_group("fprop", 32768, 0, 7168, 8)
        == 16
    )
    assert raster_group("wgrad", 32768, 4096, 7168, 8) > raster_group(
        "wgrad", 32768, 4096, 7168, 128
    )


def test_short_tiles_of_wgrad_are_taken_as_ctas_come_free() -> None:
    def dynamic(name: str, experts: int) -> object:
        return _C.explain_grouped_gemm(name, 32768, 4096, 7168, experts, 132)["dynamic"]

    assert [dynamic("wgrad", e) for e in (48, 64, 128)] == [False, True, True]
    assert [dynamic(name, 128) for name in ("fprop", "dgrad")] == [False, False]


def test_wgrad_is_described_as_it_is_asked_for() -> None:
    """Tiles, and how CTAs come to them, follow the dtype of dW, accumulation and the scales."""

    def wgrad(experts: int, *options: Any) -> tuple[Any, Any]:
        c = _C.explain_grouped_gemm("wgrad", 32768, 768, 1408, experts, 132, *options)
        return c["tile"], c["dynamic"]

    wide, m192 = (128, 192), (192, 128)
    assert wgrad(8) == (wide, False)
    assert wgrad(8, "float32") == (m192, False)  # all of D, where wide tiles have 128 columns more
    assert wgrad(8, "float32", True) == (wide, False)
    assert wgrad(32, "float32", True) == (m192, True)
    assert wgrad(32, "bfloat16", True) == (wide, False)
    assert [wgrad(8, d, a, "column")[0] for d in DTYPES for a in (False, True)] == [m192] * 4


def test_no_rows_are_no_tiles() -> None:
    c = _C.explain_grouped_gemm("fprop", 0, 256, 256, 4, 132)
    assert (c["tiles"], c["waves"], c["idle"], c["waste"]) == (0, 0.0, 0.0, 0.0)
    for name in ("fprop", "dgrad", "wgrad"):
        assert _C.explain_grouped_gemm(name, 256, 0, 256, 4, 132)["tiles"] == 0


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


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fp8moe-cutlass", "doctor", *args])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--explain", "32768,4096,7168,8", "--sms", "132") == 0
    out = capsys.readouterr().out
    assert "5504 tiles = 41.70 waves" in out
    assert all(f"{name} " in out for name in ("fprop", "dgrad", "wgrad"))
    assert out.count("static schedule") == 3
    assert run(monkeypatch, "--explain", "32768,4096,7168,64", "--sms", "132") == 0
    out = capsys.readouterr().out
    assert out.count("static schedule") == 2
    assert "dynamic schedule" in out[out.index("wgrad ") :]
    megatron = ("--wgrad-dtype", "float32", "--accumulate")
    assert run(monkeypatch, "--explain", "32768,768,1408,32", "--sms", "132", *megatron) == 0
    out = capsys.readouterr().out
    assert "wgrad adds to float32, operands scaled 128x128" in " ".join(out.split())
    assert "tile 192x128" in out[out.rindex("wgrad ") :]
    assert run(monkeypatch, "--explain", "16,16,16,1", "--sms", "1", "--columns", "row") == 2
    assert "columns must be block or column; got row" in capsys.readouterr().err


def test_command_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--explain", "1,2,3") == 2
    assert "M,N,K,E; got 1,2,3" in capsys.readouterr().err
    for sizes, sms in (("1,9223372036854775808,1,1", "1"), ("1,1,1,1", "9223372036854775808")):
        assert run(monkeypatch, "--explain", sizes, "--sms", sms) == 2
        err = " ".join(capsys.readouterr().err.split())
        assert f"must be below 2^63; got {sizes} and {sms}" in err
    monkeypatch.setattr(doctor, "sm_count", lambda: 7)
    assert "7 SMs" in doctor.explain("16,16,16,1", None)[0]
