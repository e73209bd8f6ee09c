"""verify's own references, on other inputs than the ones it takes, and its limits."""

from __future__ import annotations

import pytest
import torch

from fp8moe_cutlass.tools.verify import checks
from fp8moe_cutlass.tools.verify.compare import Inputs
from tolerance import C_CPU, C_CUDA


@pytest.mark.parametrize("seed", [2, 3, 5])
def test_sums_hold_for_any_input(seed: int) -> None:
    """Products are fused: rounded ones differ in a bf16 result about once in 10^5 elements."""
    found = list(checks.check_unpermute(Inputs(torch.device("cpu"), seed)))
    assert [c for c in found if not c.passed] == []
    assert len(found) == 3


def test_gemms_have_the_limit_of_the_tests() -> None:
    """The page has one column for both."""
    assert checks.MAX_C == {"cpu": C_CPU, "cuda": C_CUDA}
