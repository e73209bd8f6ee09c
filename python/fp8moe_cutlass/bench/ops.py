"""`bench ops`: every operator beside its limit.

The limit of an operator that memory bounds is a copy of the same bytes; of a GEMM, dense
arithmetic. Both are measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .cases import CASES, Work
from .record import OnResult, Record, environment, ignore, row
from .shapes import SHAPES, Shape
from .timing import Limits, Run

# By operator and name: what makes another library's call from the inputs of a Work, or None.
References = Mapping[str, Mapping[str, Callable[[dict[str, Any]], Run | None]]]


def run_ops(
    device: torch.device,
    only: Iterable[str] | None = None,
    quick: bool = False,
    on_result: OnResult = ignore,
    references: References = {},  # noqa: B006 (never written)
) -> Record:
    """The record of the operators `only` (default: all). quick: one tiny shape per operator.

    Raises ValueError for an operator that has no case.
    """
    names = list(only or CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise ValueError(f"[bench] --op must be among {', '.join(CASES)}; got {', '.join(unknown)}")
    torch.manual_seed(0)
    limits = Limits(device)
    limits.wake()
    results: list[Record] = []
    for op in names:
        kind, case = CASES[op]
        for shape in SHAPES["quick" if quick else device.type][kind]:
            for work in case(shape, device):
                results.append(measure(op, shape, work, limits, references))
                on_result(results[-1])
    return {"environment": environment(limits), "results": results}


def measure(op: str, shape: Shape, work: Work, limits: Limits, references: References) -> Record:
    """One row; the operator, its references and, where it is a call, its limit take turns."""
    found = {name: factory(work.inputs) for name, factory in references.get(op, {}).items()}
    calls = {name: call for name, call in found.items() if call is not None}
    limit = None
    if work.mnk is None:
        limit = limits.copy(work.bytes)
    elif limits.device.type == "cpu":
        limit = limits.matmul(*work.mnk)
    ours, *others = limits.timer.measure(work.run, *calls.values(), *([limit] if limit else []))
    limit_ms = others[-1].ms if limit else work.flops / limits.tensor_tflops / 1e9
    sustained = limits.timer.sustained(work.run) if work.flops else None
    return row(
        op,
        shape,
        work.variant,
        ours,
        bytes=work.bytes,
        flops=work.flops,
        limit_ms=limit_ms,
        peers={name: other.ms for name, other in zip(calls, others, strict=False)},
        **({} if sustained is None else {"sustained_ms": sustained}),
    )
