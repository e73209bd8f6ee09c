"""integrations.megatron in megatron-core's GPT on two GPUs over NCCL, beside SequentialMLP.

Skipped without megatron-core on PYTHONPATH.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

import megatron_cpu as mc
import megatron_train as mt
import ranks
from ranks import Pool, results

pytestmark = pytest.mark.gpu
FP8 = 0.11  # FP8's own error of a layer's gradients


pool = ranks.pool(2, backend="nccl")


def _gradients(kind: str, config: Any, state: Any) -> tuple[float, dict[str, Any]]:
    """Of two microbatches, as Megatron announces them."""
    model = mc.gpt(kind, config).cuda()
    model.load_state_dict(state)
    model.set_is_first_microbatch()
    loss = torch.zeros((), device="cuda")
    for microbatch in range(2):
        given = mc.batch(2 * microbatch + torch.distributed.get_rank())
        one = model(**{k: v.cuda() for k, v in given.items()}).float().mean()
        one.backward()
        loss += one.detach()
    grads = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    rest = {n: g for n, g in grads.items() if ".experts." not in n}
    return loss.item(), {"experts": mt.of_experts(grads), "rest": rest}


def _beside_sequential(group: Any, ep: int) -> list[Any]:
    """(kind, difference of the loss, of the experts' gradients, of all others, bits kept)."""
    from megatron.core.quantization.quant_config import RecipeConfig
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    mc.parallel(ep)
    model_parallel_cuda_manual_seed(1)
    options = {"num_layers": 1, "expert_model_parallel_size": ep}
    config, flagged = mc.config(**options), mc.config(**options)
    flagged.quant_recipe = RecipeConfig([], {})  # is_first_microbatch is obeyed
    state = mc.gpt("sequential", config).state_dict()
    wanted, right = _gradients("sequential", config, state)
    found = []
    for kind in ("experts", "layer"):
        loss, grads = _gradients(kind, config, state)
        _, kept = _gradients(kind, flagged, state)
        same = all(torch.equal(kept["experts"][k], g) for k, g in grads["experts"].items())
        apart = [mt.apart(grads[k], right[k]) for k in right]
        found.append((kind, abs(loss - wanted), *apart, same))
    return found


@pytest.mark.parametrize("ep", [1, 2])
def test_gradients(pool: Pool, ep: int) -> None:
    """Both forms, FP8 weights of the first microbatch kept or not: the same bits."""
    for found in results(pool.run(2, _beside_sequential, ep)):
        for kind, loss, experts, rest, same in found:
            assert loss < 6e-3, kind
            assert 0.02 < experts < FP8, kind
            assert rest < FP8, kind
            assert same, kind
