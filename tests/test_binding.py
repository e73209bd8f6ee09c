"""The boundary: which arrays come in, what is refused and how, that a refusal writes nothing."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flat_calls import EXPERTS, OPS, Problem, bits, flat_calls, objects, outputs, problem
from fp8moe_cutlass import (
    _C,
    Activation,
    DeviceUnavailable,
    Fp8Recipe,
    Fp8Tensor,
    RoutingPlan,
    ops,
    stream,
    use_stream,
)
from lender import Lender, ReadOnly


def extension(name: str) -> Callable[..., None]:
    """_C's op, of flat arguments."""
    return lambda **flat: getattr(_C, name)(*objects(name, flat))


def tensors(call: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in call.items() if isinstance(v, torch.Tensor)}


def refused(op: Callable[..., Any], call: dict[str, Any], match: str) -> None:
    """The call raises a ValueError like this and leaves every tensor as it was."""
    readable = {k: v for k, v in tensors(call).items() if not v.is_meta}
    before = {k: bits(v).clone() for k, v in readable.items()}
    with pytest.raises(ValueError, match=match):
        op(**call)
    for key, value in before.items():
        assert torch.equal(value, bits(readable[key])), key


# ---- arrays that are not torch's ----------------------------------------------------------------


def test_numpy_gives_the_bits_of_torch() -> None:
    p = problem()
    x = p.x.float().numpy()
    q, want = ops.quantize(x), ops.quantize(p.x)
    assert q.data.dtype == np.uint8
    assert q.fp8_dtype == "e4m3"
    np.testing.assert_array_equal(q.data, bits(want.data).numpy())
    np.testing.assert_array_equal(q.scale_inv, want.scale_inv.numpy())

    plan = ops.route(EXPERTS, topk_idx=p.topk_idx.numpy())
    np.testing.assert_array_equal(plan.row_of, p.plan.row_of.numpy())
    np.testing.assert_array_equal(plan.token_of_row, p.plan.token_of_row.numpy())
    plan.check()
    rows, row_probs = ops.permute_pad(q, plan, p.probs.numpy())
    np.testing.assert_array_equal(rows.data, bits(p.rows8.data).numpy())
    np.testing.assert_array_equal(row_probs, p.row_probs.numpy())
    w, _ = ops.quantize_weight(p.w.numpy())
    d = ops.grouped_gemm(rows, w, plan, out_dtype="float32")
    np.testing.assert_array_equal(
        d, ops.grouped_gemm(p.rows8, p.w8, p.plan, out_dtype="float32").numpy()
    )
    np.testing.assert_array_equal(
        q.to_layout("gemm").to_layout("row").dequantize("float32"), want.dequantize("float32")
    )


@pytest.mark.parametrize("name", OPS)
def test_other_producers_give_the_bits_of_torch(name: str) -> None:
    """The fallback through `__dlpack__`, FP8 and bfloat16 included."""
    direct, lent = flat_calls()[name], flat_calls()[name]
    extension(name)(**direct)
    extension(name)(**{k: Lender(v) if isinstance(v, torch.Tensor) else v for k, v in lent.items()})
    for key in outputs(name):
        assert torch.equal(bits(direct[key]), bits(lent[key])), key


def test_other_producers_need_out() -> None:
    x, want = problem().x, ops.quantize(problem().x)
    out = ops.quantize(torch.zeros_like(x))
    ops.quantize(Lender(x), out=out)
    assert torch.equal(bits(out.data), bits(want.data))
    with pytest.raises(ValueError, match=r"\[quantize\] allocates .* give out="):
        ops.quantize(Lender(x))


def test_other_producers_plan_with_out() -> None:
    p = problem()
    plan = RoutingPlan(torch.zeros_like(p.plan.buffer), *p.plan.sizes)
    ids, lent = Lender(p.topk_idx), RoutingPlan(Lender(plan.buffer), *plan.sizes)
    scratch = Lender(torch.zeros(1 << 16, dtype=torch.uint8))
    for workspace in (None, scratch):
        plan.buffer.zero_()
        ops.route(EXPERTS, topk_idx=ids, out=lent, workspace=workspace)
        assert torch.equal(plan.buffer, p.plan.buffer)
    ranks = RoutingPlan(torch.zeros_like(p.dispatch.buffer), *p.dispatch.sizes)
    counts = torch.zeros(EXPERTS, 2, dtype=torch.int32)
    out = RoutingPlan(Lender(ranks.buffer), *ranks.sizes), Lender(counts)
    ops.dispatch_plan(ids, 2 * EXPERTS, EXPERTS, out=out, workspace=scratch)
    assert torch.equal(ranks.row_of, p.dispatch.row_of)


def test_numpy_has_no_bfloat16() -> None:
    """float32 is what every op has instead; the GEMMs have no float16."""
    q = ops.quantize(np.zeros((4, 128), np.float32))
    with pytest.raises(ValueError, match="NumPy has no bfloat16; ask for 'float32'"):
        q.dequantize()


def test_uint8_codes_with_their_format() -> None:
    p = problem()
    codes = Fp8Tensor(p.x8.data.view(torch.uint8), p.x8.scale_inv, fp8_dtype="e4m3")
    assert torch.equal(codes.dequantize(), p.x8.dequantize())
    as_e5m2 = Fp8Tensor(bits(p.x8.data).numpy(), p.x8.scale_inv.numpy(), fp8_dtype="e5m2")
    want = p.x8.data.view(torch.float8_e5m2).float().view(48, 2, 128)
    np.testing.assert_array_equal(
        as_e5m2.dequantize("float32"), (want * p.x8.scale_inv[..., None]).view(48, 256).numpy()
    )
    with pytest.raises(ValueError, match="uint8 with fp8_dtype given; got uint8"):
        Fp8Tensor(codes.data, codes.scale_inv)
    nameless = SimpleNamespace(data=codes.data, scale_inv=codes.scale_inv, scale_layout="row")
    with pytest.raises(ValueError, match="q must be one of float8_e4m3fn, float8_e5m2; got uint8"):
        _C.dequantize(nameless, torch.zeros(48, 256))


def test_size_one_dimensions_may_have_any_stride() -> None:
    x = torch.randn(1, 256).as_strided((1, 256), (7, 1))
    assert torch.equal(bits(ops.quantize(x).data), bits(ops.quantize(x.clone()).data))


def test_zero_elements_from_everywhere() -> None:
    assert ops.quantize(torch.empty(0, 128)).shape == (0, 128)
    assert ops.quantize(np.empty((0, 128), np.float32)).shape == (0, 128)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPS)
def test_every_array_must_be_contiguous(name: str) -> None:
    for key, value in tensors(flat_calls()[name]).items():
        if value.shape[-1] < 2:
            continue
        call = flat_calls()[name]
        wide = torch.zeros((*value.shape[:-1], 2 * value.shape[-1])).to(value.dtype)
        call[key] = wide[..., ::2]
        argument = key.replace("_scale", ".scale_inv") if key.endswith("_scale") else key
        refused(
            extension(name),
            call,
            rf"\[{name}\] {argument} must be contiguous; got .* with strides \[",
        )


@pytest.mark.parametrize("name", OPS)
def test_what_starts_between_multiples_of_16_bytes(name: str) -> None:
    """The kernels move 16 bytes at a time: such an input is copied, such an output refused."""
    want = flat_calls()[name]
    extension(name)(**want)
    for key, value in tensors(flat_calls()[name]).items():
        call = flat_calls()[name]
        scales = key.endswith("_scale")
        if scales and call[f"{key.removesuffix('_scale')}_layout"] != "gemm":
            continue
        if not scales and key != "plan" and (value.shape[-1] < 128 or value.ndim < 2):
            continue  # ids, probs, counts
        flat = torch.zeros(value.numel() + 1).to(value.dtype)
        call[key] = flat[1:].view(value.shape)
        call[key].view(torch.uint8).copy_(value.view(torch.uint8))
        if key in outputs(name) and not (key == "plan" and "transpose" in name):
            argument = key.replace("_scale", ".scale_inv") if scales else key
            message = rf"\[{name}\] {argument} must start at a multiple of 16 bytes"
            refused(extension(name), call, message)
            continue
        extension(name)(**call)
        for out in outputs(name):
            assert torch.equal(bits(call[out]), bits(want[out])), (key, out)


def test_numpy_and_others_are_copied_alike() -> None:
    flat = np.arange(4 * 128 + 1, dtype=np.float32)
    x = flat[1:].reshape(4, 128)
    assert x.ctypes.data % 16
    np.testing.assert_array_equal(ops.quantize(x).data, ops.quantize(x.copy()).data)


def test_negative_views() -> None:
    """torch marks -x over x's memory: it is resolved, or, where it would be written, refused."""
    x = torch.randn(4, 128)
    assert torch.equal(ops.quantize(torch._neg_view(x)).dequantize(), ops.quantize(-x).dequantize())
    with pytest.raises(ValueError, match=r"\[dequantize\] x .* must not be a negative view"):
        ops.dequantize(ops.quantize(x), out=torch._neg_view(x))


@pytest.mark.parametrize("name", OPS)
def test_every_array_has_one_shape(name: str) -> None:
    """A row too many anywhere is refused: shapes follow from one another, and all are checked."""
    for key, value in tensors(flat_calls()[name]).items():
        call = flat_calls()[name]
        if key == "places":
            continue  # any number, also of none
        call[key] = torch.zeros((value.shape[0] + 1, *value.shape[1:])).to(value.dtype)
        refused(extension(name), call, rf"\[{name}\] .*; got ")


@pytest.mark.parametrize("name", OPS)
def test_every_array_has_its_dtypes(name: str) -> None:
    for key, value in tensors(flat_calls()[name]).items():
        call = flat_calls()[name]
        call[key] = torch.zeros(value.shape, dtype=torch.float64)
        refused(extension(name), call, rf"\[{name}\] .*; got float64")
        call[key] = torch.zeros(value.shape, dtype=torch.bool)
        refused(extension(name), call, rf"\[{name}\] .*; got bool")


@pytest.mark.parametrize("name", OPS)
def test_meta_and_fake_tensors(name: str) -> None:
    for key, value in tensors(flat_calls()[name]).items():
        call = flat_calls()[name]
        call[key] = torch.empty_like(value, device="meta")
        refused(extension(name), call, rf"\[{name}\] .* got a meta, sparse")
        with FakeTensorMode():
            call[key] = torch.empty(value.shape, dtype=value.dtype)
        with pytest.raises(ValueError, match=rf"\[{name}\] .* got a fake or meta tensor of shape"):
            extension(name)(**call)


@pytest.mark.parametrize("name", OPS)
def test_outputs_must_be_writable(name: str) -> None:
    for key in outputs(name):
        call = flat_calls()[name]
        before = call[key].clone()
        call[key] = ReadOnly(call[key])
        refused(extension(name), call, "must be writable; got a read-only")
        assert torch.equal(bits(call[key].tensor), bits(before))


@pytest.mark.parametrize("name", OPS)
def test_outputs_overlap_nothing(name: str) -> None:
    """The last bytes of an output being the first of another argument is enough."""
    for out in outputs(name):
        for other in tensors(flat_calls()[name]).keys() - {out}:
            call = flat_calls()[name]
            first, second = call[out].nbytes, call[other].nbytes
            memory = torch.zeros(first + second, dtype=torch.uint8)
            start = (first - 1) // 16 * 16
            for key, piece in ((out, memory[:first]), (other, memory[start:][:second])):
                call[key] = piece.view(call[key].dtype).view(call[key].shape)
            refused(extension(name), call, rf"\[{name}\] .* must not share memory")


@pytest.mark.parametrize(
    "name",
    [
        "quantize",
        "quantize_weight",
        "quantize_pack",
        "transpose_fp8",
        "act_quantize",
        "act_quantize_backward",
    ],
)
@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf"), 1e300])
def test_eps_is_a_magnitude(name: str, eps: float) -> None:
    refused(extension(name), {**flat_calls()[name], "eps": eps}, "eps must be finite and not neg")


def test_sizes_whose_products_overflow() -> None:
    buffer = torch.zeros(32, dtype=torch.int32)
    for sizes in ((1 << 33, 1 << 31, 1, 1, 0), (0, 1, 1, 1, 1 << 62), (0, 1, 1 << 62, 1, 0)):
        with pytest.raises(ValueError, match=r"no size over|at most 1024 experts"):
            _C.route(None, None, RoutingPlan(buffer, *sizes), None)


def test_inputs_may_be_read_only() -> None:
    x = np.ones((4, 128), np.float32)
    x.flags.writeable = False
    assert ops.quantize(x).shape == (4, 128)


@pytest.mark.parametrize("name", OPS)
def test_gradients_are_not_lost_silently(name: str) -> None:
    for key, value in tensors(flat_calls()[name]).items():
        if value.dtype not in (torch.float32, torch.bfloat16):
            continue
        call = flat_calls()[name]
        run = extension(name)
        call[key] = value.clone().requires_grad_()
        argument = key.replace("_scale", ".scale_inv")
        refused(run, call, rf"\[{name}\] {argument} must not require grad.*autograd or .nn, or det")
        with torch.no_grad():
            run(**call)


def test_wrapped_and_sparse_tensors() -> None:
    x = torch.eye(128).to_sparse()
    with pytest.raises(ValueError, match=r"\[quantize\] x must be a dense tensor with memory"):
        ops.quantize(x)


WRONG = {  # of each kind of argument: what it must be, and what it is not
    "array": ("an array", (1.0, 3, True, "x", [1.0], (1.0,), {}, object())),
    "fp8": ("Fp8Tensor", (1.0, "x", [1.0], torch.zeros(2, 2), np.zeros((2, 2)), object())),
    "plan": ("a RoutingPlan", (1, "x", [1], torch.zeros(4, dtype=torch.int32), object())),
    "int": ("an int", (1.0, True, "x", None, [1], torch.zeros(2))),
    "bool": ("True or False", (1, None, "x", np.True_, torch.tensor(True))),
    "float": ("a number", (None, "x", True, [1.0], torch.zeros(2))),
    "str": ("'pow2', 'fp32', 'amax' or 'approx'", (None, "e8m0", True, 1, ["pow2"])),
    "activation": ("an Activation", (None, "swiglu", 2.0, object())),
    "format": ("'e4m3' or 'e5m2'", (None, "e3m4", 4, ["e4m3"])),
}


@pytest.mark.parametrize("name", OPS)
def test_what_is_of_a_wrong_type(name: str) -> None:
    """One message: operator, argument, what is allowed, what came."""
    op, good = getattr(_C, name), objects(name, flat_calls()[name])
    arguments: list[tuple[str, str, str, bool]] = []
    for field in _C.operators()[name]:
        rule = [
            (word, kind, "option", False) for word, kind in (("scale", "str"), ("eps", "float"))
        ]
        arguments += rule if field[1] == "rule" else [field]
    for at, (field, kind, role, plain_too) in enumerate(arguments):
        allowed, wrong = WRONG[kind]
        if not role.startswith("optional") and not role.endswith("workspace"):
            wrong = (*wrong, None)
        for value in wrong:
            if plain_too and hasattr(value, "__dlpack__"):
                continue
            if value is True and role in ("out", "optional_out"):
                continue  # an output to allocate
            match = rf"\[{name}\] {field} must be .*{allowed}.*; got "
            with pytest.raises(ValueError, match=match):
                op(*good[:at], value, *good[at + 1 :])
    with pytest.raises(ValueError, match=rf"\[{name}\] \w+ is missing"):
        op(*good[:-1])
    with pytest.raises(ValueError, match=rf"\[{name}\] takes {len(good)} arguments; got"):
        op(*good, None)


def test_what_came_is_shown() -> None:
    q = ops.quantize(torch.zeros(4, 128))
    for x, shown in (
        ([1.0, 2.0], "list"),
        (np.zeros((4, 128), ">f4"), "ndarray of dtype >f4"),
        (None, "None"),
        ("x", "'x'"),
        (2.5, "2.5"),
    ):
        with pytest.raises(ValueError, match=rf"\[quantize\] x must be an array.*; got {shown}$"):
            _C.quantize(x, q, "pow2", 1e-10)
    with pytest.raises(
        ValueError, match=r"\[quantize\] q must be an Fp8Tensor .*; got Tensor of dty"
    ):
        _C.quantize(q.data, torch.zeros(4, 128), "pow2", 1e-10)


# Arguments that the Python functions look at: the rest reaches _C under its own name.
WRONG_CALLS: dict[str, Callable[[Problem], Any]] = {
    "route num_experts": lambda p: ops.route(3.0, topk_idx=p.topk_idx),
    "route capacity": lambda p: ops.route(3, topk_idx=p.topk_idx, capacity="4"),
    "route align": lambda p: ops.route(3, topk_idx=p.topk_idx, align=True),
    "plan_from_counts capacity": lambda p: ops.plan_from_counts(p.topk_idx[0], capacity=None),
    "plan_from_row_id_map rows": lambda p: ops.plan_from_row_id_map(p.topk_idx.int(), rows=None),
    "plan_from_row_id_map slots": lambda p: ops.plan_from_row_id_map(
        p.topk_idx[0].int(), rows=3, slots="1"
    ),
    "dispatch_plan ranks": lambda p: ops.dispatch_plan(p.topk_idx, 6, 3.0),
    "unpack hidden": lambda p: ops.unpack(p.packed, 128.0, 2),
    "permute_pad probs": lambda p: ops.permute_pad(p.x, p.plan, [1.0], out=(p.rows, p.row_probs)),
    "act_quantize activation": lambda p: ops.act_quantize(p.rows, activation="relu2"),
    "quantize out": lambda p: ops.quantize(p.x, out=p.x),
    "route out": lambda p: ops.route(EXPERTS, topk_idx=p.topk_idx, out=p.plan.buffer),
    "quantize scale": lambda p: ops.quantize(p.x, scale=["pow2"]),
    "quantize fp8_dtype": lambda p: ops.quantize(p.x, fp8_dtype=["e4m3"]),
    "quantize scale_layout": lambda p: ops.quantize(p.x, scale_layout={}),
    "dequantize dtype": lambda p: ops.dequantize(p.x8, dtype={}),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_functions_name_what_is_wrong(case: str) -> None:
    op, argument = case.split()
    with pytest.raises(ValueError, match=rf"\[{op}\] {argument} must .*; got "):
        WRONG_CALLS[case](problem())


def test_experts_have_one_bound() -> None:
    """1,024, on every device."""
    ids = torch.zeros(4, 1, dtype=torch.int64)
    assert ops.route(1024, topk_idx=ids).experts == 1024
    with pytest.raises(
        ValueError, match=r"\[route\] plan must have at most 1024 experts; got 1025"
    ):
        ops.route(1025, topk_idx=ids)


def test_others_arrays() -> None:
    """A mask is not ignored; an immutable array is not written; the stream is told."""
    q = ops.quantize(torch.zeros(4, 128))
    with pytest.raises(ValueError, match="without a mask; got MaskedArray"):
        _C.quantize(np.ma.zeros((4, 128), np.float32), q, "pow2", 1e-10)
    immutable = type("ArrayImpl", (Lender,), {"__module__": "jaxlib._jax"})(torch.zeros(4, 128))
    with pytest.raises(ValueError, match=r"\[dequantize\] x is written.*immutable array of JAX"):
        _C.dequantize(q, immutable)

    asked = []

    class OnCuda(Elsewhere):
        def __dlpack__(self, **kwargs: Any) -> Any:
            asked.append(kwargs)
            return super().__dlpack__()

    for handle, want in ((0, 1), (7, 7)):
        with use_stream(handle), pytest.raises(ValueError, match="q must be on cuda:0; got cpu"):
            _C.quantize(OnCuda(2), q, "pow2", 1e-10)
        assert asked.pop() == {"stream": want}


def test_unknown_layout() -> None:
    p = problem()
    q = SimpleNamespace(data=p.x8.data, scale_inv=p.x8.scale_inv, scale_layout="rows")
    with pytest.raises(ValueError, match=r"q\.scale_layout must be 'row', 'gemm' or 'block'"):
        _C.quantize(p.x, q, "pow2", 1e-10)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Elsewhere:
    """A float32 [4, 128] array that says it lives on another kind of device."""

    def __init__(self, device_type: int) -> None:
        self.shape = (ctypes.c_int64 * 2)(4, 128)
        self.memory = (ctypes.c_float * 512)()
        self.view = _DLTensor(
            ctypes.addressof(self.memory), device_type, 0, 2, 2, 32, 1, self.shape
        )

    def __dlpack__(self, **kwargs: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
        )
        return new(ctypes.addressof(self.view), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.view.device_type, 0


def test_devices() -> None:
    q = ops.quantize(torch.zeros(4, 128))
    with pytest.raises(ValueError, match=r"x must be on the CPU or a CUDA device; got .* type 10"):
        _C.quantize(Elsewhere(10), q, "pow2", 1e-10)
    with pytest.raises(ValueError, match=r"q must be on cuda:0; got cpu"):
        _C.quantize(Elsewhere(2), q, "pow2", 1e-10)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here and would be used")
def test_cuda_arrays_without_a_gpu() -> None:
    """A build without CUDA, or a machine without a driver, says so; nothing crashes."""
    x, data, scale = Elsewhere(2), Elsewhere(2), Elsewhere(2)
    data.view.code, data.view.bits = 10, 8
    scale.shape[1] = 1
    q = SimpleNamespace(data=data, scale_inv=scale, scale_layout="row")
    lacks = "need an NVIDIA driver|need a Hopper GPU"
    if not _C.build_info()["cuda"]:
        lacks = "this build has no CUDA backend; pass CPU tensors, or reinstall with FP8MOE_CUDA=ON"
    with pytest.raises(DeviceUnavailable, match=rf"^\[quantize\] .*({lacks})"):
        _C.quantize(x, q, "pow2", 1e-10)


# ---- words and metadata -------------------------------------------------------------------------


def transposed(p: Problem, rows: str = "fp32", **changes: Any) -> Any:
    q = ops.quantize(p.rows, scale=rows)
    return ops.transpose_fp8(q, p.plan, **changes)


BAD_CALLS: dict[str, tuple[Callable[[Problem], Any], str]] = {
    "nor amax scales": (lambda p: transposed(p, "amax"), "pow2 scales .* got pow2=False"),
    "nor permuted and shifted": (
        lambda p: ops.permute_transpose_fp8(ops.quantize(p.x, scale="fp32"), p.plan),
        "got pow2=False",
    ),
    "shifts make no fp32 scales": (
        lambda p: ops.transpose_fp8(p.rows8, p.plan, scale="fp32"),
        "got pow2=True, scale='fp32'",
    ),
    "nor amax scales either": (
        lambda p: ops.transpose_fp8(p.rows8, p.plan, scale="amax"),
        "got pow2=True, scale='amax'",
    ),
    "columns": (lambda p: transposed(p, columns="row", requantize=True), "'block' or 'column'"),
    "scale": (
        lambda p: ops.quantize(p.x, scale="e8m0"),
        "scale must be 'pow2', 'fp32', 'amax' or 'approx'",
    ),
    "fp8_dtype": (
        lambda p: ops.quantize(p.x, fp8_dtype="e3m4"),
        r"\[quantize\] fp8_dtype must be one of",
    ),
    "fp8_dtype object": (lambda p: ops.quantize(p.x, fp8_dtype=torch.int8), "got torch.int8"),
    "out of another layout": (
        lambda p: ops.quantize(p.x, out=p.rows8),
        r"out must have .*'row'.*; got \('gemm'",
    ),
    "out of the wrong arity": (
        lambda p: ops.act_quantize(p.rows, save_z=True, out=p.rows8),
        r"out must be \(h, z\); got 1 parts",
    ),
    "dequantize dtype": (
        lambda p: ops.dequantize(p.x8, dtype="float64"),
        r"\[dequantize\] dtype must be one of .* got 'float64'",
    ),
    "out_dtype": (
        lambda p: ops.grouped_gemm(p.rows8, p.w8, p.plan, out_dtype="float16"),
        r"\[grouped_gemm\] out_dtype must be one of .* got 'float16'",
    ),
    "accumulate into nothing": (
        lambda p: ops.grouped_gemm_wgrad(p.columns8, p.columns8, p.plan, accumulate=True),
        "got out=None",
    ),
    "plan of other sizes": (
        lambda p: ops.route(EXPERTS, topk_idx=p.topk_idx, align=16, out=p.plan),
        "out must be a plan of",
    ),
    "to_layout": (lambda p: p.w8.to_layout("row"), "got 'block' to 'row'"),
    "tensor layout": (lambda p: Fp8Tensor(p.x8.data, p.x8.scale_inv, scale_layout="?"), "'row'"),
    "tensor of another format": (
        lambda p: Fp8Tensor(p.x8.data, p.x8.scale_inv, fp8_dtype="e5m2"),
        "fp8_dtype must be that of data, float8_e4m3fn; got e5m2",
    ),
    "tensor format": (
        lambda p: Fp8Tensor(p.x8.data, p.x8.scale_inv, fp8_dtype="e8m0"),
        "got 'e8m0'",
    ),
    "moving is not casting": (lambda p: p.x8.to(torch.float32), "use dequantize"),
    "nor of the scales": (lambda p: p.x8.to(p.x8.data.dtype), "got dtype torch.float8_e4m3fn"),
    "recipe of blocks and fp32": (lambda p: Fp8Recipe(scale="fp32"), "got 'block'"),
    "recipe of blocks and amax": (
        lambda p: Fp8Recipe(scale="amax"),
        "columns must be 'column' with scale 'amax'; got 'block'",
    ),
    "recipe word": (lambda p: Fp8Recipe(columns="rows"), "got 'rows'"),
    "recipe rounding of a weighted activation": (
        lambda p: Fp8Recipe(rounding="silu"),
        "weighting must be 'output' with rounding 'silu'; got 'activation'",
    ),
    "recipe rounding": (lambda p: Fp8Recipe(rounding="up"), "rounding must be one of .* got 'up'"),
    "rounding of another activation": (
        lambda p: ops.act_quantize(p.x, activation=Activation(limit=1.0), rounding="silu"),
        "rounding needs swiglu without alpha, offset and limit; got rounding 2",
    ),
    "rounding": (lambda p: ops.act_quantize(p.x, rounding=True), "'none', 'product' or 'silu'"),
    "recipe weighting": (
        lambda p: Fp8Recipe(weighting="after"),
        "weighting must be one of .'activation', 'output'.; got 'after'",
    ),
    "recipe eps": (lambda p: Fp8Recipe(eps=-1.0), "got -1.0"),
    "recipe activation_eps": (lambda p: Fp8Recipe(activation_eps="x"), "activation_eps .* got 'x'"),
    "recipe eps past float32": (lambda p: Fp8Recipe(eps=1e39), r"got 1e\+39"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_words(name: str) -> None:
    call, match = BAD_CALLS[name]
    with pytest.raises(ValueError, match=match):
        call(problem())


def test_plan_check_counts_what_was_dropped() -> None:
    topk_idx = torch.tensor([[0, 1], [0, -1], [1, 0]])
    plan = ops.route(2, topk_idx=topk_idx, capacity=3)
    with pytest.raises(ValueError, match="2 assignments dropped because the capacity"):
        plan.check()
    ops.route(2, topk_idx=topk_idx).check()


def test_plan_views_are_the_buffer() -> None:
    plan = problem().plan
    assert (plan.rows, plan.columns) == (96, 128 * ((96 + 127 * EXPERTS) // 128))
    assert plan.buffer_size == plan.buffer.numel()
    views = (plan.tokens_per_expert, plan.row_offsets, plan.col_offsets, plan.token_of_row)
    views += (plan.slot_of_row, plan.row_of, plan.status, plan.col_blocks)
    assert all(v.untyped_storage().data_ptr() == plan.buffer.data_ptr() for v in views)
    rows = plan.row_of.flatten().long()
    want = torch.arange(48).repeat_interleave(2)
    assert torch.equal(plan.token_of_row[rows].long(), want)
    assert torch.equal(plan.slot_of_row[rows].long(), torch.arange(2).repeat(48))
    assert RoutingPlan(plan.buffer, *plan.sizes).sizes == plan.sizes


# ---- lifetime, streams --------------------------------------------------------------------------


def test_arguments_are_released() -> None:
    p = problem()
    x, frozen = p.x, np.ones((4, 128), np.float32)
    counts = sys.getrefcount(x), sys.getrefcount(frozen)
    for _ in range(100):
        ops.quantize(x)
        ops.quantize(frozen)
        with pytest.raises(ValueError, match="contiguous"):
            _C.quantize(x.T, p.x8, "pow2", 1e-10)
    gc.collect()
    assert (sys.getrefcount(x), sys.getrefcount(frozen)) == counts


def test_what_properties_make_lives_as_long_as_the_call() -> None:
    p, made, alive = problem(), [], []  # type: ignore[var-annotated]

    def new(t: torch.Tensor) -> torch.Tensor:
        made.append(weakref.ref(t := t.clone()))
        return t

    class Rows:
        data = property(lambda _: new(p.x8.data))
        scale_inv = property(lambda _: new(p.x8.scale_inv))
        scale_layout, pow2, fp8_dtype = p.x8.scale_layout, p.x8.pow2, p.x8.fp8_dtype

    class Plan:
        buffer = property(lambda _: new(p.plan.buffer))
        tokens, slots, experts, align, capacity = p.plan.sizes

    class Probs(Lender):
        def __dlpack__(self, **options: Any) -> Any:  # read after the others
            alive.extend(ref() is not None for ref in made)
            return super().__dlpack__(**options)

    got, _ = ops.permute_pad(Rows(), Plan(), Probs(p.probs))
    want, _ = ops.permute_pad(p.x8, p.plan, p.probs)
    assert alive == [True] * 3
    assert not any(ref() is not None for ref in made)
    assert torch.equal(bits(got.data), bits(want.data))


def test_many_types_do_not_confuse_the_type_cache() -> None:
    p = problem()
    want, out = bits(p.x8.data), ops.quantize(p.x)
    for i in range(6):  # more than it holds
        subclass = type(f"Tensor{i}", (torch.Tensor,), {})
        assert torch.equal(bits(ops.quantize(p.x.as_subclass(subclass), out=out).data), want)
        del subclass
        gc.collect()


def test_use_stream_restores() -> None:
    with use_stream(7):
        with use_stream(9):
            assert stream.current() == 9
        assert stream.current() == 7
        with pytest.raises(RuntimeError), use_stream(11):
            raise RuntimeError
        assert stream.current() == 7
    assert stream.current() == 0


def test_use_stream_is_of_a_context() -> None:
    """Two asyncio tasks that take turns, and a thread beside them, see their own."""
    seen: dict[int, list[int]] = {}

    async def task(handle: int) -> None:
        with use_stream(handle):
            for _ in range(3):
                await asyncio.sleep(0)
                seen.setdefault(handle, []).append(stream.current())

    async def both() -> None:
        await asyncio.gather(task(1), task(2))

    asyncio.run(both())
    assert seen == {1: [1] * 3, 2: [2] * 3}
    with use_stream(5), ThreadPoolExecutor() as pool:
        assert pool.submit(stream.current).result() == 0
