"""Attention over a sequence that two GPUs share: the result and gradients of one."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_attention import CASES, worst

BOUNDS = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 2e-6, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_attention_of_one_gpu(pool, case, dtype):
    for kv_heads in (4, 2):
        for answer in pool.run(worst, case, kv_heads, dtype, "cuda"):
            if isinstance(answer, Exception):
                raise answer
            assert answer < BOUNDS[dtype]


def fragments() -> float:
    """With memory that torch fills with NaN: nothing is read that was not written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        return max(worst(case, 2, torch.bfloat16, "cuda") for case in ("global", "heads"))
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_read_that_was_not_written(pool):
    for answer in pool.run(fragments):
        if isinstance(answer, Exception):
            raise answer
        assert answer < BOUNDS[torch.bfloat16]
