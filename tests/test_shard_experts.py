"""nn.shard_experts beside fully_shard and DistributedDataParallel: what one process computes.

Bit-equal to one process: the experts' gradients, times 1/W, where W is a power of two and the rows
are the same. Outputs are sums over ranks of partial sums rounded to bfloat16, so that a model of
several blocks is equal up to these roundings: TOLERANCE. Checkpoints are bit-equal.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import ranks
from fp8moe_cutlass import Fp8Recipe
from fp8moe_cutlass.nn import MoEExperts, clip_grad_norm_, reuse_fp8_weights, shard_experts
from moe_problem import problem
from ranks import Pool, results
from reference import relative_error

E, S, H, I, T = 8, 2, 128, 64, 96  # T: tokens of all ranks
TOLERANCE = 0.02
FP8_AND_BF16 = pytest.mark.parametrize("recipe", [Fp8Recipe(), None], ids=["fp8", "bf16"])
RANKS = pytest.mark.parametrize("ranks", [2, 4])


pool = ranks.pool(4, {1: [2], 2: [1, 3], 3: [0, 2, 3], 4: [0, 1, 2, 3]})


class Net(nn.Module):
    """Two blocks: a Linear, then experts of its output under a given routing."""

    def __init__(self, recipe: Any = Fp8Recipe(), **options: Any) -> None:  # noqa: B008
        super().__init__()
        torch.manual_seed(3)
        options = {"dtype": torch.float32, **options}
        self.linears = nn.ModuleList(nn.Linear(H, H) for _ in range(2))
        self.experts = nn.ModuleList(
            MoEExperts(E, H, I, recipe=recipe, **options) for _ in range(2)
        )

    def forward(self, x: Tensor, idx: Tensor, probs: Tensor) -> Tensor:
        for linear, experts in zip(self.linears, self.experts, strict=True):
            x = x + experts(linear(x), idx, probs)
        return x


def whole(t: Any) -> Tensor:
    found: Tensor = t.full_tensor() if isinstance(t, DTensor) else t
    return found.detach().clone()


def rank_of(group: Any) -> tuple[int, int]:
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def mesh_of(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def parts(ranks: int, uneven: bool) -> list[int]:
    """Tokens of each rank; uneven: one has none."""
    if not uneven or ranks == 1:
        return [T // ranks] * ranks
    return {2: [T, 0], 4: [T // 2, 0, T // 4, T // 4]}[ranks]


def backward(net: nn.Module, group: Any, step: int, uneven: bool = False) -> float:
    """This rank's part of a batch; the loss of all of it. A rank's loss is its share of the mean
    times the number of ranks: the mean over its tokens, where all have as many."""
    rank, ranks = rank_of(group)
    p = problem(T, S, E, H, I, dtype=torch.float32, seed=step)
    mine = [t.split(parts(ranks, uneven))[rank] for t in (p.x, p.topk_idx, p.probs, p.dout)]
    loss = (net(*mine[:3]) - mine[3]).square().sum() * ranks / (T * H)
    loss.backward()
    total = loss.detach().clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return float(total / ranks)


def built(group: Any, how: str = "fully_shard", **options: Any) -> tuple[Any, Any]:
    """The model of this rank and its optimizer."""
    net = Net(**options)
    if group is None:
        return net, torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    shared = shard_experts(net, group)
    if how == "ddp":
        model: Any = nn.parallel.DistributedDataParallel(net, process_group=group)
    else:
        for linear in net.linears:
            fully_shard(linear, mesh=mesh_of(group))
        model = fully_shard(net, mesh=mesh_of(group), ignored_params=shared)
        assert all(isinstance(p, DTensor) for p in net.parameters())
    rest = [p for p in net.parameters() if p not in shared]
    groups = [{"params": rest}, {"params": [p for p in net.parameters() if p in shared]}]
    return model, torch.optim.SGD(groups, lr=0.3, momentum=0.9)


def trained(group: Any, steps: int, uneven: bool, how: str, options: dict[str, Any]) -> Any:
    """Losses, clipped norms and whole weights."""
    net, optimizer = built(group, how, **options)
    losses, norms = [], []
    for step in range(steps):
        losses.append(backward(net, group, step, uneven))
        grads = [whole(p.grad) for p in net.parameters()]
        norm = whole(clip_grad_norm_(net.parameters(), 0.05))
        want = torch.stack([g.norm() for g in grads]).norm()
        torch.testing.assert_close(norm, want)
        for p, g in zip(net.parameters(), grads, strict=True):
            torch.testing.assert_close(whole(p.grad), g * (0.05 / (want + 1e-6)).clamp(max=1.0))
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, [whole(p) for p in net.parameters()]


@FP8_AND_BF16
@RANKS
@pytest.mark.parametrize("how", ["fully_shard", "ddp"])
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "a rank without tokens"])
def test_training_equals_one_process(
    pool: Pool, recipe: Any, ranks: int, how: str, uneven: bool
) -> None:
    options = {"recipe": recipe}
    want = trained(None, 3, False, "", options)
    start = [whole(p) for p in Net(**options).parameters()]
    for losses, norms, weights in results(pool.run(ranks, trained, 3, uneven, how, options)):
        torch.testing.assert_close(losses, want[0], rtol=5e-3, atol=0)
        torch.testing.assert_close(norms, want[1], rtol=TOLERANCE, atol=0)
        for got, its, before in zip(weights, want[2], start, strict=True):
            assert relative_error(got - before, its - before) < TOLERANCE


# ---- ties ---------------------------------------------------------------------------------------


class Tied(Net):
    """A weight of two layers, which another module has too, by two names; and a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[1].down_proj = self.experts[0].down_proj
        self.experts.append(self.experts[0])
        self.linears.append(nn.Linear(H, H))
        self.other = nn.Module()
        self.other.one = self.other.two = self.experts[1].gate_up_proj


def tied(group: Any, how: str) -> list[Tensor]:
    net = Tied()
    count = len(list(net.parameters()))
    if group is None:
        model: Any = net
    else:
        shared = shard_experts(net, group)
        assert len(shared) == 3
        if how == "ddp":
            model = nn.parallel.DistributedDataParallel(net, process_group=group)
        else:
            model = fully_shard(net, mesh=mesh_of(group), ignored_params=shared)
    assert net.experts[1].down_proj is net.experts[0].down_proj
    assert net.other.one is net.other.two is net.experts[1].gate_up_proj
    assert len(list(net.parameters())) == count
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, foreach=False)
    for step in range(2):
        backward(model, group, step)
        optimizer.step()
        optimizer.zero_grad()
    return [whole(p) for p in net.parameters()]


@pytest.mark.parametrize("how", ["fully_shard", "ddp"])
def test_tied_weights_stay_tied(pool: Pool, how: str) -> None:
    start, want = [whole(p) for p in Tied().parameters()], tied(None, "")
    for weights in results(pool.run(2, tied, how)):
        for got, its, before in zip(weights, want, start, strict=True):
            assert relative_error(got - before, its - before) < TOLERANCE


def early(group: Any, recipe: Any, first: bool) -> list[str]:
    """What shard_experts warns of, with an optimizer made before it or after it."""
    net = Net(recipe=recipe)
    made = [torch.optim.SGD(net.parameters())] if first else []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shard_experts(net, group)
    assert all(w.filename == __file__ for w in said)
    made.append(torch.optim.SGD(net.parameters()))
    return [str(w.message) for w in said]


@FP8_AND_BF16
def test_an_optimizer_made_before_is_warned_of(pool: Pool, recipe: Any) -> None:
    for said in results(pool.run(2, early, recipe, True)):
        assert len(said) == 1
        assert "an optimizer made before it trains none of them; make it, and" in said[0]
    assert results(pool.run(2, early, recipe, False)) == [[], []]


# ---- gradients ----------------------------------------------------------------------------------


def gradients(group: Any, options: dict[str, Any], main_grad: bool) -> list[Tensor]:
    """Of one layer's weights, whole, over this rank's tokens."""
    rank, ranks = rank_of(group)
    p = problem(T, S, E, H, I, dtype=options.get("dtype", torch.bfloat16))
    layer = p.experts(**options)
    if group is not None:
        shard_experts(layer, group)
    held = [w.to_local() if isinstance(w, DTensor) else w for w in layer.parameters()]
    if main_grad:
        for w, mine in zip(layer.parameters(), held, strict=True):
            w.main_grad = torch.zeros(mine.shape)
    for _ in range(2):
        part = [t.chunk(ranks)[rank] for t in (p.x, p.topk_idx, p.probs, p.dout)]
        layer(*part[:3]).backward(part[3])
    found = []
    for w in layer.parameters():
        if main_grad:
            assert w.grad is None
            grad = w.main_grad
            if group is not None:
                grad = DTensor.from_local(grad, w.device_mesh, w.placements)
        else:
            grad = w.grad
        found.append(whole(grad))
    return found


GRADIENTS: dict[str, dict[str, Any]] = {
    "fp8": {},
    "columns": {"recipe": Fp8Recipe(columns="column")},
    "fp32 scales": {"recipe": Fp8Recipe(scale="fp32", columns="column")},
    "recompute": {"transposed_weights": "recompute", "preactivation": "recompute"},
    "fp32 weights": {"dtype": torch.float32},
    "bf16": {"recipe": None},
    "biases": {"bias": True},
}


@RANKS
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_averages_to_the_bit(
    pool: Pool, ranks: int, name: str, main_grad: bool
) -> None:
    options = GRADIENTS[name]
    want = gradients(None, options, main_grad)
    for found in results(pool.run(ranks, gradients, options, main_grad)):
        for got, its in zip(found, want, strict=True):
            assert torch.equal(got, its / ranks)


def of_six_experts(group: Any, options: dict[str, Any]) -> list[Tensor]:
    rank, ranks = rank_of(group)
    p = problem(T, S, 6, H, I)
    layer = p.experts(**options)
    if group is not None:
        shard_experts(layer, group)
    part = [t.chunk(ranks)[rank] for t in (p.x, p.topk_idx, p.probs, p.dout)]
    layer(*part[:3]).backward(part[3])
    return [whole(w.grad) for w in layer.parameters()]


@pytest.mark.parametrize("name", ["fp8", "columns", "bf16"])
def test_gradients_on_three_ranks(pool: Pool, name: str) -> None:
    """1/3 is no power of two: one more rounding, of a scale or of the result."""
    want = of_six_experts(None, GRADIENTS[name])
    for found in results(pool.run(3, of_six_experts, GRADIENTS[name])):
        for got, its in zip(found, want, strict=True):
            torch.testing.assert_close(got, its / 3, rtol=2**-7, atol=0)


def replicated_experts(_: Any, main_grad: bool) -> None:
    """A mesh of two dimensions over all four ranks: two replicas of experts shared by two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
    p = problem(T, S, E, H, I, dtype=torch.float32)
    layer, twin = p.experts(), p.experts()
    shard_experts(layer, mesh)
    part = [t.chunk(4)[dist.get_rank()] for t in (p.x, p.topk_idx, p.probs, p.dout)]
    if main_grad:
        for w in layer.parameters():
            w.main_grad = torch.zeros(w.to_local().shape)
    for _ in range(2):
        layer(*part[:3]).backward(part[3])
        twin(p.x, p.topk_idx, p.probs).backward(p.dout)
    for w, its in zip(layer.parameters(), twin.parameters(), strict=True):
        grad = DTensor.from_local(w.main_grad, mesh, w.placements) if main_grad else w.grad
        # Each replica's wgrad quantizes its own tokens in blocks of its own.
        assert relative_error(whole(grad), its.grad / 4) < TOLERANCE


@pytest.mark.parametrize("main_grad", [False, True])
def test_an_expert_group_inside_a_data_parallel_mesh(pool: Pool, main_grad: bool) -> None:
    results(pool.run(4, replicated_experts, main_grad))


def trained_hsdp(group: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
    net = Net()
    fully_shard(net, mesh=mesh, ignored_params=shard_experts(net, mesh))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, foreach=True)  # all of one mesh
    losses = []
    for step in range(2):
        losses.append(backward(net, group, step))
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return losses, [whole(p) for p in net.parameters()]


def test_hybrid_sharding_trains_as_one_process(pool: Pool) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    start, losses = [whole(p) for p in net.parameters()], []
    for step in range(2):
        losses.append(backward(net, None, step))
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    for got, weights in results(pool.run(4, trained_hsdp)):
        torch.testing.assert_close(got, losses, rtol=5e-3, atol=0)
        for a, b, before in zip(weights, net.parameters(), start, strict=True):
            assert relative_error(a - before, b.detach() - before) < TOLERANCE


# ---- one optimizer, torch's own functions -------------------------------------------------------


def torchs_own(group: Any) -> None:
    """All are DTensors of one mesh: a foreach optimizer and torch's clip_grad_norm_ take them."""
    nets = []
    for clip in (nn.utils.clip_grad_norm_, clip_grad_norm_):
        net, _ = built(group)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
        for step in range(2):
            backward(net, group, step)
            clip(net.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        nets.append([whole(p) for p in net.parameters()])
    for one, other in zip(*nets, strict=True):
        torch.testing.assert_close(one, other)


def test_torchs_own_optimizer_and_clipping(pool: Pool) -> None:
    results(pool.run(2, torchs_own))


def accumulated(group: Any) -> None:
    """Two microbatches under reuse are the same two without; and they quantize once."""
    found = []
    for reuse in (False, True):
        net, _ = built(group, "ddp")
        if reuse:
            with reuse_fp8_weights(net, check=True):
                backward(net, group, 0)
                backward(net, group, 1)
        else:
            backward(net, group, 0)
            backward(net, group, 1)
        found.append([whole(p.grad) for p in net.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    with (
        pytest.raises(RuntimeError, match="has been written"),
        reuse_fp8_weights(net),
        torch.no_grad(),
    ):
        net.module.experts[0].down_proj.mul_(2.0)


def test_accumulation_and_reuse(pool: Pool) -> None:
    results(pool.run(2, accumulated))


def frozen(group: Any) -> None:
    net = Net()
    net.experts.requires_grad_(False)
    shared = shard_experts(net, group)
    assert not any(p.requires_grad for p in shared)
    fully_shard(net, mesh=mesh_of(group), ignored_params=shared)
    backward(net, group, 0)
    assert all((p.grad is None) == (p in shared) for p in net.parameters())


def test_frozen_experts(pool: Pool) -> None:
    results(pool.run(2, frozen))


def mixed_precision(group: Any) -> None:
    """fully_shard's policy casts what it gathers; experts are quantized from their own float32."""
    net = Net()
    shared = shard_experts(net, group)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(net, mesh=mesh_of(group), ignored_params=shared, mp_policy=policy)
    seen = []
    net.experts[0].register_forward_pre_hook(lambda m, args: seen.append((m, args[0].dtype)))
    backward(net, group, 0)
    ((module, dtype),) = seen
    assert dtype == torch.bfloat16
    assert module.gate_up_proj.dtype == module.gate_up_proj.grad.dtype == torch.float32
    of_float32 = module.quantize_weights().gate_up.float()
    mine = module.gate_up_proj.to_local()
    assert relative_error(of_float32, mine) < 0.04
    rounded = copy.deepcopy(module)
    with torch.no_grad():
        rounded.gate_up_proj.copy_(module.gate_up_proj.bfloat16().float())
    assert not torch.equal(of_float32, rounded.quantize_weights().gate_up.float())


def test_mixed_precision_quantizes_the_float32_weights(pool: Pool) -> None:
    results(pool.run(2, mixed_precision))


# ---- checkpoints --------------------------------------------------------------------------------


def optimizers(net: nn.Module, shared: Any, two: bool) -> list[torch.optim.Optimizer]:
    if not two:
        return [torch.optim.AdamW(net.parameters(), lr=1e-2)]
    kinds = ([p for p in net.parameters() if (p in shared) is ours] for ours in (False, True))
    return [torch.optim.AdamW(kind, lr=1e-2) for kind in kinds]


def checkpointed(group: Any, two: bool) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    net = Net()
    if rank_of(group)[1] == 1:
        return net, optimizers(net, set(net.experts.parameters()), two)
    shared = shard_experts(net, group)
    fully_shard(net, mesh=mesh_of(group), ignored_params=shared)
    return net, optimizers(net, shared, two)


def one_step(net: nn.Module, opts: list[Any], group: Any, step: int) -> None:
    backward(net, group if rank_of(group)[1] > 1 else None, step)
    for optimizer in opts:
        optimizer.step()
        optimizer.zero_grad()


def everything(net: nn.Module, opts: list[Any]) -> dict[str, Tensor]:
    """Weights and moments by name, whole."""
    found = dict(net.named_parameters())
    names = {p: name for name, p in net.named_parameters()}
    for optimizer in opts:
        for p, state in optimizer.state.items():
            found |= {f"{names[p]}.{k}": v for k, v in state.items()}
    return {name: whole(t) for name, t in found.items()}


def save(group: Any, path: str, two: bool) -> dict[str, Tensor]:
    net, opts = checkpointed(group, two)
    one_step(net, opts, group, 0)
    model, optimizer = get_state_dict(net, opts)
    state = {"model": model, "optimizer": optimizer}
    dcp.save(state, checkpoint_id=path, process_group=group)
    return everything(net, opts)


def load(group: Any, path: str, two: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What was loaded, and what a step more makes of it."""
    net, opts = checkpointed(group, two)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    model, optimizer = get_state_dict(net, opts)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=path, process_group=group)
    set_state_dict(net, opts, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded = everything(net, opts)
    one_step(net, opts, group, 1)
    return loaded, everything(net, opts)


@pytest.mark.parametrize("two", [False, True], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize("of", [1, 2, 4])
def test_checkpoints_of_any_number_of_ranks(pool: Pool, of: int, two: bool, tmp_path: Path) -> None:
    """Saved by some, loaded by others: the same bits; and the next step goes on."""
    path = str(tmp_path / "checkpoint")
    saved = results(pool.run(of, save, path, two))[0]
    assert saved["experts.0.down_proj"].shape == (E, H, I)
    assert saved["experts.0.down_proj.exp_avg"].any()
    after = []
    for by in (1, 2, 4):
        for loaded, then in results(pool.run(by, load, path, two)):
            assert loaded.keys() == saved.keys()
            for name, t in saved.items():
                assert torch.equal(loaded[name], t), name
            after.append(then)
    for then in after[1:]:
        for name, t in after[0].items():
            if t.ndim and name.endswith("exp_avg"):
                assert relative_error(then[name], t) < TOLERANCE, name


def whole_weights(group: Any, _: Any = None) -> None:
    net, opts = checkpointed(group, False)
    one_step(net, opts, group, 0)
    full = StateDictOptions(full_state_dict=True)
    model = get_model_state_dict(net, options=full)
    moments = get_optimizer_state_dict(net, opts, options=full)
    want = everything(net, opts)
    for name, t in model.items():
        assert type(t) is Tensor
        assert torch.equal(t, want[name])
        assert torch.equal(moments["state"][name]["exp_avg"], want[f"{name}.exp_avg"])
    other, _ = checkpointed(group, False)
    set_model_state_dict(other, model, options=full)
    for a, b in zip(other.parameters(), net.parameters(), strict=True):
        assert torch.equal(whole(a), whole(b))


def test_whole_weights_out_and_in(pool: Pool) -> None:
    results(pool.run(4, whole_weights))


def from_meta(group: Any, assign: bool) -> None:
    with torch.device("meta"):
        net = Net()
    shared = shard_experts(net, group)
    fully_shard(net, mesh=mesh_of(group), ignored_params=shared)
    assert all(p.is_meta for p in net.parameters())
    net.to_empty(device="cpu")
    assert net.experts[0].down_proj.to_local().shape == (E // rank_of(group)[1], H, I)
    source = Net()
    for layer, its in zip(net.experts, source.experts, strict=True):
        torch.manual_seed(7)
        layer.reset_parameters()
        torch.manual_seed(7)
        its.reset_parameters()
        for a, b in zip(layer.parameters(), its.parameters(), strict=True):
            assert torch.equal(whole(a), b)
    for layer, its in zip(net.experts, Net().experts, strict=True):
        state = its.state_dict()
        layer.load_state_dict(state, assign=assign)
        for name, tensor in state.items():
            assert torch.equal(whole(getattr(layer, name)), tensor)
            assert tensor.shape[0] == E
    with pytest.raises(RuntimeError, match="size mismatch"):
        net.experts[0].load_state_dict(MoEExperts(2 * E, H, I).state_dict())


@pytest.mark.parametrize("assign", [False, True])
def test_meta_device_reset_and_whole_state_dicts(pool: Pool, assign: bool) -> None:
    results(pool.run(2, from_meta, assign))


def made_with_a_group(group: Any) -> None:
    """A layer that has its part already; and a deep copy of a shared one."""
    torch.manual_seed(5)
    net = nn.Sequential(MoEExperts(E, H, I, group=group))
    before = [w.detach().clone() for w in net.parameters()]
    shard_experts(net, group)
    for w, part in zip(net.parameters(), before, strict=True):
        assert torch.equal(w.to_local(), part)
    twin = copy.deepcopy(net)
    p = problem(20, S, E, H, I)
    outs = [m[0](p.x, p.topk_idx, p.probs) for m in (net, twin)]
    assert torch.equal(*outs)
    twin.requires_grad_(True)
    outs[1].sum().backward()
    assert twin[0].down_proj.grad is not None
    assert net[0].down_proj.grad is None


def test_layers_made_with_a_group(pool: Pool) -> None:
    results(pool.run(2, made_with_a_group))


def fully_sharded_shares(_: Any) -> None:
    """Of a layer made with group=: refused over its ranks, right over ranks with the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
    torch.manual_seed(5)
    layer = MoEExperts(E, H, I, group=mesh.get_group("experts"))
    own = layer.down_proj.detach().clone()
    fully_shard(layer, mesh=mesh["replicas"])
    assert torch.equal(whole(layer.down_proj), own)
    for over in (mesh["experts"], mesh_of(dist.group.WORLD)):
        layer = MoEExperts(E, H, I, group=mesh.get_group("experts"))
        with pytest.raises(RuntimeError, match=r"must not shard a layer made with group=.*_proj"):
            fully_shard(nn.Sequential(layer), mesh=over)


def test_fully_shard_does_not_mix_shares(pool: Pool) -> None:
    results(pool.run(4, fully_sharded_shares))


def refused(group: Any) -> None:
    with pytest.raises(ValueError, match="must contain a MoEExperts; got Linear"):
        shard_experts(nn.Linear(2, 2), group)
    with pytest.raises(ValueError, match="must be a ProcessGroup or a DeviceMesh; got 2"):
        shard_experts(Net(), 2)
    with pytest.raises(RuntimeError, match=r"got delay_wgrad=True, in experts\.0"):
        shard_experts(Net(delay_wgrad=True), group)
    odd = nn.Sequential(MoEExperts(4, H, I), MoEExperts(7, H, I))
    with pytest.raises(ValueError, match="7 experts, 2 ranks"):
        shard_experts(odd, group)
    assert not any(isinstance(p, DTensor) for p in odd.parameters())  # nothing has changed
    net = Net()
    shard_experts(net, group)
    with pytest.raises(RuntimeError, match=r"got one that is shared already, in experts\.0"):
        shard_experts(net, group)
    net = Net()
    fully_shard(net, mesh=mesh_of(group))
    with pytest.raises(RuntimeError, match=r"got a DTensor \(fully_shard\)"):
        shard_experts(net, group)


def test_what_is_refused(pool: Pool) -> None:
    results(pool.run(2, refused))
