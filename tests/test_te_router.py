"""integrations.transformer_engine's router functions against their formulas in float64 loops."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8moe_cutlass.integrations import transformer_engine as te

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)

T, E, K = 37, 12, 4
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


def scores_of(row: Tensor, score_function: str) -> Tensor:
    if score_function == "softmax":
        return row.softmax(0)
    if score_function == "sigmoid":
        return row.sigmoid()
    return torch.nn.functional.softplus(row).sqrt()


def top(values: Tensor, k: int) -> list[int]:
    """Of equal values the lower index first."""
    return sorted(range(len(values)), key=lambda i: (-float(values[i].detach()), i))[:k]


def topk_by_loop(logits: Tensor, k: int, score_function: str, **how: Any) -> tuple[Tensor, Tensor]:
    """probs and routing map, token by token."""
    probs, chosen = [], torch.zeros(logits.shape, dtype=torch.bool)
    pre, bias, groups = how.get("pre"), how.get("bias"), how.get("groups")
    for t, row in enumerate(logits):
        after = score_function == "softmax" and not pre
        scores = row if after else scores_of(row, score_function)
        compared = scores if bias is None else scores + bias
        if groups is not None:
            count, best = groups
            parts = compared.view(count, -1)
            sums = torch.stack([p[top(p, k // best)].sum() for p in parts])
            open_ = set(top(sums, best))
            shut = [e for e in range(len(row)) if e // parts.shape[1] not in open_]
            compared = compared.clone()
            compared[shut] = -torch.inf
        ids = top(compared, k)
        weights = scores[ids].softmax(0) if after else scores[ids]
        if score_function != "softmax" and k > 1:
            weights = weights / (weights.sum() + 1e-20)
        weights = weights * (how.get("scale") or 1.0)
        probs.append(torch.zeros_like(row).scatter(0, torch.tensor(ids), weights))
        chosen[t, ids] = True
    return torch.stack(probs), chosen


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "softmax of the chosen": ("softmax", K, {}),
    "softmax first": ("softmax", K, {"pre": True}),
    "softmax, groups": ("softmax", K, {"pre": True, "groups": (4, 2)}),
    "sigmoid": ("sigmoid", K, {"scale": 2.5}),
    "sigmoid, top 1": ("sigmoid", 1, {}),
    "sigmoid, bias, groups": ("sigmoid", K, {"bias": True, "groups": (3, 2), "scale": 2.5}),
    "sqrtsoftplus, bias": ("sqrtsoftplus", K, {"bias": True}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_topk(case: str, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    score_function, k, how = CASES[case]
    logits = torch.randn(T, E).to(dtype)
    bias = torch.randn(E) if how.get("bias") else None
    groups = how.get("groups") or (None, None)
    leaf = logits.clone().to(device).requires_grad_()
    probs, chosen = te.fused_topk_with_score_function(
        leaf, k, bool(how.get("pre")), *groups, how.get("scale"), score_function,
        None if bias is None else bias.to(device),
    )  # fmt: skip
    exact = logits.double().requires_grad_()
    given = {**how, "bias": None if bias is None else bias.double()}
    want, map_ = topk_by_loop(exact, k, score_function, **given)
    assert torch.equal(chosen.cpu(), map_)
    assert probs.dtype == dtype
    rounding = {"rtol": 2e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 5e-3, "atol": 0}
    torch.testing.assert_close(probs.detach().cpu().double(), want.detach(), **rounding)
    dout = torch.randn(T, E, dtype=torch.float64)
    probs.backward(dout.to(device, dtype))
    want.backward(dout)
    error = (leaf.grad.cpu().double() - exact.grad).norm() / exact.grad.norm().clamp(min=1e-9)
    assert error < (1e-6 if dtype == torch.float32 else 1e-2)


def test_indices_and_shapes(device: str) -> None:
    """A buffer for the experts takes the map's place; leading sizes are kept; no tokens."""
    logits = torch.randn(5, 7, E, device=device)
    probs, chosen = te.fused_topk_with_score_function(
        logits, K, True, None, None, None, "softmax", None
    )
    assert probs.shape == chosen.shape == logits.shape
    for dtype in (torch.int32, torch.int64):
        buffer = torch.empty(35, K, dtype=dtype, device=device)
        same, ids = te.fused_topk_with_score_function(
            logits, K, True, None, None, None, "softmax", None, "bytemap", buffer
        )
        assert ids is buffer
        assert torch.equal(same, probs)
        made = torch.zeros(35, E, dtype=torch.bool, device=device).scatter(1, ids.long(), True)
        assert torch.equal(made.view(chosen.shape), chosen)
    none = te.fused_topk_with_score_function(logits[:0], K, True, None, None, None, "softmax", None)
    assert [t.shape for t in none] == [(0, 7, E)] * 2


@pytest.mark.parametrize("score_function", SCORES)
def test_scores_of_the_loss(score_function: str, device: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(T, E)
    leaf = logits.clone().to(device).requires_grad_()
    chosen, scores = te.fused_compute_score_for_moe_aux_loss(leaf, K, score_function)
    exact = logits.double().requires_grad_()
    rows = [scores_of(row, score_function) for row in exact]
    want = torch.stack([row / (row.sum() + 1e-20) for row in rows])
    for t, row in enumerate(rows):
        assert set(chosen[t].nonzero().flatten().tolist()) == set(top(row, K))
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.detach().cpu().double(), want.detach(), rtol=2e-6, atol=1e-7)
    dout = torch.randn(T, E, dtype=torch.float64)
    scores.backward(dout.to(device, torch.float32))
    want.backward(dout)
    assert (leaf.grad.cpu().double() - exact.grad).norm() / exact.grad.norm() < 1e-6


@pytest.mark.parametrize("counts", [torch.int32, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_aux_loss(dtype: torch.dtype, counts: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    probs = torch.rand(T, E).to(device, dtype).requires_grad_()
    per_expert = torch.randint(0, 30, (E,)).to(device, counts)
    exact = probs.detach().cpu().double().requires_grad_()
    want = torch.zeros((), dtype=torch.float64)
    for e in range(E):
        want = want + exact[:, e].sum() * float(per_expert[e])
    want = want * (E * 0.01 / (K * 2 * T * 2 * T))
    want.backward()
    for total in (2 * T, torch.tensor(2 * T, device=device)):
        probs.grad = None
        loss = te.fused_moe_aux_loss(probs, per_expert, total, E, K, 0.01)
        assert (loss.dtype, loss.shape) == (dtype, ())
        tolerance = 1e-6 if dtype == torch.float32 else 5e-3
        torch.testing.assert_close(loss.item(), want.item(), rtol=tolerance, atol=0)
        loss.backward()
        torch.testing.assert_close(probs.grad.cpu().double(), exact.grad, rtol=tolerance, atol=0)


def test_aux_loss_of_many_tokens_by_numpy(device: str) -> None:
    probs, counts = torch.rand(T, E, device=device), torch.full((E,), 65536 * K // E, device=device)
    want = te.fused_moe_aux_loss(probs, counts, 65536, E, K, 0.01)
    got = te.fused_moe_aux_loss(probs, counts, np.int32(65536), np.int32(E), np.int32(K), 0.01)
    assert got.item() == want.item() > 0


def test_routing_map_format_is_a_name_or_a_member(device: str) -> None:
    class RoutingMapFormat(enum.Enum):
        BYTEMAP = 0
        BITMAP_U8 = 1

    logits = torch.randn(T, E, device=device)
    arguments: tuple[Any, ...] = (logits, K, True, None, None, None, "softmax", None)
    want = te.fused_topk_with_score_function(*arguments)[1]
    assert want.sum().item() == T * K
    for given in ("bytemap", RoutingMapFormat.BYTEMAP, 0):
        assert torch.equal(te.fused_topk_with_score_function(*arguments, given)[1], want)
    for given in ("bitmap_u8", RoutingMapFormat.BITMAP_U8, 1, None):
        with pytest.raises(ValueError, match="routing_map_format must be 'bytemap'"):
            te.fused_topk_with_score_function(*arguments, given)


def test_refusals(device: str) -> None:
    logits = torch.randn(T, E, device=device)
    base: tuple[Any, ...] = (logits, K, True, None, None, None, "softmax", None)

    def refused(match: str, call: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=match):
            call(*args, **kwargs)

    topk = te.fused_topk_with_score_function
    refused("must be 'bytemap'; got 'bitmap_u8'", topk, *base, "bitmap_u8")
    refused("quantile balancing is not supported", topk, *base, qb_histogram=logits)
    refused("must be one of softmax, sigmoid", topk, *base[:6], "tanh", None)
    refused("got 'softmax'", topk, *base[:7], torch.zeros(E, device=device))
    refused("float16 or bfloat16; got torch.float64", topk, logits.double(), *base[1:])
    score = te.fused_compute_score_for_moe_aux_loss
    refused("must be 'bytemap'", score, logits, K, "sigmoid", 1)
