"""The experts between DeepEP's dispatch and combine: no cast, forward or backward.

    out = deepep.experts(layer, buffer, x, topk_idx, topk_weights, num_experts=256)

buffer: deep_ep.Buffer (its normal kernels) or deep_ep.ElasticBuffer. layer: nn.MoEExperts of this
rank's experts alone, with an FP8 recipe. x is quantized once and dispatched in FP8; what arrives,
codes and row scales, goes as it is through `route` and `permute_pad` into the GEMMs; the partial
sums of this rank go to combine in bf16. Backward: the gradient of the output is quantized once and
dispatched by the handle; dx rows in bf16 and the gradients of the weights go to combine.

Code that calls DeepEP itself, for its events and hooks, uses the pieces: `received`,
`received_expanded` and `received_low_latency` take what its three forms of dispatch return, and
`forward` and `backward` give what combine and the backward's combine want.

DeepEP moves float8_e4m3fn with float32 scales [tokens, H / 128]: H is a multiple of 128, the recipe
e4m3 in both directions. Routing weights are applied here, before the second GEMM, as combine adds
without weights; low-latency combine applies them itself, so there they are left to it.

What has run: DeepEP 1.2.1's Buffer on two H100s of one host. Every output and gradient was equal,
bit for bit, to those of nn.MoEExperts(group=) over NCCL. ElasticBuffer, the expanded and the
low-latency layouts are written from DeepEP's documentation and have run on the CPU alone, against a
stand-in that keeps its contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fp8moe_cutlass.autograd import Fp8Weights, Need, Options, fp8
from fp8moe_cutlass.autograd.block import Arrived
from fp8moe_cutlass.autograd.body import Gradients
from fp8moe_cutlass.integrations.deepep_rows import (
    Pair,
    Received,
    fp8_rows,
    received,
    received_expanded,
    received_low_latency,
)
from fp8moe_cutlass.nn import MoEExperts
from fp8moe_cutlass.nn._validate import check_weights_alone
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.tensor import Fp8Tensor

__all__ = [
    "Received",
    "backward",
    "experts",
    "forward",
    "received",
    "received_expanded",
    "received_low_latency",
]


def forward(
    layer: MoEExperts, weights: Fp8Weights, rows: Received, *, preactivation: str = "recompute"
) -> tuple[Tensor, fp8.Saved]:
    """This rank's partial sums [R, H] bf16, what combine takes, and what `backward` needs.

    weights: layer.quantize_weights(). preactivation: as of MoEExperts. ValueError for a layer with
    biases or LoRA, which `experts` takes.
    """
    check_weights_alone("deepep.forward", layer)
    options = Options(_recipe(layer), preactivation, activation=layer.activation)
    used = fp8.weights(layer.gate_up_proj, layer.down_proj, weights, options, Need())
    out, saved = fp8.forward(rows.x, rows.probs, rows.plan, used, options, Need(), layer._counters)
    assert saved is not None
    return out, saved


def backward(layer: MoEExperts, saved: fp8.Saved, grad: Pair, *, pow2: bool = True) -> Gradients:
    """Gradients from what the dispatch of the quantized gradient (same handle) returned.

    dx [R, H] bf16 and dprobs [R, S] f32 are what the backward's combine takes as x and
    topk_weights; gate_up and down are this rank's weight gradients, still to be run:
    `gate_up.run(out, accumulate, dtype)`.
    """
    rows = fp8_rows("backward", grad, pow2)
    options = Options(_recipe(layer), activation=layer.activation)
    return fp8.backward(rows, saved, options, Need(), layer._counters)


def experts(
    layer: MoEExperts,
    buffer: Any,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    *,
    num_experts: int,
    weights: Fp8Weights | None = None,
    dispatch: Mapping[str, Any] | None = None,
    combine: Mapping[str, Any] | None = None,
) -> Tensor:
    """out [T, H] in x's dtype: dispatch, this rank's experts, combine; differentiable in x,
    topk_weights and the layer's parameters. Every rank calls it, in the same order.

    x [T, H] float, topk_idx [T, S] of deep_ep.topk_idx_t (-1: none) over all num_experts,
    topk_weights [T, S] f32. dispatch, combine: further arguments of the buffer's methods (config,
    num_sms, expert_alignment, num_worst_tokens, ...); not those of events: all runs in the order of
    the current stream. weights: as of MoEExperts.
    """
    _recipe(layer)
    if num_experts % layer.num_experts:
        raise ValueError(
            f"[deepep.experts] num_experts must be a multiple of the layer's {layer.num_experts}; "
            f"got {num_experts}"
        )
    move = _DeepEp(
        buffer, num_experts, layer.num_experts, dict(dispatch or {}), dict(combine or {})
    )
    probs = topk_weights.float()
    # Ranks that asked for different gradients would wait for each other: all move both.
    of_weights = layer.gate_up_proj.requires_grad, layer.down_proj.requires_grad
    of_biases = any(bias.requires_grad for bias in layer.local_biases() or ())
    need = Need(True, True, *of_weights, bool(layer.lora_rank), of_biases)
    return layer.run(move, x, topk_idx, probs, weights, need=need)


def _recipe(layer: MoEExperts) -> Fp8Recipe:
    recipe = layer.recipe
    if recipe is None or recipe.grad_dtype != "e4m3":
        raise ValueError(
            f"[deepep] the layer's recipe must be FP8, e4m3 in both directions; got {recipe}"
        )
    if layer.group is not None:
        raise ValueError(
            "[deepep] the layer must hold this rank's experts alone, DeepEP moves the tokens; got "
            "one with a group"
        )
    return recipe


@dataclass(frozen=True)
class _DeepEp:
    """The move by a buffer of either generation (autograd/block.py). Its route is the handle of the
    dispatch, which its gradient and both combines take."""

    buffer: Any
    num_experts: int  # of all ranks
    local_experts: int
    dispatch_options: dict[str, Any]
    combine_options: dict[str, Any]
    collective = True

    def send(
        self, x: Tensor, topk_idx: Tensor, probs: Tensor, recipe: Any, need: Need | None
    ) -> Arrived:
        rows, handle = self._dispatch(fp8.enter(x, recipe), topk_idx, probs)
        return Arrived(rows.x, rows.probs, rows.plan, handle)

    def receive(self, sent: Arrived) -> Arrived:
        return sent

    def combine(self, out: Tensor, route: Any) -> Tensor:
        combined: Tensor = self._combine(out, route)[0]
        return combined

    def send_grad(
        self, dout: Tensor, route: Any, recipe: Any, meanwhile: Any
    ) -> tuple[Fp8Tensor, None]:
        sent = fp8.enter(dout, recipe, gradient=True)
        options = {k: v for k, v in self.dispatch_options.items() if k in ("config", "num_sms")}
        pair = self.buffer.dispatch((sent.data, sent.scale_inv), handle=route, **options)[0]
        return fp8_rows("experts", pair, sent.pow2), None

    def return_grads(
        self, dx: Tensor | None, dprobs: Tensor | None, route: Any, beside: bool
    ) -> Any:
        return self._combine(dx, route, dprobs)

    def receive_grads(self, returning: Any, route: Any) -> Any:
        return returning

    def _dispatch(self, x: Fp8Tensor, topk_idx: Tensor, weights: Tensor) -> Any:
        """(Received, handle)."""
        given: dict[str, Any] = {"topk_idx": topk_idx, "topk_weights": weights}
        given |= self.dispatch_options
        local = self.local_experts
        if getattr(self.buffer, "get_dispatch_layout", None) is not None:
            per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
                topk_idx, self.num_experts
            )
            data, ids, probs, counts, handle, _ = self.buffer.dispatch(
                (x.data, x.scale_inv),
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                **given,
            )
            return received(data, ids, probs, local, counts=counts, pow2=x.pow2), handle
        data, ids, probs, handle, _ = self.buffer.dispatch(
            (x.data, x.scale_inv), num_experts=self.num_experts, **given
        )
        counts = handle.num_recv_tokens_per_expert_list or ()
        rows = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        return received(data, ids, probs, local, counts=counts, rows=rows, pow2=x.pow2), handle

    def _combine(self, rows: Any, handle: Any, weights: Tensor | None = None) -> Any:
        """(sums [T, H] bf16, sums of the weights [T, S] | None)."""
        combined = self.buffer.combine(rows, handle, topk_weights=weights, **self.combine_options)
        return combined[:2]
