"""Experts under fully_shard: the shards stay what they are, and travel as FP8 codes and scales.
FP8 weights travel as they lie, whatever dtype a policy casts other parameters to.

fully_shard asks a parameter's local tensor how it is gathered (`fsdp_pre_all_gather` and
`fsdp_post_all_gather`, torch's extension points). Each gather quantizes the shard, so there is
nothing to keep fresh; and what is gathered is freed after use, as any parameter of fully_shard's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from fp8moe_cutlass import ops
from fp8moe_cutlass.autograd import Fp8Weights
from fp8moe_cutlass.autograd.weights import quantize_weight
from fp8moe_cutlass.distributed.shards import is_sharded
from fp8moe_cutlass.ops._torch import no_torch_function, wrapper_tensor
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.slow_path import slow_path
from fp8moe_cutlass.tensor import TILE, Fp8Tensor, cdiv, scale_shape

aten = torch.ops.aten


def gathers_in_fp8(
    weight: Any, recipe: Fp8Recipe | None, frozen: bool, hidden: int, intermediate: int
) -> None:
    """Makes fully_shard gather `weight`, a DTensor [E, N, K] that it has made, in FP8. It gathers
    weights by no recipe, or split along N or K inside 128x128 blocks, as they are.

    frozen: `weight` holds codes or scales. hidden, intermediate: the layer's sizes.
    """
    local = weight._local_tensor
    if recipe is None or type(local) is not Tensor:
        return
    [(dim, parts)] = [
        (p.dim, n)
        for p, n in zip(weight.placements, weight.device_mesh.shape, strict=True)
        if p.is_shard()
    ]
    if dim and any(n % (TILE * parts) for n in (hidden, intermediate)):
        slow_path(
            "experts split inside blocks",
            "[MoEExperts] fully_shard gathers experts in FP8 where it splits them along dimension "
            f"0, or H and I into parts of multiples of {TILE}; here it gathers them in "
            f"{weight.dtype}; got H {hidden}, I {intermediate} along dimension {dim} in {parts}",
        )
        return
    shard = local.as_subclass(FrozenShard if frozen else ExpertShard)
    shard.whole, shard.along, shard.recipe = tuple(weight.shape), dim, recipe
    weight._local_tensor = shard


def gathered_weights(gate_up: Tensor, down: Tensor) -> Fp8Weights | None:
    """The weights that fully_shard has gathered in FP8, if it has."""
    if isinstance(gate_up, GatheredExperts) and isinstance(down, GatheredExperts):
        return Fp8Weights(_codes_of(gate_up), _codes_of(down))
    if isinstance(gate_up, GatheredExperts) or isinstance(down, GatheredExperts):
        raise RuntimeError(
            "[MoEExperts] fully_shard must gather both projections in FP8 or neither; got one: "
            "shard_placement_fn must split both along E, or both along dimensions that blocks fit"
        )
    return None


def _again(method: Callable[..., Tensor]) -> Any:
    """The method of Tensor, whose result is a shard again."""

    def called(self: ExpertShard, *args: Any, **kwargs: Any) -> ExpertShard:
        made = method(self, *args, **kwargs).as_subclass(type(self))
        made.whole, made.along, made.recipe = self.whole, self.along, self.recipe
        return made

    return called


class ExpertShard(Tensor):
    """A shard of experts [E, N, K], split along dimension `along`: a plain strided tensor that says
    how to gather it."""

    whole: tuple[int, int, int]
    along: int
    recipe: Fp8Recipe

    __torch_function__ = no_torch_function  # results are plain tensors
    # But what fully_shard makes of a shard that was replaced or moved, and with CPU offload:
    new_zeros = _again(Tensor.new_zeros)
    narrow = _again(Tensor.narrow)
    to = _again(Tensor.to)
    pin_memory = _again(Tensor.pin_memory)

    # With one argument. Given torch's five, fully_shard asks that every input have the padded
    # shard's size where E does not divide, which scales cannot; and on some ranks alone.
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Codes as bytes and scales, padded to as many experts on every rank."""
        e, n, k = self.shape
        size = (e if self.along else cdiv(self.whole[0], mesh.size()), n, k)
        made = torch.empty if e == size[0] else torch.zeros
        codes = made(size, dtype=torch.uint8, device=self.device)
        scale_inv = made(scale_shape(size, "block"), dtype=torch.float32, device=self.device)
        if e:
            to = _fp8(codes, scale_inv, e, self.recipe.scale == "pow2")
            quantize_weight(self.as_subclass(Tensor), self.recipe, transposed=False, out=to)
        if mesh.size() == 1:  # fully_shard then takes the first input alone
            return (codes,), scale_inv
        if self.along:  # it then takes inputs of the shard's size alone
            parts = [torch.empty_like(scale_inv) for _ in range(mesh.size())]
            dist.all_gather(parts, scale_inv, group=mesh.get_group())
            return (codes,), torch.cat(parts, self.along)
        return (codes, scale_inv), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The gathered parameter and what of it to free; out: the parameter, whose memory has been
        filled again."""
        codes, scale_inv = outputs if metadata is None else (*outputs, metadata)
        if metadata is not None and metadata.is_cuda:  # made on fully_shard's stream
            metadata.record_stream(torch.cuda.current_stream(metadata.device))
        if out is None:
            pow2 = self.recipe.scale == "pow2"
            codes = codes.view(-1, *self.whole[1:])
            return GatheredExperts(codes, scale_inv, pow2, dtype, self.whole), outputs
        if metadata is not None:
            out.scale_inv = scale_inv
        return None


class FrozenShard(ExpertShard):
    """A shard of codes or of scales."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Itself, FP8 as bytes."""
        held = self.as_subclass(Tensor).contiguous()
        held = held.view(torch.uint8) if held.element_size() == 1 else held
        padding = 0 if self.along else cdiv(self.whole[0], mesh.size()) - len(held)
        return (F.pad(held, [0, 0] * (held.ndim - 1) + [0, padding]),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        whole = outputs[0].view(self.dtype).view(-1, *self.whole[1:])
        return None if out is not None else (whole, outputs)


class GatheredExperts(Tensor):
    """A gathered parameter [E, N, K]: of the parameter's dtype to autograd, which gives it a plain
    gradient; in memory, codes [E', N, K] uint8 and scale_inv, E' >= E. It cannot be written. What
    reads it sees what the codes stand for."""

    codes: Tensor
    scale_inv: Tensor
    pow2: bool

    @staticmethod
    def __new__(
        cls, codes: Tensor, scale_inv: Tensor, pow2: bool, dtype: torch.dtype, size: Any
    ) -> GatheredExperts:
        made: GatheredExperts = wrapper_tensor(cls, size, dtype=dtype, device=codes.device)
        return made

    def __init__(
        self, codes: Tensor, scale_inv: Tensor, pow2: bool, dtype: torch.dtype, size: Any
    ) -> None:
        self.codes, self.scale_inv, self.pow2 = codes, scale_inv, pow2

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale_inv"], (self.pow2, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> GatheredExperts:
        pow2, dtype = meta
        return GatheredExperts(inner["codes"], inner["scale_inv"], pow2, dtype, size)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GatheredExperts({tuple(self.shape)}, {self.dtype})"

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        t, kwargs = args[0], kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return cls(t.codes, t.scale_inv, t.pow2, t.dtype, t.shape)
        if func is aten.as_strided.default:  # fully_shard's, to the whole size
            return cls(t.codes, t.scale_inv, t.pow2, t.dtype, args[1])
        if func._schema.is_mutable:
            raise RuntimeError(
                "[MoEExperts] gathered FP8 weights cannot be written: reshard() the module and "
                f"write its shards; got {func}"
            )
        of = _stand_in if func in _OF_SHAPES or func.namespace == "fp8moe" else _values
        return func(*pytree.tree_map_only(cls, of, args), **pytree.tree_map_only(cls, of, kwargs))


# Functions that read no values.
_OF_SHAPES = (
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
)


def _stand_in(w: GatheredExperts) -> Tensor:
    """A plain tensor of w's shape, dtype and device, of one element in memory."""
    return w.codes.new_empty((), dtype=w.dtype).expand(w.shape)


def _codes_of(w: GatheredExperts) -> Fp8Tensor:
    return _fp8(w.codes, w.scale_inv, w.shape[0], w.pow2)


def _values(w: GatheredExperts) -> Tensor:
    values: Tensor = ops.dequantize(_codes_of(w), dtype="float32").to(w.dtype)
    return values


def _fp8(codes: Tensor, scale_inv: Tensor, experts: int, pow2: bool) -> Fp8Tensor:
    """The first `experts` of codes [E', N, K] uint8: padding comes last."""
    data = codes[:experts].view(torch.float8_e4m3fn)
    return Fp8Tensor(data, scale_inv[:experts], "block", pow2, "e4m3", check=False)


def refuse_mixed(name: str, sharded: Any, group: Any) -> None:
    """RuntimeError where fully_shard would put one parameter together from the experts of several
    ranks of `group`."""
    ranks = set(sharded.device_mesh.mesh.flatten().tolist())
    if group is not None and len(ranks & set(dist.get_process_group_ranks(group))) > 1:
        raise RuntimeError(
            "[MoEExperts] fully_shard must not shard a layer made with group= over the ranks of "
            "that group, which hold other experts each: make the layer without a group and use "
            f"nn.shard_experts; got {name} as a DTensor over ranks {sorted(ranks)}"
        )


def refuse_main_grad(name: str, old: Any, new: Any) -> None:
    """RuntimeError where fully_shard puts `new` in the place of `old`, a parameter with main_grad:
    to shard it, or to gather it for a forward."""
    if is_sharded(old) != is_sharded(new):
        raise RuntimeError(
            "[MoEExperts] main_grad must be None under fully_shard, which averages .grad alone: "
            f"main_grad would stay what it is; got one of {name}"
        )
