"""A model of the expert block's time in FP8 and in bf16: what the sweep is expected to show.

Bytes and arithmetic over rates taken from one run on an H200 (docs/benchmarks, the 2026-11-21 layer
JSON, whose five shapes it meets within a fifth). Letters: T tokens, S slots, E experts, H hidden,
I intermediate; R = T S rows, n = R / E of them an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

Shape = dict[str, int]


@dataclass(frozen=True)
class Rates:
    """Seconds and bytes of one machine; the defaults are an H200's."""

    fp8_flops: float = 1100e12  # grouped GEMMs at thousands of rows an expert
    bf16_flops: float = 620e12
    copy: float = 4.2e12  # bytes read and written a second
    launch: float = 3e-6  # of the device from kernel to kernel
    fp8_kernels: int = 17  # forward and backward
    bf16_kernels: int = 40
    fp8_host: float = 1.05e-3  # of the host, eager
    bf16_host: float = 1.6e-3  # a guess from the forward alone; the others are measured


def gemm_seconds(shape: Shape, flops_rate: float, weight_element: int, rates: Rates) -> float:
    """Six GEMMs: each expert's rows padded to tiles of 128 by 64 on average, or, with few rows, the
    time to read the weights; the weight gradients, in bf16, are written besides."""
    rows = shape["T"] * shape["S"]
    used = min(shape["E"], rows)
    parameters = 3 * used * shape["H"] * shape["I"]
    arithmetic = 2 * parameters * (rows / used + 64) / flops_rate
    reading = weight_element * parameters / rates.copy
    writing = 2 * 3 * shape["E"] * shape["H"] * shape["I"] / rates.copy
    return 2 * max(arithmetic, reading) + arithmetic + writing


def fp8_seconds(shape: Shape, rates: Rates = Rates(), graph: bool = False) -> float:
    """Forward and backward of the FP8 block, its weights already quantized."""
    h, i = shape["T"] * shape["S"] * shape["H"], shape["T"] * shape["S"] * shape["I"]
    moving = (12.2 * h + 26 * i) / rates.copy  # bytes, by how far each kernel is from its copy
    device = gemm_seconds(shape, rates.fp8_flops, 1, rates) + moving
    device += rates.fp8_kernels * rates.launch
    return device if graph else max(device, rates.fp8_host)


def bf16_seconds(shape: Shape, rates: Rates = Rates(), graph: bool = False) -> float:
    """The same of torch in bf16: grouped_mm and compiled SwiGLU."""
    h, i = shape["T"] * shape["S"] * shape["H"], shape["T"] * shape["S"] * shape["I"]
    device = gemm_seconds(shape, rates.bf16_flops, 2, rates) + (8 * h + 16 * i) / rates.copy
    device += rates.bf16_kernels * rates.launch
    return device if graph else max(device, rates.bf16_host)


def weights_seconds(shape: Shape, rates: Rates = Rates()) -> float:
    """Quantizing the weights once: 2 bytes of each parameter read, 2 written; 1.3 of the copy."""
    return 1.3 * 4 * 3 * shape["E"] * shape["H"] * shape["I"] / rates.copy
