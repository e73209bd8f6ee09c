"""nn.clip_grad_norm_: torch's function, of gradients that no rank holds whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import ranks
from fp8moe_cutlass.nn import MoEExperts, clip_grad_norm_, shard_experts
from ranks import Pool, results

E, H, I = 4, 32, 16
TORCHS = nn.utils.clip_grad_norm_
NORMS: list[Any] = [2.0, 1, 3.0, 0.5, 0, math.inf, "inf", -math.inf, -1.0]


pool = ranks.pool(2, timeout=20.0)
quad = ranks.pool(4, timeout=20.0)


def parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    """The last one without a gradient, and one with a gradient of zeros."""
    torch.manual_seed(1)
    made = [nn.Parameter(torch.randn(3, 5, dtype=dtype)) for dtype in dtypes]
    for n, p in enumerate(made[:-1]):
        p.grad = torch.randn_like(p) if n else torch.zeros_like(p)
    return made


GIVEN: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "list": lambda made: made,
    "generator": lambda made: (p for p in made),
    "one": lambda made: made[1],
    "without gradient": lambda made: made[-1],
    "empty": lambda made: [],
}
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("given", GIVEN)
def test_plain_tensors_are_clipped_by_torch(given: str, norm_type: Any, foreach: Any) -> None:
    found = []
    for clip in (TORCHS, clip_grad_norm_):
        made = parameters(*DTYPES)
        norm = clip(GIVEN[given](made), 0.1, norm_type, False, foreach)
        found.append([norm, *(p.grad for p in made[:-1])])
    for want, got in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_an_empty_generator_warns_as_torch_does() -> None:
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((p for p in ()), 1.0)


def test_nonfinite_norms_raise_where_asked() -> None:
    made = parameters(*DTYPES)
    made[1].grad[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(made, 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(made, 1.0).isnan()


# ---- ranks --------------------------------------------------------------------------------------


class Net(nn.Module):
    """Replicated weights, the shares of a layer with a group, and those of shard_experts."""

    def __init__(self, group: Any, fsdp: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        shares = MoEExperts(E, H, I, group=group, dtype=torch.float32)
        self.shares = copy.deepcopy(shares) if fsdp else shares
        self.sharded = nn.Sequential(MoEExperts(E, H, I, dtype=torch.float32))
        shard_experts(self.sharded, group)
        if fsdp:
            fully_shard(self.linear, mesh=DeviceMesh.from_group(group, "cpu"))


def whole_gradients() -> list[Tensor]:
    """Every rank draws the same; the first expert's are zeros, and some rank's are alone larger."""
    torch.manual_seed(4)
    shapes = [(H, H), (H,), (E, 2 * I, H), (E, H, I), (E, 2 * I, H), (E, H, I)]
    made = [torch.randn(shape) for shape in shapes]
    for g in made[2:]:
        g[0] = 0.0
        g[-1] *= 3.0
    made[3].zero_()
    return made


def clipped(group: Any, fsdp: bool, norm_type: Any, foreach: Any, bad: bool) -> Any:
    """Norms and gradients by torch, of whole ones, and by clip_grad_norm_, of this rank's."""
    net = Net(group, fsdp)
    wholes, mine = whole_gradients(), dist.get_rank(group)
    if bad:
        wholes[2][0, 0, 0] = math.inf  # on the first rank alone
    for p, g in zip(net.parameters(), wholes, strict=True):
        part = g.chunk(2)[mine].clone()
        if isinstance(p, DTensor):
            p.grad = DTensor.from_local(part, p.device_mesh, p.placements)
        else:
            p.grad = part if g.ndim == 3 else g.clone()
    if bad:
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(net.parameters(), 0.3, norm_type, True, foreach)
    norm = clip_grad_norm_(net.parameters(), 0.3, norm_type, foreach=foreach)
    alone = [nn.Parameter(g) for g in wholes]
    for p in alone:
        p.grad = p.detach().clone()
    want = TORCHS(alone, 0.3, norm_type, foreach=foreach)
    pairs = [(norm, want)]
    for p, its in zip(net.parameters(), alone, strict=True):
        if isinstance(p, DTensor):
            pairs.append((p.grad.full_tensor(), its.grad))
        else:
            pairs.append((p.grad, its.grad.chunk(2)[mine] if its.ndim == 3 else its.grad))
    return pairs


def split_shares(group: Any) -> list[tuple[Tensor, Tensor]]:
    """clipped, of a layer with a group whose shares fully_shard has split over other ranks."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("data", "experts"))
    layer = MoEExperts(E, H, I, group=mesh["experts"].get_group(), dtype=torch.float32)
    fully_shard(layer, mesh=mesh["data"])
    alone = [nn.Parameter(g) for g in whole_gradients()[2:4]]
    for p, its in zip(layer.parameters(), alone, strict=True):
        its.grad = its.detach().clone()
        part = its.grad.chunk(2)[mesh["experts"].get_local_rank()]
        p.grad = distribute_tensor(part.clone(), p.device_mesh, p.placements)
    norm = clip_grad_norm_(layer.parameters(), 0.3)
    pairs = [(norm, TORCHS(alone, 0.3))]
    for p, its in zip(layer.parameters(), alone, strict=True):
        part = its.grad.chunk(2)[mesh["experts"].get_local_rank()]
        pairs.append((p.grad.full_tensor(), part))
    return pairs


def test_shares_that_fully_shard_has_split(quad: Pool) -> None:
    for pairs in results(quad.run(4, split_shares)):
        for got, want in pairs:
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("fsdp", [False, True], ids=["replicated", "fully_shard"])
def test_the_norm_is_the_whole_models(pool: Pool, fsdp: bool, norm_type: Any, foreach: Any) -> None:
    found = results(pool.run(2, clipped, fsdp, norm_type, foreach, False))
    for pairs in found:
        for got, want in pairs:
            torch.testing.assert_close(got, want)
    assert torch.equal(found[0][0][0], found[1][0][0])


def test_every_rank_raises_of_one_ranks_infinity(pool: Pool) -> None:
    for pairs in results(pool.run(2, clipped, True, 2.0, None, True)):
        assert torch.isinf(pairs[0][0])


def one_share(group: Any) -> None:
    """One Parameter, and a rank without gradients of anything else."""
    layer = MoEExperts(E, H, I, group=group, dtype=torch.float32)
    layer.down_proj.grad = torch.full(layer.down_proj.shape, 1.0 + dist.get_rank(group))
    half = layer.down_proj.numel()
    norm = clip_grad_norm_(layer.down_proj, 1.0)
    torch.testing.assert_close(norm, torch.tensor(5.0 * half).sqrt())
    layer.load_state_dict(layer.state_dict(), assign=True)  # other Parameters, of the same layer
    layer.down_proj.grad = torch.ones(layer.down_proj.shape)
    torch.testing.assert_close(
        clip_grad_norm_(layer.parameters(), 1.0), torch.tensor(2.0 * half).sqrt()
    )


def test_one_share(pool: Pool) -> None:
    results(pool.run(2, one_share))
