"""The FP8 flow of TransformerEngine pull request 2544 on this library's functions.

    python examples/te_grouped_linear.py [--steps 20] [--device cuda]

A MoE block with the parameters of two TransformerEngine GroupedLinears (weight0, weight1, ...).
Tokens are quantized once. TransformerEngine's Float8BlockwiseQTensor and the functions of its
names carry them from there, and no operand is cast again:

    forward   quantize - permute and pad - GEMM - SwiGLU and quantize - GEMM - unpermute and unpad
    backward  quantize - permute and pad - GEMM - SwiGLU and quantize - GEMM - unpermute and unpad,
              and for the weights' gradients FP8 transposes that shift codes by powers of two

It trains for some steps, then compares one step with nn.MoEExperts, which is the same flow in one
call. Where TransformerEngine is not installed, a stand-in of its tensor class serves.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8moe_cutlass import ops
from fp8moe_cutlass.integrations import transformer_engine as te
from fp8moe_cutlass.nn import MoEExperts

EXPERTS, TOPK, HIDDEN, INTERMEDIATE, TOKENS, ALIGN = 4, 2, 256, 128, 192, 16


class GroupedLinear(nn.Module):
    """The parameters of te.GroupedLinear(num_gemms, in_features, out_features, bias=False)."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            weight = torch.randn(out_features, in_features) * in_features**-0.5
            self.register_parameter(f"weight{i}", nn.Parameter(weight.bfloat16()))

    def stacked(self) -> Tensor:
        """[E, out, in], differentiable."""
        return torch.stack([getattr(self, f"weight{i}") for i in range(self.num_gemms)])


def grouped(q: Any, probs: Tensor, mask: Tensor) -> tuple[Any, ...]:
    """The rows of each expert, padded, in FP8: of a Float8BlockwiseQTensor of tokens."""
    tokens, counts = te.as_fp8_tensor(q), mask.sum(0)
    return te.moe_permute_and_pad_with_probs(tokens, probs, mask, counts, ALIGN)


class Flow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, mask: Tensor, fc1: Tensor, fc2: Tensor) -> Any:
        rows, row_probs, row_id_map, offsets, padded = grouped(
            te.as_blockwise_tensor(ops.quantize(x)), probs, mask
        )
        plan = ops.plan_from_counts(padded, capacity=rows.shape[0])
        w1, w1_t = ops.quantize_weight(fc1)
        w2, w2_t = ops.quantize_weight(fc2)
        z = ops.grouped_gemm(rows, w1, plan)
        y = ops.grouped_gemm(ops.act_quantize(z, plan, row_probs), w2, plan)
        ctx.save_for_backward(probs, mask, z, row_probs, row_id_map, offsets)
        ctx.held = rows, w1_t, w2_t, plan
        return te.moe_unpermute(y, row_id_map, restore_shape=x.shape, pad_offsets=offsets)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        probs, mask, z, row_probs, row_id_map, offsets = ctx.saved_tensors
        rows, w1_t, w2_t, plan = ctx.held
        dy, *_ = grouped(te.as_blockwise_tensor(ops.quantize(dout)), probs, mask)
        dh = ops.grouped_gemm(dy, w2_t, plan)
        dz = ops.act_quantize_backward(dh, z, plan, row_probs, columns="block")
        dx = te.moe_unpermute(
            ops.grouped_gemm(dz.dz, w1_t, plan),
            row_id_map,
            restore_shape=dout.shape,
            pad_offsets=offsets,
        )
        dfc1 = ops.grouped_gemm_wgrad(dz.dz_columns, ops.transpose_fp8(rows, plan), plan)
        dfc2 = ops.grouped_gemm_wgrad(ops.transpose_fp8(dy, plan), dz.h_columns, plan)
        row_of = ops.plan_from_row_id_map(
            row_id_map, rows=rows.shape[0], pad_offsets=offsets
        ).row_of.long()
        dprobs = torch.where(row_of < 0, 0.0, dz.dprobs[row_of.clamp(min=0)])
        return dx, dprobs, None, dfc1.bfloat16(), dfc2.bfloat16()


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.fc1 = GroupedLinear(EXPERTS, HIDDEN, 2 * INTERMEDIATE)
        self.fc2 = GroupedLinear(EXPERTS, INTERMEDIATE, HIDDEN)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities [T, E], and the map of each token's experts."""
        logits = self.gate(x.float())
        return te.fused_topk_with_score_function(
            logits, TOPK, True, None, None, None, "softmax", None
        )

    def forward(self, x: Tensor) -> Tensor:
        probs, mask = self.route(x)
        out: Tensor = Flow.apply(x, probs, mask, self.fc1.stacked(), self.fc2.stacked())
        return out


def beside_experts(moe: MoE, x: Tensor, dout: Tensor) -> dict[str, float]:
    """The relative difference, by norm, of one step from that of nn.MoEExperts."""
    experts = MoEExperts(EXPERTS, HIDDEN, INTERMEDIATE, device=x.device)
    with torch.no_grad():
        experts.gate_up_proj.copy_(moe.fc1.stacked())
        experts.down_proj.copy_(moe.fc2.stacked())
        probs, mask = moe.route(x)
    idx = mask.nonzero()[:, 1].view(-1, TOPK)  # ascending, the order in which sums are taken
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    experts(theirs, idx, probs.gather(1, idx)).backward(dout)
    fc1, fc2 = moe.fc1.stacked(), moe.fc2.stacked()
    fc1.retain_grad(), fc2.retain_grad()
    Flow.apply(ours, probs, mask, fc1, fc2).backward(dout)
    pairs = {
        "dx": (ours.grad, theirs.grad),
        "fc1": (fc1.grad, experts.gate_up_proj.grad),
        "fc2": (fc2.grad, experts.down_proj.grad),
    }
    return {
        k: float((a.float() - b.float()).norm() / b.float().norm()) for k, (a, b) in pairs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    if importlib.util.find_spec("transformer_engine") is None:
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        import te_stand_in

        sys.modules.update(te_stand_in.modules())
    torch.manual_seed(0)
    moe = MoE().to(given.device)
    x = torch.randn(TOKENS, HIDDEN, device=given.device).bfloat16()
    target = x.float().roll(1, dims=1)
    optimizer = torch.optim.AdamW(moe.parameters(), lr=3e-3)
    for step in range(given.steps):
        loss = (moe(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == given.steps - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    for name, error in beside_experts(moe, x, torch.randn_like(x)).items():
        print(f"{name}: {error:.1e} from nn.MoEExperts")


if __name__ == "__main__":
    main()
