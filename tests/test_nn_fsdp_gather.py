"""fully_shard gathers experts as FP8 codes and scales: what is gathered and freed, and bits equal
to those of gathering bfloat16."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import ranks
from fp8moe_cutlass import Fp8Recipe, SlowPathWarning, ops, slow_path
from fp8moe_cutlass.nn import MoEExperts
from fp8moe_cutlass.nn.fsdp import ExpertShard, GatheredExperts
from moe_problem import Problem, problem
from ranks import Pool, results

HIDDEN, INTERMEDIATE = 256, 128


pool = ranks.pool(4, {1: [0], 2: [0, 1], 4: [0, 1, 2, 3]})


def layer(experts: int, seed: int, options: Any) -> MoEExperts:
    inner = options.pop("intermediate", INTERMEDIATE)
    if options.get("dtype") == torch.float8_e4m3fn:
        return MoEExperts(experts, HIDDEN, inner, **options)
    return problem(1, 1, experts, HIDDEN, inner, seed=seed).experts(**options)


class Net(nn.Module):
    """Two layers of experts, one after the other."""

    def __init__(self, experts: int = 4, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(experts, s, {**options}) for s in range(2))

    def forward(self, p: Problem, through: Callable[..., Any] | None = None) -> torch.Tensor:
        x = p.x
        for layer in self.layers:
            args = x, p.topk_idx, p.probs
            x = x + (layer(*args) if through is None else through(layer, *args))
        return x


def tokens(step: int, experts: int = 4) -> Problem:
    """Of this rank."""
    return problem(32, 2, experts, seed=100 * step + dist.get_rank() + 1)


def sharded(net: nn.Module, mesh: Any, **how: Any) -> Any:
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **how)
    fully_shard(net, mesh=mesh, **how)
    return net


class AsTheyAre(MoEExperts):
    """Layers that tell fully_shard nothing: it gathers the parameters themselves."""

    __setattr__ = nn.Module.__setattr__


def as_they_are(net: Any) -> Any:
    for layer in net.layers:
        layer.__class__ = AsTheyAre
    return net


def plain_and_fp8(mesh: Any, experts: int, options: Any, how: Any) -> tuple[Any, Any]:
    plain = sharded(as_they_are(Net(experts, **options)), mesh, **how)
    return plain, sharded(Net(experts, **options), mesh, **how)


def loss_of(net: nn.Module, p: Problem, through: Any = None) -> torch.Tensor:
    return (net(p, through).float() - p.dout.float()).square().mean()


def whole(net: nn.Module) -> list[torch.Tensor]:
    return [w.full_tensor() for w in net.parameters()]


def kinds(net: nn.Module) -> set[type]:
    """Of what the layers multiply."""
    found: set[type] = set()
    for layer in net.layers:
        layer.register_forward_pre_hook(lambda m, _: found.add(type(m.gate_up_proj)))
    return found


def once(net: Any, step: int, experts: int) -> list[float]:
    loss = loss_of(net, tokens(step, experts))
    loss.backward()
    return [loss.item()]


def accumulated(net: Any, step: int, experts: int) -> list[float]:
    net.set_requires_gradient_sync(False)
    first = once(net, 2 * step, experts)
    net.set_requires_gradient_sync(True)
    return first + once(net, 2 * step + 1, experts)


def interleaved(net: Any, step: int, experts: int) -> list[float]:
    losses = [loss_of(net, tokens(2 * step + n, experts)) for n in range(2)]
    for loss in losses:
        loss.backward()
    return [loss.item() for loss in losses]


def checkpointed(net: Any, step: int, experts: int) -> list[float]:
    def through(layer: nn.Module, *args: Any) -> Any:
        return checkpoint(layer, *args, use_reentrant=False)

    p = tokens(step, experts)
    p.x.requires_grad_()
    loss = loss_of(net, p, through)
    loss.backward()
    return [loss.item()]


def same_steps(
    group: Any, experts: int, options: Any, how: Any, a_step: Any = once, mesh: Any = None
) -> None:
    mesh = DeviceMesh.from_group(group, "cpu") if mesh is None else mesh(group)
    plain, fp8 = nets = plain_and_fp8(mesh, experts, options, how)
    found = [kinds(net) for net in nets]
    losses: list[list[float]] = [[], []]
    for net, of in zip(nets, losses, strict=True):
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        for step in range(3):
            of += a_step(net, step, experts)
            optimizer.step()
            optimizer.zero_grad()
    assert found == [{nn.Parameter}, {GatheredExperts}]
    assert losses[0] == losses[1]
    for a, b in zip(whole(plain), whole(fp8), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("experts", [3, 4, 5])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_and_experts(ranks: int, experts: int, pool: Pool) -> None:
    results(pool.run(ranks, same_steps, experts, {}, {}))


def frozen(net: Any, step: int, experts: int) -> list[float]:
    for w in net.layers[0].parameters():
        w.requires_grad_(False)
    return once(net, step, experts)


@pytest.mark.parametrize("how", [{}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("a_step", [once, accumulated, interleaved, checkpointed, frozen])
def test_steps(a_step: Any, how: dict[str, Any], pool: Pool) -> None:
    results(pool.run(2, same_steps, 5, {}, how, a_step))


OPTIONS: list[dict[str, Any]] = [
    {"preactivation": "recompute", "transposed_weights": "recompute"},
    {"preactivation": "save_fp8"},
    {"dtype": torch.float32},
    {"recipe": Fp8Recipe(scale="amax", columns="column")},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: dict[str, Any], pool: Pool) -> None:
    results(pool.run(2, same_steps, 5, options, {}))


def test_cpu_offload(pool: Pool) -> None:
    how = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    results(pool.run(2, same_steps, 5, {}, how))


def replicas_of_shards(_: Any) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))


def test_hybrid_shards(pool: Pool) -> None:
    results(pool.run(4, same_steps, 5, {}, {}, once, replicas_of_shards))


def shares(_: Any) -> None:
    """Experts shared by group= of two ranks, each share sharded over two others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    options = {"group": mesh["experts"].get_group()}

    def built() -> Any:
        torch.manual_seed(0)
        net = nn.Module()
        net.layers = nn.ModuleList(
            [MoEExperts(8, HIDDEN, INTERMEDIATE, **options) for _ in range(2)]
        )
        net.forward = Net.forward.__get__(net)
        return net

    plain, fp8 = sharded(as_they_are(built()), mesh["data"]), sharded(built(), mesh["data"])
    assert [once(plain, s, 8) for s in range(2)] == [once(fp8, s, 8) for s in range(2)]
    for a, b in zip(plain.parameters(), fp8.parameters(), strict=True):
        assert type(b._local_tensor) is ExpertShard
        assert torch.equal(a.grad.full_tensor(), b.grad.full_tensor())


def test_beside_a_group(pool: Pool) -> None:
    results(pool.run(4, shares))


# ---- what is gathered, and for how long ---------------------------------------------------------


class Counted:
    """fully_shard's all-gather."""

    sent = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, **gathered: Any) -> Any:
        self.sent += output_tensor.nbytes
        return dist.all_gather_into_tensor(output_tensor, **gathered)


def memory(group: Any, compiled: bool) -> None:
    torch._dynamo.reset()
    mesh, sent = DeviceMesh.from_group(group, "cpu"), []
    held: list[torch.Tensor] = []
    plain, fp8 = plain_and_fp8(mesh, 4, {}, {"reshard_after_forward": True})
    for net in (plain, fp8):
        sent.append(Counted())
        for layer in net.layers:
            layer.set_custom_all_gather(sent[-1])
            if compiled:
                layer.compile(backend="aot_eager", fullgraph=True)
    for layer in fp8.layers:
        layer.register_forward_pre_hook(
            lambda m, _: held.extend([m.gate_up_proj.codes, m.down_proj.codes])
        )
    for each in (plain, fp8):
        loss = loss_of(each, tokens(0))
        assert not any(t.untyped_storage().nbytes() for t in held[:2])  # the first layer's
        loss.backward()
    assert len(held) == 4
    assert not any(t.untyped_storage().nbytes() for t in held)
    assert 0.5 < sent[1].sent / sent[0].sent <= 0.52


@pytest.mark.parametrize("compiled", [False, True])
def test_bytes_gathered_and_freed(compiled: bool, pool: Pool) -> None:
    results(pool.run(2, memory, compiled))


def read_and_written(group: Any) -> None:
    """Between unshard() and reshard(): a reader sees the codes' values, and nobody writes."""
    net = sharded(Net(5), DeviceMesh.from_group(group, "cpu"))
    layer = net.layers[0]
    want = ops.quantize_weight(layer.gate_up_proj.full_tensor().detach(), transposed=False)
    layer.unshard()
    gathered = layer.gate_up_proj
    assert type(gathered) is GatheredExperts
    assert torch.equal(gathered * 1, ops.dequantize(want))
    assert torch.equal(layer.quantize_weights().gate_up.data, want.data)
    with (
        pytest.raises(RuntimeError, match="gathered FP8 weights cannot be written"),
        torch.no_grad(),
    ):
        gathered.mul_(2)
    layer.reshard()
    assert type(layer.gate_up_proj._local_tensor) is ExpertShard


def test_gathered_weights_are_read_alone(pool: Pool) -> None:
    results(pool.run(2, read_and_written))


def low_precision(group: Any) -> None:
    """The float32 values of the shards are quantized, whatever dtype the policy gathers in."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    net = Net(5, dtype=torch.float32)
    with torch.no_grad():
        want = net(tokens(0, 5))
    mesh = DeviceMesh.from_group(group, "cpu")
    sharded(net, mesh, mp_policy=policy)
    p = tokens(0, 5)
    assert torch.equal(net(p), want)
    loss_of(net, p).backward()
    assert all(w.grad.dtype == w.dtype == torch.float32 for w in net.parameters())


def test_a_mixed_precision_policy(pool: Pool) -> None:
    results(pool.run(2, low_precision))


def of_fp8(scale_dtype: torch.dtype, inner: int = INTERMEDIATE) -> Net:
    """Two layers of FP8 weights."""
    net = Net(5, intermediate=inner)
    for n, layer in enumerate(net.layers):
        tensors = dict(layer.fp8_tensors(fused=True))
        for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
            tensors[name] = tensors[name].to(scale_dtype)
        net.layers[n] = MoEExperts.from_fp8(tensors, num_experts=5)
    return net


def as_they_lie(
    group: Any, scale_dtype: torch.dtype, how: dict[str, Any], inner: int = INTERMEDIATE
) -> None:
    """FP8 weights, whatever a policy casts to; twice, since a gather fills the same memory."""
    alone, net = of_fp8(scale_dtype, inner), of_fp8(scale_dtype, inner)
    sharded(net, DeviceMesh.from_group(group, "cpu"), **how)
    for step in range(2):
        found = []
        for one in (alone, net):
            p = tokens(step, 5)
            p.x.requires_grad_()
            out = one(p)
            out.backward(p.dout)
            found.append((out, p.x.grad))
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)
    for name, t in net.named_parameters():
        dim = t.placements[0].dim
        held = alone.get_parameter(name).chunk(group.size(), dim)[group.rank()]
        shard = t._local_tensor.as_subclass(torch.Tensor)
        assert torch.equal(shard.view(torch.uint8), held.view(torch.uint8))


@pytest.mark.parametrize(
    "policy",
    [{}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)}],
    ids=["as they are", "bf16"],
)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("ranks", [1, 2])
def test_fp8_weights_travel_as_they_lie(
    ranks: int, scale_dtype: torch.dtype, policy: dict[str, Any], pool: Pool
) -> None:
    results(pool.run(ranks, as_they_lie, scale_dtype, policy))


def as_they_lie_from_meta(group: Any) -> None:
    mesh, whole = DeviceMesh.from_group(group, "cpu"), of_fp8(torch.float32)
    with torch.device("meta"):
        net = Net(5, dtype=torch.float8_e4m3fn)
    sharded(net, mesh)
    net.to_empty(device="cpu")
    net.load_state_dict(sharded(of_fp8(torch.float32), mesh).state_dict())
    net.to(torch.float16)  # moves codes and scales, and casts neither
    with torch.no_grad():
        assert torch.equal(net(tokens(0, 5)), whole(tokens(0, 5)))


def test_fp8_weights_from_the_meta_device(pool: Pool) -> None:
    results(pool.run(2, as_they_lie_from_meta))


def inside_blocks(group: Any) -> None:
    slow_path._said.clear()
    mesh, how = DeviceMesh.from_group(group, "cpu"), {"shard_placement_fn": lambda _: Shard(1)}
    p, net, twin = tokens(0), Net(), Net()
    with pytest.warns(SlowPathWarning, match="here it gathers them in torch.bfloat16; got H"):
        sharded(net, mesh, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowPathWarning)
        assert torch.equal(net(p), twin(p))


def test_parts_that_cut_blocks_are_gathered_as_they_are(pool: Pool) -> None:
    results(pool.run(2, inside_blocks))


def along(dims: tuple[int, int], w: torch.Tensor) -> Shard:
    """By gate_up_proj's dimension and down_proj's, and their scales'."""
    return Shard(dims[w.shape[1] in (HIDDEN, HIDDEN // 128)])


DIMENSIONS = pytest.mark.parametrize("dims", [(1, 1), (2, 2), (1, 2), (0, 1)], ids=str)


@DIMENSIONS
@pytest.mark.parametrize("a_step", [once, interleaved, frozen])
def test_parts_of_whole_blocks(dims: tuple[int, int], a_step: Any, pool: Pool) -> None:
    how = {"shard_placement_fn": partial(along, dims)}
    results(pool.run(2, same_steps, 5, {"intermediate": 256}, how, a_step))


@DIMENSIONS
def test_fp8_weights_in_parts_of_whole_blocks(dims: tuple[int, int], pool: Pool) -> None:
    how = {"shard_placement_fn": partial(along, dims)}
    results(pool.run(2, as_they_lie, torch.float32, how, 256))


def one_projection_alone(group: Any, dims: tuple[int, int]) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    net = sharded(Net(), mesh, shard_placement_fn=lambda w: Shard(dims[w.shape[2] == HIDDEN]))
    with pytest.raises(RuntimeError, match="both projections in FP8 or neither"):
        net(tokens(0))


@pytest.mark.parametrize("dims", [(0, 1), (1, 0)], ids=str)
def test_one_projection_alone_is_refused(dims: tuple[int, int], pool: Pool) -> None:
    results(pool.run(2, one_projection_alone, dims))


# ---- what replaces shards -----------------------------------------------------------------------


def replaced(group: Any) -> None:
    """Every way by which torch puts new shards in: they are gathered in FP8, too."""
    mesh = DeviceMesh.from_group(group, "cpu")
    with torch.device("meta"):
        net = Net(5)
    sharded(net, mesh)
    net.to_empty(device="cpu")
    net.load_state_dict(sharded(Net(5), mesh).state_dict(), assign=True)
    found = kinds(net)
    for dtype in (torch.bfloat16, torch.float32):
        net.to(dtype)
        twin = Net(5, dtype=dtype)
        with torch.no_grad():
            assert torch.equal(net(tokens(0, 5)), twin(tokens(0, 5)))
        assert found == {GatheredExperts}


def test_shards_that_are_replaced(pool: Pool) -> None:
    results(pool.run(2, replaced))


def saved(group: Any, path: str) -> list[torch.Tensor]:
    net = sharded(Net(5), DeviceMesh.from_group(group, "cpu"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for step in range(2):
        once(net, step, 5)
        optimizer.step()
        optimizer.zero_grad()
    model, moments = get_state_dict(net, optimizer)
    dcp.save({"model": model, "moments": moments}, checkpoint_id=path, process_group=group)
    return whole(net)


def loaded(group: Any, path: str, want: list[torch.Tensor]) -> None:
    net = sharded(Net(5), DeviceMesh.from_group(group, "cpu"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    model, moments = get_state_dict(net, optimizer)
    dcp.load({"model": model, "moments": moments}, checkpoint_id=path, process_group=group)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=moments)
    assert all(map(torch.equal, whole(net), want))
    assert {state["step"].item() for state in optimizer.state.values()} == {2}
    found = kinds(net)
    once(net, 2, 5)
    optimizer.step()
    assert found == {GatheredExperts}


def test_distributed_checkpoints(pool: Pool) -> None:
    path = Path(tempfile.mkdtemp())
    want = results(pool.run(2, saved, str(path)))[0]
    for size in (1, 2, 4):
        results(pool.run(size, loaded, str(path), want))
