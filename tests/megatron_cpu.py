"""megatron-core on CPUs and gloo, for tests, and a small GPT with a MoE layer in each block.

`on_cpu()` puts stand-ins in the place of the CUDA calls that Megatron makes on its way.
"""

from __future__ import annotations

import contextlib
import copy
import queue
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import ranks

VOCABULARY, SEQUENCE, BATCH = 256, 32, 2
forks: list[Any] = []  # names of the random states that were entered


class _Done:
    """A stream or an event of a device that does everything at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: _Done()


class _CudaIsCpu(TorchFunctionMode):
    """Devices named "cuda" are the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return function(*(_host(a) for a in args), **kwargs)


def _host(value: Any) -> Any:
    named = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return "cpu" if named else value


def on_cpu() -> None:
    """Before Megatron builds anything; again it does nothing."""
    cuda: Any = torch.cuda
    if cuda.Stream is _Done:
        return
    cuda.Stream = cuda.Event = _Done
    cuda.current_stream = cuda.default_stream = lambda *args: _Done()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *args: None
    cuda.random.get_rng_state = cuda.get_rng_state = lambda *args, **kwargs: torch.zeros(1)
    cuda.random.set_rng_state = cuda.set_rng_state = lambda *args, **kwargs: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda *args: None  # type: ignore[method-assign]
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor"):
        setattr(cuda, name, getattr(torch, name))
    own_type: Any = torch.Tensor.type

    def cuda_type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = own_type(self, *args, **kwargs)
        return f"torch.cuda.{found.split('.')[-1]}" if isinstance(found, str) else found

    torch.Tensor.type = cuda_type  # type: ignore[method-assign, assignment]
    _CudaIsCpu().__enter__()  # type: ignore[no-untyped-call]

    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    @contextlib.contextmanager
    def fork(self: Any, name: Any = None) -> Any:
        forks.append(name)
        yield

    random.CudaRNGStatesTracker.fork = fork
    token_dispatcher.maybe_move_tensor_to_cpu = lambda t, as_numpy=False, record_stream=False: (
        t.numpy() if as_numpy and t is not None else t
    )
    threads: queue.Queue[Any] = queue.Queue()  # the writer's are of this process
    filesystem_async.get_write_results_queue = lambda *args, **kwargs: threads
    _resume_torch_adam(distrib_optimizer.DistributedOptimizer)


def _resume_torch_adam(optimizer: Any) -> None:
    """Without Apex Megatron's distributed optimizer runs torch's AdamW, whose `step` it leaves out
    of the tensors it loads, and gives to all parameters as one tensor."""
    load, set_tensors = optimizer.load_state_dict, optimizer._set_main_param_and_optimizer_states

    def load_state_dict(self: Any, state: Any) -> None:
        load(self, state)
        for held in self.optimizer.state.values():
            if "step" in held:
                held["step"] = held["step"].clone()

    def with_step(self: Any, param: Any, tensors: Any) -> None:
        set_tensors(self, param, {"step": None, **tensors})

    optimizer.load_state_dict = load_state_dict
    optimizer._set_main_param_and_optimizer_states = with_step


def on_two(pool: ranks.Pool, function: Any, *args: Any) -> list[Any]:
    """function(*args) on both ranks, Megatron's experts over the two."""
    return ranks.results(pool.run(2, called, function, args))


def called(group: Any, function: Any, args: Any) -> Any:
    """function(*args) on this rank."""
    from torch.distributed.checkpoint.api import CheckpointException

    on_cpu()
    parallel(2)
    try:
        return function(*args)
    except CheckpointException as error:  # no Exception: it would end the process
        raise RuntimeError(str(error)) from error


_layouts: dict[tuple[int, int, int, int | None], dict[str, Any]] = {}  # parallel_state's variables


def parallel(ep: int = 1, pp: int = 1, vpp: int | None = None, tp: int = 1) -> None:
    """Megatron's process groups over the whole world, and empty loss trackers.

    The groups of a layout are made once per process: gloo's threads stay when groups go.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_logging

    held = vars(parallel_state)
    empty = _layouts.setdefault((0, 0, 0, None), _variables(held))  # at the first call
    held.update(_layouts.get((tp, ep, pp, vpp), empty))
    if (tp, ep, pp, vpp) not in _layouts:
        parallel_state.initialize_model_parallel(
            tp,
            pp,
            virtual_pipeline_model_parallel_size=vpp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1,
        )
        _layouts[tp, ep, pp, vpp] = _variables(held)
    moe_logging.destroy_moe_metrics_tracker()  # it has a size for the layers it has seen


def _variables(held: dict[str, Any]) -> dict[str, Any]:
    return {
        k: copy.copy(v) if isinstance(v, dict | list) else v for k, v in held.items() if k.isupper()
    }


def config(**options: Any) -> Any:
    """8 experts of 128 x 96, top 2."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    given: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "ffn_hidden_size": 256,
        "num_moe_experts": 8,
        "moe_ffn_hidden_size": 96,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_token_dispatcher_type": "alltoall",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "transformer_impl": "local",
    }
    return TransformerConfig(**{**given, **options})


def layer_spec(kind: str, config: Any, **options: Any) -> Any:
    """A transformer layer with Megatron's SequentialMLP ("sequential"), our experts on its
    dispatcher ("experts"), or our layer ("layer")."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from fp8moe_cutlass.integrations.megatron import swap

    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    if kind == "sequential":
        return spec
    return swap(spec, layer=kind == "layer", **options)


def gpt(kind: str, config: Any, **options: Any) -> Any:
    """options: of swap, or of GPTModel."""
    from megatron.core.models.gpt import GPTModel

    names = ("recipe", "preactivation", "transposed_weights")
    swapped = {name: options.pop(name) for name in names if name in options}
    spec = layer_spec(kind, config, **swapped)
    if config.mtp_num_layers is not None:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

        options["mtp_block_spec"] = get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=False
        )
    torch.manual_seed(1)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        **options,
    )


def hybrid(kind: str, config: Any) -> Any:
    """A HybridModel of attention and MoE layers in turn ("*E*E"), of the GPT's modules: its own
    want TransformerEngine."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    from fp8moe_cutlass.integrations.megatron import swap

    parts = layer_spec("sequential", config).submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=parts.input_layernorm,
        self_attention=parts.self_attention,
        self_attn_bda=parts.self_attn_bda,
    )
    moe = TransformerLayerSubmodules(
        pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda
    )
    stack = ModuleSpec(
        module=hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=moe),
        ),
    )
    hybrid_block.TENorm = WrappedTorchNorm
    torch.manual_seed(1)
    return HybridModel(
        config=config,
        hybrid_stack_spec=stack if kind == "sequential" else swap(stack, layer=kind == "layer"),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        hybrid_layer_pattern="*E*E",
    )


def batch(seed: int) -> dict[str, Tensor]:
    """Arguments of GPTModel: what follows a token is a function of it."""
    ids = torch.randint(
        1, VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(seed)
    )
    for s in range(1, SEQUENCE + 1):
        ids[:, s] = (5 * ids[:, s - 1] + ids[:, s] % 2) % VOCABULARY
    hidden = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool), 1)[None, None]
    return {
        "input_ids": ids[:, :-1].contiguous(),
        "position_ids": torch.arange(SEQUENCE).expand(BATCH, -1),
        "attention_mask": hidden,
        "labels": ids[:, 1:].contiguous(),
    }
