"""FP8 weights without hidden state: a forward multiplies what its parameters hold, however that was
written; reuse is a value, and says so when the parameters change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters
from torch.optim import optimizer as optimizers

from fp8moe_cutlass.autograd import Fp8Weights, Options, experts, quantize_weights
from fp8moe_cutlass.nn import MoE, MoEExperts, Router, reuse, reuse_fp8_weights

E, H, I, T = 2, 128, 128, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "save": {},
    "recompute": {"transposed_weights": "recompute"},
    "recompute_z": {"preactivation": "recompute"},
    "fp8_z": {"preactivation": "save_fp8"},
}


def layer_of(**options: Any) -> MoEExperts:
    torch.manual_seed(0)
    return MoEExperts(E, H, I, dtype=torch.float32, **options)


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    idx = torch.rand(T, E, generator=g).topk(2).indices
    return torch.randn(T, H, generator=g), idx, torch.rand(T, 2, generator=g)


BATCH = batch()


def step(layer: MoEExperts, run: Any = None, **call: Any) -> list[Tensor]:
    """Output and gradients of one forward and backward."""
    x, idx, probs = BATCH
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = (layer if run is None else run)(x, idx, probs, **call)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(w.grad for w in layer.parameters())]


def fresh(layer: MoEExperts, **options: Any) -> list[Tensor]:
    """The step of a new layer with the same parameters."""
    other = layer_of(**options)
    with torch.no_grad():
        for mine, its in zip(other.parameters(), layer.parameters(), strict=True):
            mine.copy_(its)
    return step(other)


def equal(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


# ---- every way to write a parameter -------------------------------------------------------------


def adamw(layer: MoEExperts, **how: Any) -> None:
    for w in layer.parameters():
        w.grad = torch.ones_like(w)
    torch.optim.AdamW(layer.parameters(), lr=0.01, **how).step()


@torch.no_grad()
def in_place(layer: MoEExperts) -> None:
    layer.down_proj.mul_(1.5)


@torch.no_grad()
def foreach(layer: MoEExperts) -> None:
    torch._foreach_mul_(list(layer.parameters()), 1.5)


def adamw_foreach(layer: MoEExperts) -> None:
    adamw(layer, foreach=True)


def adamw_fused(layer: MoEExperts) -> None:
    adamw(layer, fused=True)


def data_in_place(layer: MoEExperts) -> None:  # PEFT's merge, an EMA, many loaders
    layer.down_proj.data.mul_(1.5)


def data_replaced(layer: MoEExperts) -> None:
    layer.down_proj.data = layer.down_proj.data * 1.5


def new_parameter(layer: MoEExperts) -> None:
    layer.down_proj = nn.Parameter(layer.down_proj.detach() * 1.5)


def swap_tensors(layer: MoEExperts) -> None:
    layer.zero_grad()
    torch.utils.swap_tensors(layer.down_proj, nn.Parameter(layer.down_proj.detach() * 1.5))


def load(layer: MoEExperts) -> None:
    layer.load_state_dict({k: v * 1.5 for k, v in layer.state_dict().items()})


def load_assign(layer: MoEExperts) -> None:
    layer.load_state_dict({k: v * 1.5 for k, v in layer.state_dict().items()}, assign=True)


def numpy(layer: MoEExperts) -> None:
    layer.down_proj.detach().numpy()[:] *= 1.5


def flat_buffer(layer: MoEExperts) -> None:
    buffer, at = torch.cat([w.detach().flatten() for w in layer.parameters()]), 0
    for w in layer.parameters():
        w.data = buffer[at : at + w.numel()].view_as(w)
        at += w.numel()
    with torch.no_grad():
        layer(*BATCH)
    buffer.mul_(1.5)


@torch.inference_mode()
def inference_mode(layer: MoEExperts) -> None:
    layer.down_proj.mul_(1.5)


def vector(layer: MoEExperts) -> None:
    flat = parameters_to_vector(layer.parameters()).detach()
    vector_to_parameters(flat * 1.5, layer.parameters())


WRITES: list[Callable[[MoEExperts], None]] = [
    *(in_place, foreach, adamw_foreach, adamw_fused, data_in_place, data_replaced, new_parameter),
    *(swap_tensors, load, load_assign, numpy, flat_buffer, inference_mode, vector),
]
UNSEEN = (adamw_fused, data_in_place, numpy)  # they count no version
EVERY_WRITE = pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)


@pytest.fixture(
    scope="module",
    params=[
        *(("eager", name) for name in OPTIONS),
        *(("aot_eager", name) for name in OPTIONS),
        pytest.param(("inductor", "save"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def running(request: pytest.FixtureRequest) -> Any:
    """A layer and the way to call it: compiled once for all writes."""
    backend, name = request.param
    torch._dynamo.reset()
    layer = layer_of(**OPTIONS[name])
    run = layer if backend == "eager" else torch.compile(layer, backend=backend, fullgraph=True)
    return layer, run, OPTIONS[name]


@EVERY_WRITE
def test_the_next_forward_multiplies_what_was_written(
    running: Any, write: Callable[[MoEExperts], None]
) -> None:
    layer, run, options = running
    layer.load_state_dict(layer_of().state_dict())
    before = step(layer, run)
    write(layer)
    got = step(layer, run)
    assert not torch.equal(before[0], got[0])
    assert equal(got, fresh(layer, **options))


@pytest.mark.parametrize("name", OPTIONS)
@EVERY_WRITE
def test_a_write_between_forward_and_backward(
    name: str, write: Callable[[MoEExperts], None]
) -> None:
    """Saved codes are the forward's; a saved parameter raises what nn.Linear does where a version
    shows the write, and is otherwise the parameter."""
    layer = layer_of(**OPTIONS[name])
    want = fresh(layer, **OPTIONS[name])[1]
    x, idx, probs = BATCH
    x = x.clone().requires_grad_()
    out = layer(x, idx, probs)
    if write is swap_tensors and name == "recompute":
        with pytest.raises(RuntimeError):  # as of every tensor that is saved
            write(layer)
        return
    write(layer)
    loss = out.square().sum()
    counted = write not in (*UNSEEN, data_replaced, new_parameter, load_assign, vector, flat_buffer)
    if name == "recompute" and counted:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, x)
    else:
        dx = torch.autograd.grad(loss, x)[0]
        moved = name == "recompute" and write in (*UNSEEN, flat_buffer, data_replaced, vector)
        assert torch.equal(dx, want) != moved


@EVERY_WRITE
def test_a_write_inside_reuse_raises_by_name(write: Callable[[MoEExperts], None]) -> None:
    layer = layer_of()
    net = nn.ModuleDict({"moe": layer})

    def inside(check: bool, use: bool) -> None:
        with reuse_fp8_weights(net, check=check):
            layer(*BATCH)
            write(layer)
            if use:
                layer(*BATCH)

    message = r"parameters must stay as they are inside.*; got moe\.(down|gate_up)_proj, which"
    for use in (False, True):  # in the next forward, or at the end
        with pytest.raises(RuntimeError, match=message):
            inside(True, use)
        if write in UNSEEN:
            inside(False, use)
        else:
            with pytest.raises(RuntimeError, match=message):
                inside(False, use)
    assert equal(step(layer), fresh(layer))


FOREIGN_WRITES: list[Callable[[Tensor], Any]] = [
    lambda w: w.detach().mul_(1.5),
    lambda w: w.data.mul_(1.5),
    lambda w: w.detach().numpy().__imul__(1.5),
]


@pytest.mark.parametrize("write", FOREIGN_WRITES, ids=["in_place", "data", "numpy"])
def test_experts_over_two_foreign_tensors(write: Callable[[Tensor], Any]) -> None:
    layer = layer_of()
    gate_up, down = (w.detach().clone().requires_grad_() for w in layer.parameters())
    x, idx, probs = BATCH

    def run(transposed_weights: str = "save", **how: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        options = Options(transposed_weights=transposed_weights)
        out = experts(leaf, idx, probs, gate_up, down, options, **how)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [leaf, gate_up, down])]

    assert equal(run(), step(layer))
    held = quantize_weights(gate_up, down)
    with torch.no_grad():
        for w in (gate_up, down):
            write(w)
        for mine, its in zip(layer.parameters(), (gate_up, down), strict=True):
            mine.copy_(its)
    want = step(layer)
    for transposed in ("save", "recompute"):
        assert equal(run(transposed_weights=transposed), want)
    assert equal(run(weights=held), step(layer_of()))
    with pytest.raises(ValueError, match=r"\[quantize_weights\] gate_up must be \[E, 2I, H\]"):
        quantize_weights(down, gate_up)


# ---- training -----------------------------------------------------------------------------------

TRAINING: dict[str, dict[str, Any]] = {
    "foreach": {"optimizer": {"foreach": True}},
    "fused": {"optimizer": {"fused": True}},
    "compiled_step": {"optimizer": {"foreach": True, "capturable": False}, "compile_step": True},
    "microbatches": {"microbatches": 3},
    "microbatches_reused": {"microbatches": 3, "reuse": True},
    "checkpointed": {"checkpoint": True},
    "recompute": {"options": OPTIONS["recompute"]},
    "recompute_reused": {"options": OPTIONS["recompute"], "microbatches": 3, "reuse": True},
    "recompute_z": {"options": OPTIONS["recompute_z"]},
    "fp8_z": {"options": OPTIONS["fp8_z"]},
}


def train(
    make: Callable[[MoEExperts], Any],
    options: dict[str, Any],
    optimizer: dict[str, Any],
    microbatches: int,
    reuse: bool,
    checkpoint: bool,
    compile_step: bool,
    steps: int = 20,
) -> list[float]:
    """Losses; `make(layer)` gives the way to call the layer in each step."""
    layer = layer_of(**options)
    adamw = torch.optim.AdamW(layer.parameters(), lr=3e-2, **optimizer)
    update = torch.compile(adamw.step, backend="aot_eager") if compile_step else adamw.step
    losses = []
    for n in range(steps):
        run = make(layer)
        adamw.zero_grad(set_to_none=False)
        scope = reuse_fp8_weights(layer, check=True) if reuse else torch.enable_grad()
        with scope:
            for m in range(microbatches):
                args = batch(m)
                if checkpoint:
                    out = torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)
                else:
                    out = run(*args)
                loss = (out - args[0]).square().mean()
                loss.backward()
                losses.append(loss.item())
        with torch._dynamo.config.patch(error_on_recompile=compile_step and n > 1):
            update()  # nothing of this library makes a step recompile
    return losses


@pytest.mark.parametrize("name", TRAINING)
def test_twenty_steps_compiled_equal_eager(name: str) -> None:
    """A new eager layer in each step is what both are compared with."""
    torch._dynamo.reset()
    how = {
        **{"options": {}, "optimizer": {"fused": True}, "microbatches": 1},
        **{"reuse": False, "checkpoint": False, "compile_step": False},
        **TRAINING[name],
    }
    compiled: dict[int, Any] = {}

    def new(layer: MoEExperts) -> Any:
        other = layer_of(**how["options"])
        other.gate_up_proj, other.down_proj = layer.gate_up_proj, layer.down_proj
        return other

    def once(layer: MoEExperts) -> Any:
        if id(layer) not in compiled:
            compiled[id(layer)] = torch.compile(layer, backend="aot_eager", fullgraph=True)
        return compiled[id(layer)]

    plain = {**how, "reuse": False, "checkpoint": False}
    want = train(new, **plain)
    assert len(set(want)) == len(want)
    assert train(lambda layer: layer, **how) == want
    if not how["checkpoint"]:  # test_nn_compile.py has it, and what it needs
        assert train(once, **how) == want


def test_reuse_compiles_one_graph_more() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = layer_of()
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    want = fresh(layer)
    assert equal(step(layer, run), want)
    for _ in range(3):
        with reuse_fp8_weights(layer):
            assert equal(step(layer, run), want)
            assert equal(step(layer, run), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    for _ in range(3):
        assert equal(step(layer, run, weights=layer.quantize_weights()), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3

    def compiled_reads_old_codes() -> None:
        with reuse_fp8_weights(layer):
            in_place(layer)
            step(layer, run)

    with pytest.raises(RuntimeError, match="got down_proj, which has been written"):
        compiled_reads_old_codes()


# ---- values -------------------------------------------------------------------------------------


def codes(weights: Fp8Weights) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(weights)
    assert len(leaves) in (4, 8)
    return [t.view(torch.uint8) for t in leaves]


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_are_a_value(name: str) -> None:
    layer = layer_of(**OPTIONS[name])
    want, weights = fresh(layer, **OPTIONS[name]), layer.quantize_weights()
    assert (weights.down_t is None) == (name == "recompute")
    in_place(layer)
    for held in (
        weights,
        copy.deepcopy(weights),
        torch.utils._pytree.tree_map(torch.clone, weights),
    ):
        assert equal(step(layer, weights=held)[:2], want[:2])
    with torch.no_grad():
        half = layer_of(**OPTIONS[name]).quantize_weights()
    assert half.gate_up_t is None
    assert equal(step(layer, weights=half)[:2], want[:2])  # turned from the codes
    weights.update_(layer)
    assert equal(codes(weights), codes(layer.quantize_weights()))
    assert equal(step(layer, weights=weights), fresh(layer, **OPTIONS[name]))


def test_a_moe_takes_weights() -> None:
    moe, x = MoE(Router(H, E, 2), MoEExperts(E, H, I)), torch.randn(T, H)
    weights = moe.experts.quantize_weights()
    in_place(moe.experts)
    with torch.no_grad():
        want = moe(x)
        assert not torch.equal(moe(x, weights=weights), want)
        weights.update_(moe.experts)
        assert torch.equal(moe(x, weights=weights), want)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = layer_of()

    def forward(self, *args: Tensor) -> Tensor:
        return self.experts(*args)


class GivenWeights(Net):
    def forward(self, *args: Any) -> Tensor:
        *tensors, weights = args
        return self.experts(*tensors, weights=weights)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_takes_weights(strict: bool) -> None:
    net = GivenWeights()
    program = torch.export.export(net, (*BATCH, net.experts.quantize_weights()), strict=strict)
    in_place(net.experts)
    weights = net.experts.quantize_weights()
    assert torch.equal(program.module()(*BATCH, weights), net.experts(*BATCH))
    spec = torch.utils._pytree.tree_structure(weights)  # as torch.export.save writes it
    text = torch.utils._pytree.treespec_dumps(spec)
    assert torch.utils._pytree.treespec_loads(text) == spec


def test_an_update_before_the_backward_raises() -> None:
    layer = layer_of()
    weights = layer.quantize_weights()
    out = layer(*BATCH, weights=weights)
    weights.update_(layer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_no_forward_leaves_behind() -> None:
    """No buffer, no attribute, no hook of an optimizer."""
    layer = layer_of()
    before = dict(vars(layer))
    step(layer)
    with torch.no_grad():
        layer(*BATCH)
    assert {k: v for k, v in vars(layer).items() if k != "_parameters"} == {
        k: v for k, v in before.items() if k != "_parameters"
    }
    assert not list(layer.buffers())
    assert not optimizers._global_optimizer_post_hooks
    with reuse_fp8_weights(layer):
        assert equal(step(copy.deepcopy(layer)), fresh(layer))
        inside = dict(vars(layer))
        step(layer)
        assert vars(layer) == inside
    assert layer._reused is None


def test_what_reuse_refuses() -> None:
    layer = layer_of()

    def enter(module: nn.Module, then: Callable[[], Any] = lambda: None) -> None:
        with reuse_fp8_weights(module):
            then()

    with pytest.raises(ValueError, match="must contain a MoEExperts; got Linear"):
        enter(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="got one that is inside already"):
        enter(layer, lambda: enter(layer))
    enter(layer_of(recipe=None))
    with pytest.raises(ZeroDivisionError):  # not the parameter's change, which comes later
        enter(layer, lambda: (in_place(layer), 1 / 0))
    assert equal(step(layer), fresh(layer))


@pytest.mark.parametrize("began", [False, True])
def test_a_capture_of_a_part_of_a_scope_is_refused(
    began: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph would read FP8 weights that the scope frees, or what no replay has made yet."""
    capturing = began
    monkeypatch.setattr(reuse, "capturing", lambda device: capturing)
    layer = layer_of()
    with pytest.raises(RuntimeError, match="keep the value as long as the graph; got MoEExperts"):  # noqa: PT012, SIM117
        with reuse_fp8_weights(layer):
            want = layer(*BATCH)
            assert torch.equal(layer(*BATCH), want)
            capturing = not began
            layer(*BATCH)
    weights = layer.quantize_weights()
    assert torch.equal(layer(*BATCH, weights=weights), want)


def test_check_waits_for_the_stream_that_wrote_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    waited: list[Fp8Weights] = []
    with reuse_fp8_weights(layer, check=True):
        layer(*BATCH)  # after which only check waits
        monkeypatch.setattr(Fp8Weights, "wait", lambda weights: waited.append(weights))
    assert waited


class Subclass(MoEExperts):
    """A layer with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(E, H, I, dtype=torch.float32)
        self.gain = nn.Parameter(torch.ones(()))


def test_reuse_looks_at_the_two_weights_by_name() -> None:
    layer = Subclass()
    with reuse_fp8_weights(layer):
        layer(*BATCH)

    def replaced_inside() -> None:
        with reuse_fp8_weights(layer):
            layer.down_proj = nn.Parameter(layer.down_proj.detach().clone())
            layer(*BATCH)

    with pytest.raises(RuntimeError, match="got down_proj, which is another tensor"):
        replaced_inside()


@pytest.mark.parametrize("when", ["before", "inside"])
def test_reuse_leaves_computed_weights_alone(when: str) -> None:
    """As PEFT's target_parameters, which computes them for the time of a forward."""
    net = nn.ModuleList([layer_of(), layer_of()])

    def parametrized() -> None:
        parametrize.register_parametrization(net[0], "down_proj", Scaled())

    if when == "before":
        parametrized()
    with reuse_fp8_weights(net, check=True):
        if when == "inside":
            parametrized()
        got, other = net[0](*BATCH), net[1](*BATCH)
    assert torch.equal(got, net[0](*BATCH))
    assert torch.equal(other, net[1](*BATCH))
    assert not torch.equal(got, other)


@pytest.mark.parametrize("compiled", [False, True])
def test_reuse_stands_for_no_other_parameters(compiled: bool) -> None:
    torch._dynamo.reset()
    layer = layer_of()
    others = {name: w.detach() * 2 for name, w in layer.named_parameters()}

    def call() -> Tensor:
        return torch.func.functional_call(layer, others, BATCH)

    run = torch.compile(call, backend="aot_eager") if compiled else call
    want = run()
    with reuse_fp8_weights(layer):
        assert torch.equal(run(), want)


def test_weights_of_another_kind_are_refused() -> None:
    layer, weights = layer_of(), layer_of().quantize_weights()
    for other, message in (
        (layer_of(recipe=None), "must have an FP8 recipe; got recipe=None"),
        (MoEExperts(E, H, 2 * I), r"gate_up must have \(shape, device, format\)"),
    ):
        with pytest.raises(ValueError, match=message):
            other(*BATCH, weights=weights)
        with pytest.raises(ValueError, match=message):
            weights.update_(other)
    with pytest.raises(ValueError, match=r"weights must be Fp8Weights; got .*Fp8Tensor"):
        layer(*BATCH, weights=weights.down)
    with pytest.raises(ValueError, match="must have an FP8 recipe; got None"):
        layer_of(recipe=None).quantize_weights()


# ---- computed weights, merged adapters, averages ------------------------------------------------


class Scaled(nn.Module):
    """A low-rank adapter on each expert, as PEFT's target_parameters computes weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(E, H, 2)), nn.Parameter(torch.ones(E, 2, I) / 50)
        self.on = True

    def forward(self, w: Tensor) -> Tensor:
        return w + self.a @ self.b if self.on else w


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", OPTIONS)
def test_computed_weights_in_any_order(name: str, backend: str) -> None:
    """DPO's and GRPO's: with the adapter, without it under no_grad, then backward; and two
    microbatches before their backwards."""
    torch._dynamo.reset()
    grads = []
    for order in ("apart", "together"):
        layer = layer_of(**OPTIONS[name])
        parametrize.register_parametrization(layer, "down_proj", Scaled())
        adapter = layer.parametrizations.down_proj[0]
        traced = backend != "eager" and order == "together"
        run = torch.compile(layer, backend=backend, fullgraph=True) if traced else layer
        outs = []
        for seed in (0, 1):
            args = batch(seed)
            outs.append(run(*args))
            adapter.on = False
            with torch.no_grad():
                assert not torch.equal(run(*args), outs[-1])
            adapter.on = True
            if order == "apart":
                outs.pop().square().sum().backward()
        for out in outs:
            out.square().sum().backward()
        grads.append([w.grad for w in layer.parameters()])
    assert equal(*grads)


def test_a_merged_adapter_and_an_average_are_multiplied() -> None:
    """PEFT's merge and unmerge, and an EMA's swap, write `param.data` in place."""
    layer, delta = layer_of(), Scaled()
    base = step(layer)
    merged = layer_of()
    with torch.no_grad():
        merged.down_proj.copy_(delta(merged.down_proj))
    layer.down_proj.data += (delta.a @ delta.b).detach()
    assert equal(step(layer), step(merged))
    average = [0.9 * w.detach() for w in layer.parameters()]
    kept = [w.detach().clone() for w in layer.parameters()]
    for w, ema in zip(layer.parameters(), average, strict=True):
        w.data.copy_(ema)
    assert equal(step(layer), fresh(layer))
    for w, own in zip(layer.parameters(), kept, strict=True):
        w.data.copy_(own)
    assert equal(step(layer), step(merged))
    assert not equal(base, step(layer))


def test_peft_itself() -> None:
    peft = pytest.importorskip("peft")
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(
        r=4, target_modules=[], target_parameters=targets, init_lora_weights=False
    )
    net, torch_net = Net(), Net()
    model = peft.get_peft_model(net, config)
    out = model(*BATCH)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(*BATCH), torch_net(*BATCH))
    out.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.merge_adapter()
    with model.disable_adapter(), torch.no_grad():  # it takes the adapter out of the weights
        torch.testing.assert_close(model(*BATCH), torch_net(*BATCH), atol=0.02, rtol=0.02)
    merged = model.merge_and_unload()
    with torch.no_grad():
        fresh_layer = layer_of()
        fresh_layer.load_state_dict(merged.experts.state_dict())
        assert torch.equal(merged(*BATCH), fresh_layer(*BATCH))
        torch.testing.assert_close(merged(*BATCH), out, atol=0.05, rtol=0.05)


def test_optimizer_averages_themselves() -> None:
    layer = layer_of()
    average = torch.optim.swa_utils.AveragedModel(
        layer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    for _ in range(3):
        average.update_parameters(layer)
        assert equal(step(average.module), fresh(average.module))
        adamw_fused(layer)
