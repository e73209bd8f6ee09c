"""MoEExperts: the experts of a Mixture-of-Experts layer, in FP8 or in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8moe_cutlass import build_info
from fp8moe_cutlass.activation import SWIGLU, Activation
from fp8moe_cutlass.autograd import Local, Options
from fp8moe_cutlass.autograd.arguments import check_options, check_word
from fp8moe_cutlass.autograd.body import Biases
from fp8moe_cutlass.autograd.torch_op import give_key
from fp8moe_cutlass.autograd.weights import is_codes
from fp8moe_cutlass.distributed import Exchange, GroupMove
from fp8moe_cutlass.distributed.exchange import TRANSPORTS
from fp8moe_cutlass.distributed.shards import draw_share, held, is_sharded, take_share, writable
from fp8moe_cutlass.nn import fp8_checkpoint, lora
from fp8moe_cutlass.nn._validate import (
    MOST_EXPERTS,
    check_bool,
    check_device,
    check_dtype,
    check_size,
    check_sizes,
)
from fp8moe_cutlass.nn.expert_block import ExpertBlock
from fp8moe_cutlass.nn.fsdp import gathers_in_fp8, refuse_main_grad, refuse_mixed
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.slow_path import slow_path
from fp8moe_cutlass.tensor import scale_shape

if TYPE_CHECKING:
    from typing_extensions import Self


class MoEExperts(ExpertBlock, nn.Module):
    """out[t] = sum over slots s of weight[t, s] * down_e (silu(gate_e x[t]) * up_e x[t]), where
    e = topk_idx[t, s].

    Parameters: gate_up_proj [E, 2I, H] (gate first) and down_proj [E, H, I], of `dtype` (bfloat16,
    float32 or float16). H and I are multiples of 16 with an FP8 recipe, of 8 without. Of dtype
    float8_e4m3fn: frozen codes, beside gate_up_proj_scale_inv and down_proj_scale_inv, to load a
    state_dict into; `from_fp8` makes such a layer of a checkpoint's tensors.

    activation: what stands between the projections (Activation); silu(gate) * up. Of one without a
    gate gate_up_proj is up_proj [E, I, H], also in the state_dict. Of an interleaved one the rows
    of gate_up_proj take turns: gate 0, up 0, gate 1, ...
    bias: gate_up_proj_bias [E, 2I] (or up_proj_bias [E, I]), which z gets, and down_proj_bias
      [E, H], which a token's weight multiplies, too. Backward makes their gradients, with
      delay_wgrad, too.
    recipe: how to quantize (Fp8Recipe), or None for bfloat16 throughout, in plain torch.
    preactivation: what backward reads of z = x gate_up^T. "save": z in bf16. "save_fp8": half the
      memory; gradients are then of the quantized z. "recompute": x alone is saved, and z computed
      again; the same bits as "save".
    transposed_weights: what backward reads of the weights. "save": their FP8 codes, made in forward
      and kept until the backward, one byte per parameter for each forward in flight. "recompute":
      each backward makes them from the parameters, which must then be what they were (torch's
      "modified by an inplace operation"); the same bits. For many forwards in flight. Under
      fully_shard, which gathers the codes again, both are the same.
    delay_wgrad: backward leaves the weight gradients to `backward_dw()`, which must run before the
      next training forward. Hooks on the parameters, and so DistributedDataParallel's average,
      have run by then: average those gradients yourself.
    These options are read-only.

    Each forward quantizes the parameters it multiplies, in FP8, and nothing of that stays. To
    quantize once for several forwards, pass them `weights=layer.quantize_weights()`, or run them
    `with reuse_fp8_weights(model):`. Frozen parameters cost what their use does: nothing is saved
    or made for a gradient that nobody takes.

    A parameter with `main_grad` gets its gradient added there; else in .grad, in its grad_dtype.

    group: a torch.distributed process group whose ranks share the experts: rank r of W owns
      experts [r E / W, (r + 1) E / W) (`local_experts`), and the parameters, their gradients and
      the state_dict hold those alone, [E / W, ...]. Everything else is as on one rank: num_experts
      and the ids in topk_idx count the experts of all ranks, and a rank passes its own tokens, as
      many as it likes or none. Forward and backward are collective: every rank runs both.
      A weight's gradient sums over the tokens of all ranks, so a loss averaged over ranks wants
      it divided by W, which a data-parallel average does to the replicated weights.
      torch takes such plain parameters for copies of one another: torch.distributed.checkpoint
      keeps one rank's, and its clip_grad_norm_ gives each rank a norm of its own, where nn's gives
      the whole model's. shard_experts divides the gradients, and makes DTensors of the parameters,
      of which torch knows the whole.
    rank_capacity: None (exact) drops nothing; the host waits for the device once per forward, to
      learn how many rows arrive. An int is the most rows that a rank sends to each other rank.
      (rows, assignments) also sets the most assignments that a rank receives; W * rows *
      min(S, E / W) if not given. With either there is no host read, buffers have a fixed size, and
      a CUDA graph captures it after one forward like it. What finds no place is dropped (its output
      and gradients are 0) and counted: `dropped`, `check()`.
    transport: how rows in FP8 travel. "nccl": by the collectives of torch.distributed. "peer":
      through each other's memory, between GPUs of one host; the same bits. "auto": as "peer" where
      all ranks can, else as "nccl"; between GPUs a SlowPathWarning then says why, once. The same
      on all ranks.
    Ranks that disagree (sizes, slots, recipe, rank_capacity, what requires grad) all raise, naming
    who passed what; with a rank capacity, in the first forward of its kind. Afterwards `check()`
    raises, and so does the next first forward of a kind. docs/how-to/several-gpus.md.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = SWIGLU,
        recipe: Fp8Recipe | None = Fp8Recipe(),  # noqa: B008 (frozen)
        preactivation: str = "save",
        transposed_weights: str = "save",
        delay_wgrad: bool = False,
        bias: bool = False,
        group: dist.ProcessGroup | None = None,
        rank_capacity: int | tuple[int, int] | None = None,
        transport: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        give_key(self)
        check_sizes(num_experts, hidden_size, intermediate_size, 8 if recipe is None else 16)
        options = Options(recipe, preactivation, transposed_weights, activation)
        check_options("MoEExperts", options)
        check_bool("MoEExperts", "bias", bias)
        trained = dtype is not torch.float8_e4m3fn
        if trained:
            check_dtype("MoEExperts", dtype)
        else:
            fp8_checkpoint.check_options(options, bias)
        check_device("MoEExperts", device)
        check_bool("MoEExperts", "delay_wgrad", delay_wgrad)
        check_word("MoEExperts", "transport", transport, *TRANSPORTS)
        _say_what_is_slow(recipe)
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self._options = options
        self._delayed = [] if delay_wgrad else None
        self._move = _move(group, num_experts, rank_capacity, device, transport)
        layers.add(self)
        factory: Any = {"dtype": dtype, "device": device}
        e, h, i = len(self.local_experts), hidden_size, intermediate_size
        if recipe is not None and e > MOST_EXPERTS:
            raise ValueError(
                f"[MoEExperts] num_experts must be at most {MOST_EXPERTS} per rank with an FP8 "
                f"recipe; got {e}"
            )
        self.gate_up_proj = nn.Parameter(
            torch.empty(e, activation.parts * i, h, **factory), trained
        )
        self.down_proj = nn.Parameter(torch.empty(e, h, i, **factory), trained)
        if bias:
            self.has_bias = True
            for name, w in zip(self.bias_names, (self.gate_up_proj, self.down_proj), strict=True):
                setattr(self, name, nn.Parameter(torch.empty(w.shape[:2], **factory)))
        if not trained:
            for name, of in zip(fp8_checkpoint.SCALES, fp8_checkpoint.WEIGHTS, strict=True):
                w = getattr(self, of)
                shape = scale_shape(tuple(w.shape), "block")
                scale = torch.empty(shape, dtype=torch.float32, device=w.device)
                setattr(self, name, nn.Parameter(scale, False))
        self.reset_parameters()

    @classmethod
    def from_fp8(
        cls, tensors: Mapping[str, Tensor], prefix: str = "", *, num_experts: int, **options: Any
    ) -> Self:
        """The experts of an FP8 checkpoint, frozen: one byte per parameter, whose forward and
        backward are those of a layer that quantizes to the same codes. x and topk_weights have
        gradients.

        tensors: E4M3 codes, and scales of 128x128 blocks in float32, bfloat16 or float8_e8m0fnu,
          by the keys of one of two forms:
            {prefix}{e}.gate_proj.weight [I, H], up_proj [I, H] and down_proj [H, I], each with
            .weight_scale_inv; I must be a multiple of 128;
            {prefix}gate_up_proj [E, 2I, H], gate_up_proj_scale_inv, down_proj [E, H, I] and
            down_proj_scale_inv: transformers' own, and the layer's state_dict.
        A tensor is read when its expert's turn comes, and copied. num_experts: of all ranks; with
        group=, a rank reads its own alone. options: of the constructor, but for dtype.
        ValueError that names the key for what is missing or does not fit.
        """
        check_size("from_fp8", "num_experts", num_experts)
        hidden, inner, scales = fp8_checkpoint.sizes(tensors, prefix, num_experts)
        layer = cls(num_experts, hidden, inner, dtype=torch.float8_e4m3fn, **options)
        for name, dtype in zip(fp8_checkpoint.SCALES, scales, strict=True):
            scale = torch.empty_like(getattr(layer, name), dtype=dtype)
            setattr(layer, name, nn.Parameter(scale, False))
        fp8_checkpoint.read_into(layer, tensors, prefix)
        return layer

    def add_lora(self, rank: int, *, alpha: float, dtype: torch.dtype = torch.bfloat16) -> None:
        """Low-rank terms on both projections, which then train alone: W x becomes
        W x + alpha / rank B A x per expert, inside the FP8 GEMMs. The weights, values or FP8 codes,
        and biases are frozen.

        rank: a multiple of 8, 8 to 64. dtype: of the parameters, which are multiplied in bfloat16:
        base_layer.lora_A.default.weight [E, rank, H], base_layer.lora_B.default.weight
        [E, 2I, rank], lora_A.default.weight [E, rank, I] and lora_B.default.weight [E, H, rank];
        B begins as zero. They have the names of PEFT's target_parameters, and in the state_dict the
        shapes, too; with group= those of this rank's experts, and a state_dict to load may have
        those of all.
        `lora_enabled = False`: a forward is that of the weights alone.
        """
        lora.add(self, rank, alpha, dtype)

    def merge_lora(self) -> None:
        """Adds LoRA's terms to the weights, one expert at a time, and removes them. FP8 weights are
        quantized again, by the recipe's rule in 128x128 blocks."""
        lora.merge(self)

    @property
    def lora_rank(self) -> int:
        """The rank of add_lora; 0: the layer has none."""
        return 0 if self._lora is None else self._lora.rank

    def fp8_tensors(self, prefix: str = "", *, fused: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The weights in the form of an FP8 checkpoint, as (name, tensor): `from_fp8`'s names, per
        expert or fused. FP8 weights are yielded as they lie, to the byte. Parameters are quantized
        by the recipe's rule in 128x128 blocks, one expert at a time, and so is the memory. A LoRA
        is merged into what is yielded, which is then quantized anew, as by merge_lora.

        With group= or shard_experts a rank yields its own experts, by their numbers among all.
        """
        return fp8_checkpoint.write(self, prefix, fused)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform within 1/sqrt(fan in), as nn.Linear. With a group, ranks that start from the same
        random state draw the experts of all ranks and keep theirs: the layer of one process. FP8
        weights become zeros: they come from a checkpoint."""
        if self._lora is not None:
            lora.reset(self)
        if is_codes(self.gate_up_proj):
            for name in fp8_checkpoint.NAMES:
                fp8_checkpoint.as_bits(Tensor.zero_)(getattr(self, name))
            return
        inner, hidden = self.intermediate_size, self.hidden_size
        fan_in = dict(zip((self.gate_up_proj, self.down_proj), (hidden, inner), strict=True))
        if self.has_bias:
            fan_in |= zip((getattr(self, n) for n in self.bias_names), (hidden, inner), strict=True)
        for weight, of in fan_in.items():
            bound = 1.0 / math.sqrt(of)
            with writable(weight if self._average is None else held(weight)) as mine:
                draw_share(mine, bound, self.local_experts, self.num_experts)

    def __getattr__(self, name: str) -> Any:
        # One name inside. A gated layer's is in _parameters, and asks no more.
        if name == "gate_up_proj" and name not in self._parameters and not self.activation.gated:
            return self.up_proj
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "gate_up_proj" and not self.activation.gated:
            name = "up_proj"
        if is_sharded(value) and self._average is None:
            refuse_mixed(name, value, self.group)
        old = self.__dict__.get("_parameters", {}).get(name)  # a copy in the making has none
        if getattr(old, "main_grad", None) is not None and self._average is None:
            refuse_main_grad(name, old, value)
        plain = name.endswith("_bias") or self._turned  # which fully_shard gathers as they are
        if is_sharded(value) and self._average is None and not plain:
            frozen = is_codes(value) or name in fp8_checkpoint.SCALES
            sizes = self.hidden_size, self.intermediate_size
            gathers_in_fp8(value, self.recipe, frozen, *sizes)  # fully_shard looks right after
        super().__setattr__(name, value)

    @property
    def weight_names(self) -> tuple[str, str]:
        """The names of the two weights in the state_dict."""
        return "gate_up_proj" if self.activation.gated else "up_proj", "down_proj"

    @property
    def bias_names(self) -> tuple[str, ...]:
        """The names of the two biases in the state_dict, if the layer has any."""
        return tuple(f"{name}_bias" for name in self.weight_names) if self.has_bias else ()

    def own_biases(self) -> Biases:
        return Biases(*(getattr(self, name) for name in self.bias_names))

    @property
    def local_experts(self) -> range:
        """The experts whose weights this rank holds."""
        exchange = self._exchange
        return range(self.num_experts) if exchange is None else exchange.local_experts

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group that shares the experts; None: there is none."""
        return None if self._exchange is None else self._exchange.group

    @property
    def rank_capacity(self) -> int | tuple[int, int] | None:
        """The constructor's rank_capacity; None without a group."""
        return None if self._exchange is None else self._exchange.rank_capacity

    @property
    def dropped(self) -> Tensor | None:
        """[3] i64 on the device, or None without a group: what this rank has had no place for. Rows
        it did not send, ids out of range, assignments it did not take."""
        return None if self._exchange is None else self._exchange.dropped

    def check(self) -> None:
        """Waits for the device and raises ValueError if this rank has `dropped` anything, or ranks
        with a rank capacity have run different kinds of forwards or backwards at once."""
        if self._exchange is not None:
            self._exchange.check()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        layers.add(self)

    def _save_to_state_dict(self, *args: Any) -> None:
        self._check_nothing_pending("state_dict()")
        super()._save_to_state_dict(*args)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Has FP8 weights keep their dtypes in .to(), .cuda() and their like."""
        apply: Any = super()._apply
        frozen = [getattr(self, name) for name in fp8_checkpoint.NAMES if is_codes(self.down_proj)]
        moved = fp8_checkpoint.as_bits(fn)
        apply(lambda t: moved(t) if any(t is p for p in frozen) else fn(t), recurse)
        for name, parameter in self._parameters.items():  # where torch has put new ones
            setattr(self, name, parameter)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        errors: list[str] = args[-1]
        bad = fp8_checkpoint.misfits(self, state_dict, prefix)
        if bad:
            errors += bad
            return
        if self._average is not None:
            for name in self.weight_names + self.bias_names:
                take_share(state_dict, prefix + name, getattr(self, name), self.local_experts)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        said = [
            f"num_experts={self.num_experts}",
            f"hidden_size={self.hidden_size}",
            f"intermediate_size={self.intermediate_size}",
            *([] if self.activation == SWIGLU else [f"activation={self.activation}"]),
            f"recipe={self.recipe}",
            f"preactivation={self.preactivation!r}",
            f"transposed_weights={self.transposed_weights!r}",
            f"dtype={self.gate_up_proj.dtype}",
        ]
        if self.has_bias:
            said.append("bias=True")
        if self._lora is not None:
            said.append(f"lora_rank={self.lora_rank}")
        if self._delayed is not None:
            said.append("delay_wgrad=True")
        if self._exchange is not None:
            said.append(f"group of {self._exchange.ranks} ranks")
            said.append(f"rank_capacity={self.rank_capacity}")
            said.append(f"transport={self._exchange.transport!r}")
            said.append(f"local_experts={self.local_experts}")
        return ", ".join(said)


layers: WeakSet[MoEExperts] = WeakSet()  # of this process


def _move(
    group: dist.ProcessGroup | None,
    num_experts: int,
    rank_capacity: int | tuple[int, int] | None,
    device: torch.device | str | None,
    transport: str,
) -> Local | GroupMove:
    if group is not None:
        return GroupMove(Exchange(group, num_experts, rank_capacity, device, transport))
    if rank_capacity is not None:
        raise ValueError(
            f"[MoEExperts] rank_capacity needs group=; got {rank_capacity!r} and group=None"
        )
    if transport != "auto":
        raise ValueError(f"[MoEExperts] transport needs group=; got {transport!r} and group=None")
    return Local(num_experts)


def _say_what_is_slow(recipe: Fp8Recipe | None) -> None:
    if recipe is not None and recipe.scale != "pow2":
        slow_path(
            "float32 scales",
            "[MoEExperts] float32 scales cannot be shifted in FP8: backward quantizes x and dout "
            'a second time; Fp8Recipe(scale="pow2") does not',
        )
    if not build_info()["cuda"] and torch.cuda.is_available():
        slow_path(
            "built for the CPU alone",
            "[MoEExperts] this build has no CUDA backend, and torch sees a GPU: layers run on the "
            "CPU; install with FP8MOE_CUDA=ON",
        )
