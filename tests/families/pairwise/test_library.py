"""What recorded pairwise calls promise beyond every operation's ``tests/contract/library``."""

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.gradients import operators
from tests.contract.library.cases import values

M, N, K, L = 5, 4, 3, 2


@pytest.mark.parametrize("width", [2.0, torch.tensor(2.0), torch.tensor([2.0]), torch.ones(L)])
@pytest.mark.parametrize(
    ("left", "right"), [((M,), (N,)), ((1, M), (N,)), ((M,), (L, N)), ((L, M), (1, N))]
)
def test_recorded_calls_have_the_shapes_of_eager_ones(left, right, width):
    a, b = values(*left, K).requires_grad_(), values(*right, K).requires_grad_()
    found = operators.recorded(kl.laplace_l1(), a, b, {"bandwidth": width}, 0)
    torch.testing.assert_close(found, kl.run_kernel(kl.laplace_l1(), a, b, bandwidth=width))
