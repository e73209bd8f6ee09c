"""Arguments of wrong types: every public function says `[name] rule; got value`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8moe_cutlass import Activation, Fp8Recipe, Fp8Tensor, autograd, nn, ops
from fp8moe_cutlass.autograd import Options
from moe_problem import problem

P = problem(16)
PLAN = ops.route(4, topk_idx=P.topk_idx)
FP8 = ops.quantize(P.x)
ROWS = torch.randn(PLAN.rows, 256)
ROW_PROBS = torch.rand(PLAN.rows)
LOGITS = torch.randn(16, 4)
CHOSEN = ops.router_topk(LOGITS, 2)
PADDING = torch.zeros(16, dtype=torch.bool)
COUNTS = torch.tensor([4, 4, 4, 4])
MASK = torch.ones(16, 4, dtype=torch.bool)
TO_RANKS = ops.dispatch_plan(P.topk_idx, 4, 2)
WORDS, CALLS, ENDED = torch.zeros(3).int(), torch.zeros(1).int(), torch.zeros(1).int()
MAILBOX = torch.zeros(2, 1, 4).int()
PACKED = ops.quantize_pack(P.x, TO_RANKS.plan, P.topk_idx, P.probs, num_experts=4)
COLUMNS = ops.permute_transpose_fp8(FP8, PLAN)
GEMM_ROWS = ops.permute_pad(FP8, PLAN).y
WEIGHT = ops.quantize_weight(P.gate_up)
FACTOR = torch.ones(4, P.gate_up.shape[1], 16).bfloat16()
LOW = ops.lora_project(GEMM_ROWS, torch.ones(4, 16, 256).bfloat16(), PLAN)
LAYER, BF16 = P.experts(), P.experts(recipe=None)
ROUTER = nn.Router(256, 4, 2, nn.RoutingRule(selection_bias=True))
MOE = nn.MoE(nn.Router(256, 4, 2), LAYER)
ROUTING = ROUTER(P.x)

WRONG: tuple[Any, ...] = (
    *(None, 1, 1.5, -1, float("nan"), "2", True, 1j, b"e4m3", ...),
    *([1, 2], [[0, 1]], (), (None, None), {}, {1}, object(), range(3), torch.float32),
    *(torch.tensor(2), torch.ones(3), torch.ones(2, 2), torch.ones(0), MASK, P.topk_idx),
    *(torch.ones(16, 256).double(), torch.ones(16, 2, dtype=torch.complex64)),
    torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)]),
    torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], layout=torch.jagged),
    *(torch.eye(16).to_sparse(), np.ones((16, 256), np.float32), FP8, PLAN, torch.nn.Identity()),
)


def reuse(module: Any, check: Any) -> None:
    with nn.reuse_fp8_weights(module, check=check):
        pass


def block(options: Options = Options(), **given: Any) -> Tensor:  # noqa: B008 (frozen)
    return autograd.experts(**BLOCK | given, options=options)


ROUTE = {"x": P.x, "topk_idx": P.topk_idx, "padding": PADDING}
EXPERTS = {"x": P.x, "topk_idx": P.topk_idx, "topk_weights": P.probs}
OF_ROWS = {"rows": P.x, "counts": [4, 4, 4, 4], "probs": P.probs[:, 0], "weights": None}
BLOCK = {"x": P.x, "topk_idx": P.topk_idx, "probs": P.probs, "gate_up": P.gate_up, "down": P.down}
MODULE = {"num_experts": 4, "hidden_size": 16, "intermediate_size": 16}
RULE = {name: f.default for name, f in nn.RoutingRule.__dataclass_fields__.items()}
RECIPE = {name: f.default for name, f in Fp8Recipe.__dataclass_fields__.items()}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Fp8Recipe": (Fp8Recipe, RECIPE),
    "RoutingRule": (nn.RoutingRule, RULE),
    "LossCoefficients": (nn.LossCoefficients, {"balancing": 0.0, "z": 0.0}),
    "Router": (
        nn.Router,
        {"hidden_size": 16, "num_experts": 4, "top_k": 2, "rule": nn.RoutingRule()}
        | {"coefficients": nn.LossCoefficients(), "group": None, "device": None},
    ),
    "MoEExperts": (
        nn.MoEExperts,
        MODULE
        | {"recipe": None, "preactivation": "save", "transposed_weights": "save"}
        | {"delay_wgrad": False, "group": None, "rank_capacity": None, "transport": "auto"}
        | {"dtype": torch.float32, "device": None},
    ),
    "SharedExpert": (
        nn.SharedExpert,
        {"hidden_size": 16, "intermediate_size": 16, "output_gate": False}
        | {"dtype": torch.float32, "device": None},
    ),
    "MoE": (nn.MoE, {"router": ROUTER, "experts": LAYER, "shared_expert": None}),
    "experts": (LAYER, EXPERTS | {"no_expert": -1, "max_assignments": None, "weights": None}),
    "bf16": (BF16, EXPERTS | {"no_expert": -1, "max_assignments": None, "weights": None}),
    "mask": (LAYER, {"x": P.x, "topk_idx": MASK, "topk_weights": LOGITS, "max_assignments": 64}),
    "forward_rows": (LAYER.forward_rows, OF_ROWS),
    "forward_rows in bf16": (BF16.forward_rows, OF_ROWS),
    "moe": (MOE, ROUTE | {"return_routing": False, "weights": None}),
    "shared expert": (nn.SharedExpert(256, 16), {"x": P.x}),
    "router": (ROUTER, ROUTE | {"sequences": 2}),
    "balancing_loss": (ROUTER.balancing_loss, {"routing": ROUTING, "sequences": 2}),
    "counts": (ROUTER.balancing_loss, {"routing": ROUTING, "counts": COUNTS}),
    "count": (ROUTER.count, {"routing": ROUTING}),
    "update_selection_bias": (
        ROUTER.update_selection_bias,
        {"tokens_per_expert": COUNTS, "rate": 1e-3},
    ),
    "z_loss": (nn.z_loss, {"routing": ROUTING}),
    "reuse_fp8_weights": (reuse, {"module": MOE, "check": False}),
    "shard_experts": (nn.shard_experts, {"model": MOE, "group": None}),
    "autograd.experts": (
        autograd.experts,
        BLOCK | {"options": Options(), "move": None, "weights": None},
    ),
    "autograd.experts in bf16": (autograd.experts, BLOCK | {"options": Options(None)}),
    "router_logits": (autograd.router_logits, {"x": P.x, "weight": torch.ones(4, 256)}),
    "autograd.permute_pad": (autograd.permute_pad, {"x": P.x, "plan": PLAN, "probs": P.probs}),
    "autograd.unpermute_unpad": (
        autograd.unpermute_unpad,
        {"y": ROWS, "plan": PLAN, "probs": P.probs},
    ),
    "quantize_weights": (
        autograd.quantize_weights,
        {"gate_up": P.gate_up, "down": P.down, "recipe": Fp8Recipe(), "transposed": True},
    ),
    "autograd.router_topk": (
        autograd.router_topk,
        {"logits": LOGITS, "top_k": 2, "selection_bias": None, "padding": None}
        | {"given_idx": None, "sequences": 1, "score": "softmax"},
    ),
    "update_": (LAYER.quantize_weights().update_, {"layer": LAYER}),
    "Fp8Tensor": (
        Fp8Tensor,
        {"data": FP8.data, "scale_inv": FP8.scale_inv, "scale_layout": "row", "fp8_dtype": "e4m3"},
    ),
    "dequantize()": (FP8.dequantize, {"dtype": "float32"}),
    "to_layout": (FP8.to_layout, {"layout": "gemm"}),
    "quantize": (
        ops.quantize,
        {"x": P.x, "scale": "pow2", "eps": 0.0, "scale_layout": "row", "out": None},
    ),
    "quantize_weight": (ops.quantize_weight, {"w": P.gate_up, "transposed": True, "out": None}),
    "turn_weight": (ops.turn_weight, {"q": WEIGHT.q, "out": None}),
    "dequantize": (ops.dequantize, {"q": FP8, "dtype": "float32", "out": None}),
    "route": (
        ops.route,
        {"num_experts": 4, "topk_idx": P.topk_idx, "align": 1, "capacity": None, "out": None},
    ),
    "route a mask": (ops.route, {"num_experts": 4, "routing_map": MASK, "capacity": 64}),
    "plan_from_counts": (
        ops.plan_from_counts,
        {"tokens_per_expert": COUNTS, "capacity": 16, "align": 1, "out": None},
    ),
    "plan_from_row_id_map": (
        ops.plan_from_row_id_map,
        {"row_id_map": torch.arange(32).int(), "rows": 32, "slots": 2, "pad_offsets": None}
        | {"out": None},
    ),
    "router_topk": (
        ops.router_topk,
        {"logits": LOGITS, "top_k": 2, "selection_bias": None, "padding": None, "given_idx": None}
        | {"sequences": 1, "score": "softmax", "select_by": "scores", "num_groups": 1}
        | {"closed_value": 0.0, "normalize": True, "epsilon": 0.0, "out": None},
    ),
    "router_topk_backward": (
        ops.router_topk_backward,
        {"dweights": CHOSEN.topk_weights, "dscores": None, "scores": CHOSEN.scores}
        | {"topk_idx": CHOSEN.topk_idx, "topk_weights": CHOSEN.topk_weights, "out": None},
    ),
    "permute_pad": (
        ops.permute_pad,
        {"x": FP8, "plan": PLAN, "probs": P.probs, "scale_layout": "gemm", "out": None},
    ),
    "permute_pad_backward": (
        ops.permute_pad_backward,
        {"dy": ROWS, "plan": PLAN, "dprobs": ROW_PROBS, "out": None},
    ),
    "unpermute_unpad": (
        ops.unpermute_unpad,
        {"y": ROWS, "plan": PLAN, "probs": P.probs, "out": None},
    ),
    "unpermute_unpad_backward": (
        ops.unpermute_unpad_backward,
        {"dout": P.x.float(), "plan": PLAN, "y": ROWS, "probs": P.probs, "out": None},
    ),
    "act_quantize": (
        ops.act_quantize,
        {"z": ROWS, "plan": PLAN, "probs": ROW_PROBS, "save_z": False, "out": None}
        | {"activation": Activation()},
    ),
    "act_quantize_backward": (
        ops.act_quantize_backward,
        {"dh": ROWS[:, :128].contiguous(), "z": ROWS, "plan": PLAN, "probs": ROW_PROBS}
        | {"columns": "block", "fp8_dtype": "e4m3", "out": None, "activation": Activation()},
    ),
    "grouped_gemm": (
        ops.grouped_gemm,
        {"a": GEMM_ROWS, "w": WEIGHT[0], "plan": PLAN, "out_dtype": "bfloat16", "out": None}
        | {"a2": LOW.u_q, "w2": ops.quantize_lora(FACTOR)},
    ),
    "lora_project": (
        ops.lora_project,
        {"rows": GEMM_ROWS, "factor": FACTOR, "plan": PLAN, "rank_first": False, "scaling": 2.0}
        | {"scale": "pow2", "eps": 0.0, "out": None},
    ),
    "lora_wgrad": (
        ops.lora_wgrad,
        {"u": LOW.u, "rows": GEMM_ROWS, "plan": PLAN, "rank_first": True, "out": None},
    ),
    "quantize_lora": (
        ops.quantize_lora,
        {"factor": FACTOR, "rank_first": False, "scale": "pow2", "eps": 0.0, "out": None},
    ),
    "grouped_gemm_wgrad": (
        ops.grouped_gemm_wgrad,
        {"dy_t": COLUMNS, "x_t": COLUMNS, "plan": PLAN, "accumulate": False, "out": None},
    ),
    "permute_transpose_fp8": (
        ops.permute_transpose_fp8,
        {"q": FP8, "plan": PLAN, "columns": "block", "out": None},
    ),
    "transpose_fp8": (
        ops.transpose_fp8,
        {"q": GEMM_ROWS, "plan": PLAN, "columns": "block", "requantize": False, "out": None},
    ),
    "count_codes": (
        ops.count_codes,
        {"q": FP8, "plan": PLAN, "counts": torch.zeros(21).long(), "columns": None, "stride": 1},
    ),
    "dispatch_plan": (
        ops.dispatch_plan,
        {"topk_idx": P.topk_idx, "num_experts": 4, "ranks": 2, "segment": 0, "out": None},
    ),
    "quantize_pack": (
        ops.quantize_pack,
        {"x": P.x, "plan": TO_RANKS.plan, "topk_idx": P.topk_idx, "probs": P.probs}
        | {"num_experts": 4, "fp8_dtype": "e4m3", "out": None},
    ),
    "packed_row_bytes": (ops.packed_row_bytes, {"hidden": 256, "slots": 2}),
    "unpack": (ops.unpack, {"packed": PACKED, "hidden": 256, "slots": 2, "pow2": True}),
    "share_words": (
        ops.share_words,
        {"words": WORDS, "peers": torch.tensor([MAILBOX.data_ptr()]), "mailbox": MAILBOX}
        | {"calls": CALLS, "ended": ENDED, "late": WORDS[:1].clone(), "rank": 0}
        | {"timeout_ms": 0, "out": None},
    ),
    "copy_rows": (
        ops.copy_rows,
        {"out": torch.zeros(1, 4), "places": torch.tensor([[MAILBOX.data_ptr(), 1, 0]])},
    ),
}


def refusal(call: Callable[..., Any], given: dict[str, Any]) -> str | None:
    """What is wrong with the error that `call` raises; None: nothing, or it takes the value."""
    try:
        call(**given)
    except (ValueError, RuntimeError) as error:
        return None if str(error).startswith("[") else repr(error)
    except Exception as error:
        return repr(error)
    return None


@pytest.mark.parametrize("name", CALLS)
def test_each_argument(name: str) -> None:
    """One at a time; what is no mistake may be taken."""
    call, valid = CALLS[name]
    if name not in ("shard_experts", "Fp8Tensor"):
        call(**valid)
    found = [
        f"{argument}={value!r}: {wrong}"
        for argument in valid
        for value in WRONG
        if (wrong := refusal(call, valid | {argument: value})) is not None
    ]
    assert not found, "\n".join(found)


def test_a_dtensor_is_no_tensor_of_a_layer() -> None:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = DTensor.from_local(P.x, mesh, [Replicate()])
        for name, call in (
            ("MoEExperts", lambda: LAYER(x, P.topk_idx, P.probs)),
            ("MoEExperts", lambda: BF16.forward_rows(x, [4, 4, 4, 4])),
            ("MoE", lambda: MOE(x)),
            ("Router", lambda: ROUTER(x)),
            ("SharedExpert", lambda: nn.SharedExpert(256, 16)(x)),
        ):
            with pytest.raises(ValueError, match=rf"^\[{name}\] .* DTensor: pass its to_local\(\)"):
                call()
    finally:
        dist.destroy_process_group()


ACCEPTED_ONCE: dict[str, Callable[[], Any]] = {
    "no_expert of a bool": lambda: LAYER(P.x, P.topk_idx, P.probs, no_expert=True),
    "capacity of a tensor": lambda: ops.route(4, topk_idx=P.topk_idx, capacity=torch.tensor([9])),
    "max_assignments of a bool": lambda: LAYER(P.x, MASK, LOGITS, max_assignments=True),
    "eps of a bool": lambda: Fp8Recipe(eps=True),
    "coefficients of a module": lambda: nn.Router(16, 4, 2, coefficients=torch.nn.Identity()),
    "group of a module": lambda: nn.Router(16, 4, 2, group=torch.nn.Identity()),
    "a shared expert of a number": lambda: nn.MoE(ROUTER, LAYER, 3),
    "no sequences": lambda: ROUTER(P.x, sequences=0),
    "an unknown preactivation": lambda: block(Options(preactivation="saved")),
    "unknown transposed_weights": lambda: block(Options(transposed_weights="saved")),
    "z in FP8 without a recipe": lambda: block(Options(None, "save_fp8")),
    "ids of fewer tokens": lambda: block(Options(None), topk_idx=P.topk_idx[1:], probs=P.probs[1:]),
    "weights without a recipe": lambda: block(Options(None), weights=LAYER.quantize_weights()),
    "weights of other sizes": lambda: block(
        weights=autograd.quantize_weights(torch.ones(4, 32, 256), torch.ones(4, 256, 16))
    ),
}


@pytest.mark.parametrize("name", ACCEPTED_ONCE)
def test_what_only_looks_like_the_right_type(name: str) -> None:
    with pytest.raises(ValueError, match=r"^\[\w+\] .*(must|needs) .*; got"):
        ACCEPTED_ONCE[name]()
