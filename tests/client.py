"""A program over every public name, as a user types it: mypy --strict checks it, a test runs it.

What needs several processes, a GPU or a package that may be absent is typed and not called.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import fp8moe_cutlass
from fp8moe_cutlass import (
    Activation,
    CudaError,
    DeviceUnavailable,
    Fp8Recipe,
    Fp8Tensor,
    RoutingPlan,
    SlowPathWarning,
    UnsupportedDevice,
    VersionMismatch,
    autograd,
    distributed,
    integrations,
    nn,
    ops,
    telemetry,
)

if TYPE_CHECKING:
    from fp8moe_cutlass.integrations import megatron
    from fp8moe_cutlass.integrations import transformers as hf

T, H, I, E, S = 64, 256, 128, 4, 2


def about() -> dict[str, str]:
    """What is installed, and what can be raised."""
    errors: list[type[Exception]] = [
        CudaError, DeviceUnavailable, UnsupportedDevice, VersionMismatch, SlowPathWarning,
    ]  # fmt: skip
    info: dict[str, Any] = fp8moe_cutlass.build_info()
    paths = {"cmake": fp8moe_cutlass.cmake_dir(), "headers": fp8moe_cutlass.include_dir()}
    version: str = fp8moe_cutlass.__version__
    return {"version": version, "errors": str(len(errors)), "isa": str(info["cpu_isa"]), **paths}


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(T, H).bfloat16()
    topk_idx = torch.rand(T, E).topk(S).indices
    return x, topk_idx, torch.rand(T, S)


def operators() -> Tensor:
    """A forward and a backward of a layer, by hand."""
    x, topk_idx, probs = tokens()
    plan: RoutingPlan = ops.route(E, topk_idx=topk_idx)
    q: Fp8Tensor = ops.quantize(x)
    permuted: ops.Permuted = ops.permute_pad(q, plan, probs)
    weight: ops.QuantizedWeight = ops.quantize_weight(torch.randn(E, 2 * I, H).bfloat16())
    down: Fp8Tensor = ops.quantize_weight(torch.randn(E, H, I).bfloat16(), transposed=False)
    down_t: Fp8Tensor = ops.turn_weight(down)
    z: Tensor = ops.grouped_gemm(permuted.y, weight.q, plan)
    h: Fp8Tensor = ops.act_quantize(z, plan, permuted.row_probs)
    limited = Activation(limit=10.0)
    h = ops.act_quantize(z, plan, permuted.row_probs, activation=limited)
    saved: ops.ActQuantized = ops.act_quantize(z, plan, permuted.row_probs, save_z=True)
    y: Tensor = ops.grouped_gemm(saved.h, down, plan)
    out: Tensor = ops.unpermute_unpad(y, plan)
    back: ops.UnpermuteGradients = ops.unpermute_unpad_backward(out, plan, y, probs)
    dh: Tensor = torch.randn(plan.rows, I).bfloat16()
    act: ops.ActGradients = ops.act_quantize_backward(
        dh, z, plan, permuted.row_probs, columns="block"
    )
    assert act.dz_columns is not None
    x_t: Fp8Tensor = ops.permute_transpose_fp8(q, plan)
    dw: Tensor = ops.grouped_gemm_wgrad(act.dz_columns, x_t, plan)
    rows: Fp8Tensor = ops.quantize(back.dy, scale_layout="gemm")
    dy_t: Fp8Tensor = ops.transpose_fp8(rows, plan)
    counts = torch.zeros(3, 64, dtype=torch.int64)
    dx: ops.PermuteGradients = ops.permute_pad_backward(y, plan, act.dprobs)
    values: Tensor = ops.dequantize(h)
    zeros: Tensor | None = ops.zero_workspace(x)
    assert zeros is None or zeros.numel() > 0
    total: Tensor = dw.sum() + dx.dx.sum() + values.sum() + dy_t.float().sum() + counts.sum()
    total = total + ops.grouped_gemm(rows, down_t, plan).sum()
    factor = torch.randn(E, 2 * I, 16).bfloat16()
    low: ops.Projected = ops.lora_project(permuted.y, torch.randn(E, 16, H).bfloat16(), plan)
    w2: Fp8Tensor = ops.quantize_lora(factor)
    z = ops.grouped_gemm(permuted.y, weight.q, plan, a2=low.u_q, w2=w2)
    dfactor: Tensor = ops.lora_wgrad(low.u, permuted.y, plan)
    return total + z.sum() + dfactor.sum()


def exchange() -> Tensor:
    """What travels between ranks, here between one and itself."""
    x, topk_idx, probs = tokens()
    sent: ops.Dispatch = ops.dispatch_plan(topk_idx, E, 1)
    packed: Tensor = ops.quantize_pack(x, sent.plan, topk_idx, probs, num_experts=E)
    assert packed.shape[1] == ops.packed_row_bytes(H, S)
    got: ops.Unpacked = ops.unpack(packed, H, S)
    mailbox, (calls, ended, late) = torch.zeros(2, 1, 8).int(), torch.zeros(3, 1).int()
    address = torch.tensor([mailbox.data_ptr()])
    words: Tensor = ops.share_words(
        *(topk_idx[0].int(), address, mailbox, calls, ended, late), rank=0, timeout_ms=1000
    )
    assert words.shape == (1, S)
    rows: Tensor = ops.copy_rows(words.clone(), torch.tensor([[words.data_ptr(), 1, 0]]))
    assert torch.equal(rows, words)
    per_expert = torch.tensor([T, 0, 0, 0], dtype=torch.int32)
    grouped: RoutingPlan = ops.plan_from_counts(per_expert, capacity=T)
    assert int(grouped.row_offsets[-1]) == T
    total: Tensor = got.x.scale_inv.sum()
    return total


def routing() -> Tensor:
    logits = torch.randn(T, E)
    top: ops.RouterTopk = ops.router_topk(logits, S)
    dlogits: Tensor = ops.router_topk_backward(
        torch.ones(T, S), None, top.scores, top.topk_idx, top.topk_weights
    )
    differentiable: ops.RouterTopk = autograd.router_topk(logits.requires_grad_(), S)
    gate: Tensor = autograd.router_logits(torch.randn(T, H), torch.randn(E, H))
    loss: Tensor = differentiable.topk_weights.sum() + gate.sum()
    return dlogits.sum() + loss.detach()


def layers() -> dict[str, Any]:
    """A block of a model, trained one step and watched."""
    rule = nn.RoutingRule(score="sigmoid", selection_bias=True)
    coefficients = nn.LossCoefficients(balancing=0.01, z=0.001)
    router = nn.Router(H, E, S, rule, coefficients=coefficients)
    experts = nn.MoEExperts(E, H, I, recipe=Fp8Recipe(grad_dtype="e5m2"))
    model = nn.MoE(router, experts, nn.SharedExpert(H, I))
    x = torch.randn(T, H).bfloat16()
    routed: nn.Routing = router(x)
    penalty: Tensor = nn.z_loss(routed)
    with telemetry.watch(model) as seen, nn.reuse_fp8_weights(model):
        model(x).float().sum().backward()
    watching: telemetry.Watch = telemetry.enable(model)
    telemetry.disable(model)
    idx, probs = routed.topk_idx, routed.topk_weights.detach()
    noise: dict[str, float] = telemetry.snr(experts, x, idx, probs, x)
    norm: Tensor = nn.clip_grad_norm_(model.parameters(), 1.0)
    found: dict[str, Any] = {"norm": float(norm), "z": float(penalty.detach()), **noise}
    return found | seen.report() | watching.report()


def functions() -> Tensor:
    """The functions under the layers."""
    x, topk_idx, probs = tokens()
    gate_up = torch.randn(E, 2 * I, H).bfloat16().requires_grad_()
    down = torch.randn(E, H, I).bfloat16().requires_grad_()
    weights: autograd.Fp8Weights = autograd.quantize_weights(gate_up.detach(), down.detach())
    options = autograd.Options(recipe=Fp8Recipe(), preactivation="recompute")
    move: autograd.Move = autograd.Local(E)
    need = autograd.Need(x=False)
    counters = autograd.Counters(torch.zeros(6, 64, dtype=torch.int64), every=8)
    out: Tensor = autograd.experts(
        x, topk_idx, probs, gate_up, down, options,
        move=move, weights=weights, need=need,
    )  # fmt: skip
    plan = ops.route(E, topk_idx=topk_idx)
    rows, row_probs = autograd.permute_pad(x, plan, probs)
    back: Tensor = autograd.unpermute_unpad(rows, plan)
    grouped: autograd.Move = autograd.Grouped([T, 0, 0, 0])
    assert grouped is not move
    assert row_probs is not None
    return out.sum() + back.sum() + counters.counts.sum()


def several_ranks(group: dist.ProcessGroup, model: torch.nn.Module, logits: Tensor) -> None:
    shared: set[torch.nn.Parameter] = nn.shard_experts(model, group)
    assert shared
    move: autograd.Move = distributed.GroupMove(distributed.Exchange(group, E))
    assert move is not None
    distributed.Shared(group)


def counted(q: Fp8Tensor, plan: RoutingPlan, counts: Tensor) -> None:
    ops.count_codes(q, plan, counts)


def on_stream(x: Tensor, stream: int) -> Fp8Tensor:
    with fp8moe_cutlass.use_stream(stream):
        return ops.quantize(x)


def transformer_engine(x: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
    te = integrations.transformer_engine
    rows, row_id_map = te.moe_permute(x, routing_map)
    plan: RoutingPlan = ops.plan_from_row_id_map(row_id_map, rows=len(rows))
    padding, unpadding = te.Fp8Padding(E), te.Fp8Unpadding(E)
    wide, _ = padding(rows, [T, 0, 0, 0])
    rows = unpadding(wide, [T, 0, 0, 0])
    q: Fp8Tensor = te.as_fp8_tensor(te.as_blockwise_tensor(ops.quantize(x)))
    probs, routing_map = te.fused_topk_with_score_function(
        q.float(), S, False, None, None, None, "softmax", None
    )
    routing_map, scores = te.fused_compute_score_for_moe_aux_loss(x, S, "sigmoid")
    te.fused_moe_aux_loss(scores, routing_map.sum(0), T, E, S, 0.01)
    rows, _, row_id_map = te.moe_permute_with_probs(x, probs, routing_map)
    per_expert = routing_map.sum(0)
    padded, _, row_id_map, offsets, _ = te.moe_permute_and_pad_with_probs(
        x, probs, routing_map, per_expert, 16
    )
    order = torch.arange(E)
    rows = te.moe_sort_chunks_by_index(rows, per_expert, order)
    rows, _ = te.moe_sort_chunks_by_index_with_probs(rows, probs, per_expert, order)
    out: Tensor = te.moe_unpermute(padded, row_id_map, pad_offsets=offsets, plan=plan)
    return out + rows.sum()


def deepep(layer: nn.MoEExperts, buffer: Any, pair: Any, idx: Tensor, probs: Tensor) -> Tensor:
    of = integrations.deepep
    came: list[of.Received] = [
        of.received(pair, idx, probs, E),
        of.received_expanded(pair, probs, idx),
        of.received_low_latency(pair, idx),
    ]
    weights = layer.quantize_weights()
    _, saved = of.forward(layer, weights, came[0])
    of.backward(layer, saved, pair)
    return of.experts(layer, buffer, pair[0], idx, probs, num_experts=E)


def transformers(model: Any, path: Path, group: dist.ProcessGroup) -> None:
    hf.register("fp8moe", recipe=Fp8Recipe())
    found: list[hf.ExpertsFound] = hf.check(model)
    names: list[str] = hf.swap(model, group=group)
    loaded = hf.from_pretrained(type(model), path, group=group)
    hf.save_pretrained(loaded, path)
    hf.get_peft_model(loaded, path)
    with hf.ReuseCallback(check=True) as callback:
        trainer = hf.GroupTrainer(model=model, callbacks=[callback])
    assert isinstance(trainer, hf.GroupMixin)
    assert found or names


def of_megatron(spec: Any, x: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
    rows, _, row_id_map, *_ = megatron.permute(x, routing_map)
    rows, _ = megatron.sort_chunks_by_idxs(rows, torch.ones(E), torch.arange(E))
    out: Tensor = megatron.unpermute(rows, row_id_map, x.shape)
    megatron.topk_routing_with_score_function(out, S)
    megatron.replace_permutation()
    kinds: tuple[type[torch.nn.Module], ...] = (megatron.Experts, megatron.MoELayer)
    assert kinds
    return megatron.swap(spec, layer=True)


def main() -> dict[str, Any]:
    return {
        "about": about(),
        "operators": operators(),
        "exchange": exchange(),
        "routing": routing(),
        "layers": layers(),
        "functions": functions(),
    }


if __name__ == "__main__":
    print(main())
