"""The experts of a Megatron MoE layer in FP8, by its builder's protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor

from fp8moe_cutlass.autograd import Fp8Weights
from fp8moe_cutlass.autograd.body import Biases
from fp8moe_cutlass.integrations.megatron import checkpoint, flags
from fp8moe_cutlass.integrations.megatron.linears import ExpertLinear
from fp8moe_cutlass.nn import MoEExperts
from fp8moe_cutlass.recipe import Fp8Recipe


class Experts(MoEExperts):
    """A rank's experts, in the place of SequentialMLP or TEGroupedMLP: rows come grouped by expert
    from any of Megatron's dispatchers, and stay where they are.

    config: a TransformerConfig. NotImplementedError names the options that cannot be honoured.
    recipe: as of nn.MoEExperts; config.fp8 and its recipe are of the other modules.
    preactivation: as of nn.MoEExperts. None: "recompute" where config recomputes "moe_act",
      "save_fp8" with activation_func_fp8_input_store, else "save".
    transposed_weights: as of nn.MoEExperts. None: "save" where one microbatch is in flight, so with
      one pipeline stage and no overlap_moe_expert_parallel_comm, else "recompute". The latter also
      with "moe_act", which saves no codes at all.
    group: of MoELayer, whose experts exchange tokens themselves.

    Parameters: linear_fc1.weight{i} [2I, H] and linear_fc2.weight{i} [H, I] of each local expert,
    as TEGroupedMLP's; with add_bias_linear also bias{i}, [2I] and [H], which start as zeros and
    whose gradients Megatron's hooks add to main_grad. Those of weights always go there. A parameter
    is an expert's to Megatron (`allreduce`) as in TEGroupedMLP. Weight gradients wait for
    `backward_dw` with delay_wgrad_compute or overlap_dispatch_backward_with_experts_wgrad.

    is_first_microbatch: Megatron's schedules set it at the first microbatch of a step, but only
    with config.fp8, fp4, use_kitchen or quant_recipe. Then (and without
    disable_parameter_transpose_cache) the FP8 weights of that microbatch serve all others of the
    step; elsewhere each forward quantizes its own. Who steps an optimizer without those schedules
    sets it.
    """

    linear_fc1: ExpertLinear
    linear_fc2: ExpertLinear

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        /,
        *,
        pg_collection: Any,
        name: str | None = None,
        recipe: Fp8Recipe | None = Fp8Recipe(),  # noqa: B008 (frozen)
        preactivation: str | None = None,
        transposed_weights: str | None = None,
        group: Any = None,
    ) -> None:
        flags.check(config, pg_collection, name, layer=False)
        ranks = get_pg_size(pg_collection.ep)
        recomputed = (
            config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        )
        if preactivation is None:
            stored = "save_fp8" if config.activation_func_fp8_input_store else "save"
            preactivation = "recompute" if recomputed else stored
        if transposed_weights is None:
            in_flight = (
                config.pipeline_model_parallel_size > 1 or config.overlap_moe_expert_parallel_comm
            )
            transposed_weights = "recompute" if recomputed or in_flight else "save"
        delay = config.delay_wgrad_compute or config.overlap_dispatch_backward_with_experts_wgrad
        super().__init__(
            num_local_experts * (1 if group is None else ranks),
            config.moe_latent_size or config.hidden_size,
            config.moe_ffn_hidden_size,
            activation=flags.activation_of(config),
            bias=config.add_bias_linear,
            recipe=recipe,
            preactivation=preactivation,
            transposed_weights=transposed_weights,
            delay_wgrad=delay,
            dtype=config.params_dtype,
            device="meta",
            group=group,
        )
        self.config = config
        self.num_local_experts = num_local_experts
        self.place = checkpoint.Place(
            get_pg_rank(pg_collection.ep), ranks, get_pg_rank(pg_collection.expt_dp)
        )
        own_groups = ranks > 1 or get_pg_size(pg_collection.tp) != get_pg_size(
            pg_collection.expt_tp
        )
        first, second = self.weight_names
        for of, linear, dim in ((first, "linear_fc1", 0), (second, "linear_fc2", 1)):
            weight: Any = self._parameters.pop(of)
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)
            weight.allreduce, weight.skip_backward_post_hook = not own_groups, delay
            self._parameters.pop(f"{of}_bias", None)
            made = ExpertLinear(weight.shape, weight.dtype, vars(weight), self.has_bias)
            self.add_module(linear, made)
        if not config.init_model_with_meta_device:
            self.to_empty(device="cpu" if config.use_cpu_initialization else _gpu())
            self.reset_parameters()
        # From the start: Megatron lists the modules that have it once.
        self.is_first_microbatch = True
        self._kept: Fp8Weights | None = None  # of the first microbatch
        self._wgrad_hooks: list[Callable[[], None]] = []

    @property
    def gate_up_proj(self) -> Any:
        """[E, 2I, H] over the weights of linear_fc1, without a gradient."""
        return self._whole("linear_fc1")

    @property
    def down_proj(self) -> Any:
        """[E, H, I] over the weights of linear_fc2, without a gradient."""
        return self._whole("linear_fc2")

    def _whole(self, linear: str) -> Tensor:
        if linear not in self._modules:
            raise AttributeError(linear)  # nn.Module then finds the parameter that MoEExperts made
        whole: Tensor = getattr(self, linear).whole()
        return whole

    def local_weights(self) -> tuple[Tensor, Tensor]:
        """Both projections [E, N, K], whose gradients are those of the parameters."""
        return self.linear_fc1(self.delay_wgrad), self.linear_fc2(self.delay_wgrad)

    def own_biases(self) -> Biases:
        return Biases(torch.stack(self.linear_fc1.biases), torch.stack(self.linear_fc2.biases))

    def forward(  # type: ignore[override]
        self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, None]:
        """rows [R, H], grouped by expert, tokens_per_expert [E] int and probs [R] float
        -> [R, H] in their dtype, and no bias."""
        weighted: Tensor | None = probs
        if self.config.moe_apply_probs_on_input:
            rows, weighted = (rows * probs[:, None]).to(rows.dtype), None
        out = self.forward_rows(rows, tokens_per_expert, weighted, weights=self.kept_weights())
        self.is_first_microbatch = False
        return out, None

    def kept_weights(self) -> Fp8Weights | None:
        """The FP8 weights of a forward now; None: it quantizes its own."""
        c = self.config
        told = c.fp8 is not None or c.fp4 is not None or c.use_kitchen or c.quant_recipe is not None
        wanted = told and not c.disable_parameter_transpose_cache
        if self.recipe is None or self._reused is not None or not wanted:
            return None
        if self.is_first_microbatch or self._kept is None:
            self._kept = None  # before the next are made
            self._kept = self.quantize_weights()
        return self._kept

    def backward_dw(self) -> None:
        """Runs nn.MoEExperts', then the hooks that DistributedDataParallel has registered."""
        super().backward_dw()
        self.linear_fc1.hand_out()
        self.linear_fc2.hand_out()
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """hook runs after each backward_dw."""
        self._wgrad_hooks.append(hook)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Runs the config's init methods, expert by expert, on a GPU under the expert-parallel
        state of Megatron's tracker. With use_cpu_initialization ranks that start from the same
        random state draw the experts of all ranks and keep theirs."""
        if self.gate_up_proj.is_meta:
            return
        for bias in (*self.linear_fc1.biases, *self.linear_fc2.biases):
            bias.zero_()
        if not self.config.perform_initialization:
            return
        weights = (self.gate_up_proj, self.down_proj)
        methods = (self.config.init_method, self.config.output_layer_init_method)
        if not self.config.use_cpu_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                for pair in zip(*weights, strict=True):
                    for weight, draw in zip(pair, methods, strict=True):
                        draw(weight)
            return
        for e in range(self.place.ranks * self.num_local_experts):
            here = e - self.place.rank * self.num_local_experts
            for weight, draw in zip(weights, methods, strict=True):
                drawn = torch.empty(weight.shape[1:])
                draw(drawn)
                if 0 <= here < self.num_local_experts:
                    weight[here].copy_(drawn)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The state for megatron.core.dist_checkpointing, by the keys of Megatron's own experts."""
        return checkpoint.sharded_state_dict(self, prefix, sharded_offsets, metadata)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self._kept = None
        checkpoint.translate(state_dict, prefix, self.num_local_experts)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._kept = None
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kept": None, "_wgrad_hooks": []}


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
