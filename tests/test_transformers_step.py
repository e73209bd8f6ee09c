"""The recipe for a whole step in docs/how-to/hugging-face.md: layers compiled one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.fx import GraphModule, Node

pytest.importorskip("transformers")

from transformers import masking_utils
from transformers.masking_utils import create_causal_mask
from transformers.models.qwen3_moe import modeling_qwen3_moe

from fp8moe_cutlass.integrations import transformers as fp8moe
from transformers_models import model_of, tokens
from transformers_step import sgd
from transformers_variants import FULL, SgdInBackward

LENGTH = 16
IDS = tokens(2, LENGTH)
POSITIONS = torch.arange(LENGTH).repeat(2, 1)


def padded(at: slice) -> Tensor:
    mask = torch.ones_like(IDS)
    mask[0, at] = 0
    return mask


def packed() -> Tensor:
    """The first row is two sequences."""
    found = POSITIONS.clone()
    found[0, 9:] -= 9
    return found


BATCHES: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "a mask of ones": {"attention_mask": torch.ones_like(IDS)},
    "padded on the right": {"attention_mask": padded(slice(-5, None))},
    "padded on the left": {"attention_mask": padded(slice(0, 5))},
    "packed": {"position_ids": packed()},
}


@pytest.fixture
def dense() -> Callable[[str], Any]:
    """Makes a float32 model without experts, by its attention: what is left is exact."""
    torch._dynamo.reset()

    def made(attention: str) -> Any:
        sizes: dict[str, Any] = {"num_hidden_layers": 2, "mlp_only_layers": [0, 1]}
        model = model_of("Qwen3Moe", **sizes, intermediate_size=64)
        model.set_attn_implementation(attention)
        return model

    return made


def loss_and_grad(model: Any, **batch: Tensor) -> tuple[Tensor, Tensor]:
    """Of the tokens that count: padding has no label, nor has the token behind it, which padding
    would predict."""
    labels = IDS.clone()
    mask = batch.get("attention_mask", torch.ones_like(IDS))
    labels[mask == 0] = -100
    labels[:, 1:][mask[:, :-1] == 0] = -100
    model.zero_grad()
    loss = model(input_ids=IDS, labels=labels, use_cache=False, **batch).loss
    loss.backward()
    return loss.detach(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()


def test_attention_of_compiled_layers_is_right(
    dense: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain, padded and packed batches, beside "eager" attention; a batch without a mask stays
    without one, and layers share their graphs."""
    exact, compiled = dense("eager"), dense("sdpa")
    masks: list[bool] = []

    def create(**given: Any) -> Any:
        mask = create_causal_mask(**given)
        masks.append(mask is not None)
        return mask

    for layer in compiled.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    counters.clear()
    found = {}
    for name, batch in BATCHES.items():
        with monkeypatch.context() as patched:
            patched.setattr(modeling_qwen3_moe, "create_causal_mask", create)
            loss, grad = loss_and_grad(compiled, **batch)
        want, want_grad = loss_and_grad(exact, **batch)
        assert loss == pytest.approx(float(want), abs=1e-5), name
        assert torch.allclose(grad, want_grad, atol=1e-6, rtol=1e-4), name
        found[name] = float(loss)
    assert masks == [name not in ("plain", "a mask of ones") for name in BATCHES]
    assert counters["stats"]["unique_graphs"] == 3  # with no mask; padded; packed
    # They differ from a batch whose mask is lost, for the check above to say something.
    assert abs(found["packed"] - found["plain"]) > 1e-4


def test_full_batches_have_no_mask_or_are_refused(
    dense: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention of a captured step. A capture cannot read what a batch is; the steps before it
    refuse what the captured one would get wrong."""
    exact, model = dense("sdpa"), dense(FULL)
    want = loss_and_grad(exact)
    for capturing in (False, True):
        with monkeypatch.context() as patched:
            patched.setattr(masking_utils, "is_tracing", lambda _, yes=capturing: yes)
            patched.setattr(torch.cuda, "is_available", lambda: True)
            patched.setattr(torch.cuda, "is_current_stream_capturing", lambda yes=capturing: yes)
            got = loss_and_grad(model)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for name in ("padded on the left", "padded on the right", "packed"):
        with pytest.raises(ValueError, match=r"\[full batches\].* full sequences; got"):
            loss_and_grad(model, **BATCHES[name])


def test_sgd_in_backward_is_sgd(dense: Callable[[str], Any]) -> None:
    """And leaves no gradient behind."""
    one, other = dense("sdpa"), dense("sdpa")
    loss_and_grad(one)
    sgd(one.parameters()).step()
    hooks = SgdInBackward(list(other.parameters()))
    other(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert b.grad is None
    hooks.end()
    loss_and_grad(other)


def through(node: Node) -> Node:
    """What a view is of."""
    while node.target in (torch.ops.aten.view.default, torch.ops.aten.reshape.default):
        [node, _] = node.args  # type: ignore[assignment]
    return node


def test_nothing_copies_beside_the_experts() -> None:
    """In a compiled layer x and the output are views, weights are the parameters, and their
    gradients leave the graph as they are. What is cast is [T, S]."""
    torch._dynamo.reset()
    fp8moe.register()
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, _: Any) -> GraphModule:
        graphs.append(graph)
        return graph

    model = model_of("Qwen3Moe", dtype=torch.bfloat16, num_hidden_layers=1)
    model.set_experts_implementation("fp8moe")
    [layer] = model.model.layers
    layer.compile(backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    forward, backward = graphs
    ops = torch.ops.fp8moe
    [experts] = [n for n in forward.graph.nodes if n.target == ops.experts.default]
    x, ids, probs, _, *weights = experts.args[:6]
    assert through(x).target == torch.ops.aten.mul.Tensor  # of the norm
    assert all(w.op == "placeholder" for w in weights)
    wide = x.meta["val"].numel()
    for narrow in (ids, probs):
        assert narrow.meta["val"].numel() < wide / 16
    out = next(u for u in experts.users if u.args[1] == 0)
    [user] = out.users
    [user] = user.users if user.target == torch.ops.aten.view.default else [user]
    assert user.target == torch.ops.aten.add.Tensor  # the residual
    [experts] = [n for n in backward.graph.nodes if n.target == ops.experts_backward.default]
    assert through(experts.args[0]).op == "placeholder"
    for grad in experts.users:
        if grad.args[1] in (2, 3):
            assert [u.op for u in grad.users] == ["output"]
    copies = (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
    for node in backward.graph.nodes:
        if node.target in copies:
            assert experts not in {through(a) for a in node.args if isinstance(a, Node)}
