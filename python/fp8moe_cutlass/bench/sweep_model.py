"""A model of the expert block's time in FP8 and in bf16: the sweep where nothing can be measured.

Bytes and arithmetic over rates fitted to one session on an H200, the sweep and the layer in
docs/benchmarks: every point of the sweep as a graph, from 0.15 to 78 ms, and the layer's five eager
ones within 16%.
Letters: T tokens, S slots, E experts, H hidden, I intermediate; R = T S rows, n = R / E an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

Shape = dict[str, int]


@dataclass(frozen=True)
class Rates:
    """Seconds and bytes of one machine; the defaults are an H200's."""

    fp8_flops: float = 1546e12  # grouped GEMMs at thousands of rows an expert, padding apart
    bf16_flops: float = 609e12
    copy: float = 4.2e12  # bytes read and written a second
    weights: float = 1.15  # times the copy: weights read, their gradients written
    fp8_launch: float = 4.3e-6  # of the device from kernel to kernel, filling and draining it
    bf16_launch: float = 2.75e-6
    fp8_kernels: int = 17  # forward and backward
    bf16_kernels: int = 40
    fp8_host: float = 0.95e-3  # of the host, eager
    bf16_host: float = 1.25e-3


def gemm_seconds(shape: Shape, flops_rate: float, weight_element: int, rates: Rates) -> float:
    """Six GEMMs: each expert's rows padded to tiles of 128 by 64 on average, or, with few rows, the
    time to read the weights; the weight gradients, in bf16, are written besides."""
    rows = shape["T"] * shape["S"]
    used = min(shape["E"], rows)
    parameters = 3 * used * shape["H"] * shape["I"]
    arithmetic = 2 * parameters * (rows / used + 64) / flops_rate
    reading = rates.weights * weight_element * parameters / rates.copy
    writing = rates.weights * 2 * 3 * shape["E"] * shape["H"] * shape["I"] / rates.copy
    return 2 * max(arithmetic, reading) + arithmetic + writing


def fp8_seconds(shape: Shape, rates: Rates = Rates(), graph: bool = False) -> float:
    """Forward and backward of the FP8 block, its weights already quantized."""
    h, i = shape["T"] * shape["S"] * shape["H"], shape["T"] * shape["S"] * shape["I"]
    moving = (15.4 * h + 26.7 * i) / rates.copy  # bytes, by how far each kernel is from its copy
    device = gemm_seconds(shape, rates.fp8_flops, 1, rates) + moving
    device += rates.fp8_kernels * rates.fp8_launch
    return device if graph else max(device, rates.fp8_host)


def bf16_seconds(shape: Shape, rates: Rates = Rates(), graph: bool = False) -> float:
    """The same of torch in bf16: grouped_mm and compiled SwiGLU; its permutes and weighted sums are
    passes of their own over R H, forward and backward."""
    h, i = shape["T"] * shape["S"] * shape["H"], shape["T"] * shape["S"] * shape["I"]
    device = gemm_seconds(shape, rates.bf16_flops, 2, rates) + (18.4 * h + 19.7 * i) / rates.copy
    device += rates.bf16_kernels * rates.bf16_launch
    return device if graph else max(device, rates.bf16_host)


def weights_seconds(shape: Shape, rates: Rates = Rates()) -> float:
    """Quantizing the weights once: 2 bytes of each parameter read, 2 written; 1.1 of the copy."""
    return 1.1 * 4 * 3 * shape["E"] * shape["H"] * shape["I"] / rates.copy
