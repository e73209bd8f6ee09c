"""integrations.torchtitan in torchtitan's own training, on CPUs.

Skipped without torchtitan; .ci/run has a step for it.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchtitan")

from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, DeepEPTokenDispatcher

import titan_cpu
from fp8moe_cutlass import ops
from fp8moe_cutlass.integrations.torchtitan import fp8moe_experts, fp8moe_layer
from fp8moe_cutlass.nn import MoEExperts
from fp8moe_cutlass.recipe import Fp8Recipe
from fp8moe_cutlass.slow_path import SlowPathWarning, _said
from test_docs import ROOT, run_python

pytestmark = pytest.mark.slow

E, D, ROWS = 3, 256, 40
COUNTS = torch.tensor([17, 0, 23])
OURS = "--override.imports=fp8moe_cutlass.integrations.torchtitan.fp8moe_experts"
LAYER = "--override.imports=fp8moe_cutlass.integrations.torchtitan.fp8moe_layer"
STEPS = 10
BATCH = ["--training.local_batch_size=1", "--training.seq_len=64"]
EP = "--parallelism.expert_parallel_degree=2"
DTENSORS = "--parallelism.spmd_backend=partial_dtensor"  # the default needs a newer torch


def experts(width: int = 128, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    cfg = fp8moe_experts(GroupedExperts.Config(dim=D, hidden_dim=width, num_experts=E), **options)
    made = cfg.build().to(dtype)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for w in made.parameters():
            w.copy_(torch.randn(w.shape, generator=draw) / 16)
    return made


def same_layer(of: Any, **options: Any) -> MoEExperts:
    """nn.MoEExperts with the weights of torchtitan's."""
    _, width, hidden = of.w1_EFD.shape
    layer = MoEExperts(E, hidden, width, dtype=of.w1_EFD.dtype, **options)
    with torch.no_grad():
        layer.gate_up_proj.copy_(torch.cat([of.w1_EFD, of.w3_EFD], dim=1))
        layer.down_proj.copy_(of.w2_EDF)
    return layer


def rows(seed: int = 2) -> Tensor:
    made = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return made.requires_grad_()


def grads(of: Any, width: int) -> list[Tensor]:
    """Those of gate, up and down."""
    if isinstance(of, MoEExperts):
        both, down = of.gate_up_proj.grad, of.down_proj.grad
        assert both is not None
        assert down is not None
        return [both[:, :width], both[:, width:], down]
    return [of.w1_EFD.grad, of.w3_EFD.grad, of.w2_EDF.grad]


@pytest.mark.parametrize(
    ("width", "dtype", "preactivation", "recipe"),
    [
        (128, torch.bfloat16, "save", {}),
        (256, torch.float32, "save", {"grad_dtype": "e5m2"}),
        (128, torch.bfloat16, "recompute", {}),
        (384, torch.bfloat16, "save_fp8", {"columns": "column"}),
        (128, torch.bfloat16, "save", {"columns": "column", "scale": "amax"}),
        (48, torch.bfloat16, "save", {}),
    ],
)
def test_bits_of_the_layer(
    monkeypatch: Any, width: int, dtype: torch.dtype, preactivation: str, recipe: Any
) -> None:
    """Two forwards before a step, the outputs and gradients bit for bit, without a copy of the
    weights, but where gate does not end at a block's end."""
    ours = experts(width, dtype, preactivation=preactivation, **recipe)
    layer = same_layer(ours, preactivation=preactivation, recipe=Fp8Recipe(**recipe))
    if width % 128 == 0:
        monkeypatch.setattr(torch, "cat", None)
    else:
        _said.discard("gate beside up")
        with pytest.warns(
            SlowPathWarning, match=r"no multiple of 128; got \(3, 48, 256\), 0.3 MiB"
        ):
            ours(rows(), COUNTS)
    for seed in (2, 3):
        found = []
        for forward in (ours, layer.forward_rows):
            x = rows(seed)
            out = forward(x, COUNTS)
            out.float().square().sum().backward()
            found.append((out, x.grad))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for got, want in zip(grads(ours, width), grads(layer, width), strict=True):
        assert torch.equal(got, want)
        assert got.is_contiguous()
    with torch.no_grad():
        assert torch.equal(ours(rows(), COUNTS), layer.forward_rows(rows(), COUNTS))


def test_each_gradient_has_memory_of_its_own(monkeypatch: Any) -> None:
    """autograd takes what wgrad has written: no copy."""
    written, wgrad = [], ops.grouped_gemm_wgrad

    def watched(*args: Any, **how: Any) -> Tensor:
        made = wgrad(*args, **how)
        written.append(made.data_ptr())
        return made

    monkeypatch.setattr(ops, "grouped_gemm_wgrad", watched)
    ours = experts()
    ours(rows(), COUNTS).sum().backward()
    taken = {w.grad.data_ptr() for w in ours.parameters()}
    assert taken == set(written)
    assert len(taken) == len(written) == 3


@pytest.mark.parametrize("frozen", [["w1_EFD", "w3_EFD"], ["w2_EDF"], ["w1_EFD", "w2_EDF"]])
def test_frozen_weights(frozen: list[str]) -> None:
    ours, whole = experts(), experts()
    for name in frozen:
        getattr(ours, name).requires_grad_(False)
    for e in (ours, whole):
        e(rows(), COUNTS).float().square().sum().backward()
    for name, w in ours.named_parameters():
        assert (w.grad is None) == (name in frozen)
        assert w.grad is None or torch.equal(w.grad, getattr(whole, name).grad)


def test_checkpointed_and_compiled() -> None:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    def selective() -> Any:  # torchtitan's default: a dispatch mode watches
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    plain, again, chosen, compiled = (experts() for _ in range(4))
    again_too: Any = {"use_reentrant": False}
    for run in (
        plain,
        functools.partial(checkpoint, again, **again_too),
        functools.partial(checkpoint, chosen, context_fn=selective, **again_too),
        torch.compile(compiled, fullgraph=True, backend="aot_eager"),
    ):
        run(rows(), COUNTS).float().square().sum().backward()
    for other in (again, chosen, compiled):
        for w, o in zip(plain.parameters(), other.parameters(), strict=True):
            assert torch.equal(w.grad, o.grad)


def routed(experts: Any = None, dispatcher: Any = AllToAllTokenDispatcher) -> Any:
    cfg = GroupedExperts.Config(dim=D, hidden_dim=128, num_experts=E)
    moving = dispatcher.Config(num_experts=E, top_k=2)
    return RoutedExperts.Config(inner_experts=experts or cfg, token_dispatcher=moving)


def routing() -> tuple[Tensor, Tensor, Tensor]:
    """Scores and ids [2, ROWS / 2, 2], and how many tokens each expert takes."""
    draw = torch.Generator().manual_seed(5)
    scores, ids = torch.rand(2, ROWS // 2, E, generator=draw).softmax(-1).topk(2)
    return scores.requires_grad_(), ids, torch.bincount(ids.flatten(), minlength=E)


@pytest.mark.parametrize("how", ["eager", "selective", "compiled"])
def test_bits_of_the_whole_layer(how: str) -> None:
    """Tokens in, tokens out: nn.MoEExperts' bits; and torchtitan's within FP8's error."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    made = fp8moe_layer(routed()).build().bfloat16()
    made.inner_experts = experts()
    layer = same_layer(made.inner_experts)
    own = routed().build().bfloat16()
    own.inner_experts.load_state_dict(made.inner_experts.state_dict())
    found = []
    run: Any = made
    if how == "compiled":
        run = torch.compile(made, fullgraph=True, backend="aot_eager")
    elif how == "selective":
        again: Any = functools.partial(create_selective_checkpoint_contexts, [])
        run = functools.partial(checkpoint, made, use_reentrant=False, context_fn=again)
    for forward in (run, lambda x, scores, ids, _: layer(x, ids, scores), own):
        (scores, ids, counts), x = routing(), rows().detach().view(2, -1, D).requires_grad_()
        out = forward(x, scores, ids, counts)
        out.float().square().sum().backward()
        found.append([out, x.grad, scores.grad])
    found[0] += grads(made.inner_experts, 128)
    found[1] += grads(layer, 128)
    found[2] += grads(own.inner_experts, 128)
    for got, want, theirs in zip(*found, strict=True):
        assert torch.equal(got, want)
        assert (got - theirs).norm() < 0.1 * theirs.norm()


def test_other_experts_are_refused() -> None:
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    cfg = GptOssGroupedExperts.Config(dim=D, hidden_dim=128, num_experts=E, swiglu_limit=7.0)
    with pytest.raises(
        NotImplementedError, match="takes torchtitan's GroupedExperts; got GptOssGr"
    ):
        fp8moe_experts(cfg)
    with pytest.raises(NotImplementedError, match=r"\[fp8moe_layer\] takes torchtitan's Grouped"):
        fp8moe_layer(routed(cfg))
    with pytest.raises(NotImplementedError, match="AllToAllTokenDispatcher; got DeepEPTokenD"):
        fp8moe_layer(routed(dispatcher=DeepEPTokenDispatcher))
    with pytest.raises(ValueError, match="intermediate_size must be a positive multiple of 16"):
        experts(24)
    with pytest.raises(TypeError, match="unexpected keyword argument 'precision'"):
        experts(precision="fp8")


def test_another_version(tmp_path: Path) -> None:
    """One sentence says which was found."""
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan/__init__.py").touch()
    (tmp_path / "torchtitan-0.2.2.dist-info").mkdir()
    named = "Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.2.2\n"
    (tmp_path / "torchtitan-0.2.2.dist-info/METADATA").write_text(named)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "import fp8moe_cutlass.integrations.torchtitan"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert "must be torchtitan 0.3.0 or newer" in done.stderr
    assert "got 0.2.2 (No module named 'torchtitan.config')" in done.stderr


# ---- its Trainer --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return titan_cpu.assets(tmp_path_factory.mktemp("titan"))


def losses(folder: Path, text: list[str], *arguments: str, ranks: int = 1) -> list[float]:
    """Of its debug DeepSeek-V3, STEPS steps of 64 tokens per rank."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    debug = ["--module=deepseek_v3", "--config=deepseek_v3_debugmodel", "--debug.seed=1", *text]
    size = [*BATCH, f"--training.steps={STEPS}"]
    cpu = ["--training.disable_cuda_graphs", f"--dump_folder={folder}", DTENSORS]
    out = folder / "losses.json"
    done = subprocess.run(
        [*start, titan_cpu.__file__, out, *debug, *size, *cpu, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = done.stdout + done.stderr
    for kind, name in (("GroupedExperts", OURS), ("RoutedExperts", LAYER)):
        assert (f"{kind}.Config -> Fp8{kind}.Config" in said) == (name in arguments)
    found: list[float] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize(
    ("ranks", "how", "others"),
    [(1, [], []), (2, [], []), (2, [EP], [[EP, "--compile.enable"]])],
    ids=["one rank", "FSDP", "expert parallelism"],
)
def test_losses_beside_its_own(
    tmp_path: Path, text: list[str], ranks: int, how: list[str], others: list[list[str]]
) -> None:
    own = losses(tmp_path, text, *how, ranks=ranks)
    assert own[-1] < own[0] - 3
    for name, options in itertools.product((OURS, LAYER), (how, *others)):
        ours = losses(tmp_path, text, name, *options, ranks=ranks)
        assert len(ours) == len(own) == STEPS
        assert max(abs(a - b) for a, b in zip(own, ours, strict=True)) < 0.03


def test_resume(tmp_path: Path, text: list[str]) -> None:
    """Saved half-way and resumed, in FP8 and in bf16: the parameters have torchtitan's names."""
    half = STEPS // 2
    save = ["--checkpoint.enable", f"--checkpoint.interval={half}", "--checkpoint.keep_latest_k=0"]
    whole = losses(tmp_path, text, OURS, *save)
    last = tmp_path / f"checkpoint/step-{STEPS}"
    for name, options in (("ours", [OURS]), ("own", [])):
        last.rename(tmp_path / f"gone-{name}")
        again = losses(tmp_path, text, *save, *options)
        assert len(again) == half
        assert again == pytest.approx(whole[half:], abs=1e-4 if options else 0.03)


def test_page_runs_as_written(tmp_path: Path, text: list[str]) -> None:
    before = f"""import sys
sys.path.append({str(ROOT / "tests")!r})
import titan_cpu
titan_cpu.on_cpu()
titan_cpu.plain_attention()
sys.argv += {[*text, *BATCH, "--training.disable_cuda_graphs"]!r}"""
    run_python("docs/how-to/torchtitan.md", tmp_path, before)
