"""Training steps whose kernels were prepared: nothing is compiled or loaded in them."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from tests.gpu.watched import heard

GAUSSIAN = kl.gaussian()


def points(*shape):
    return torch.randn(*shape, device="cuda", requires_grad=True)


CASES = {
    "matrix": (None, lambda: (points(1000, 30), points(801, 30)), {}),
    "matrix of many features": (None, lambda: (points(4000, 200), points(3000, 200)), {}),
    "few features": ("kernel_matmul", lambda: (points(900, 3), points(700, 3), points(700)), {}),
    "features": ("kernel_matmul", lambda: (points(900, 30), points(700, 30), points(700, 4)), {}),
    "columns": (
        "kernel_matmul", lambda: (points(20_000, 64), points(9001, 64), points(9001, 90)), {},
    ),
    "blocks": (
        "kernel_matmul",
        lambda: tuple(t.double() for t in (points(9000, 5), points(7001, 5), points(7001, 2))),
        {},
    ),
    "sum": ("kernel_sum", lambda: (points(9000, 64), points(7001, 64)), {}),
    "logsumexp": ("kernel_logsumexp", lambda: (points(3000, 40), points(2001, 40)), {}),
    "min": ("kernel_min", lambda: (points(3000, 40), points(2001, 40)), {}),
    "topk": ("kernel_topk", lambda: (points(3000, 3), points(2001, 3)), {"k": 5}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_prepared_step_compiles_and_loads_nothing(name):
    reduction, tensors, values = CASES[name]
    tensors = [t.detach().requires_grad_() for t in tensors()]
    bandwidth = torch.tensor(2.0, device="cuda", dtype=tensors[0].dtype, requires_grad=True)
    values = {"bandwidth": bandwidth, **values}
    named = {} if reduction is None else {"reduction": reduction}
    kl.prepare(GAUSSIAN, *tensors, **named, **values)
    with heard() as seen:
        function = kl.run_kernel if reduction is None else getattr(kl, reduction)
        made = function(GAUSSIAN, *tensors, **values)
        made = made[0] if isinstance(made, tuple) else made
        made.sum().backward(retain_graph=True)
        made.backward(torch.ones_like(made))
    torch.cuda.synchronize()
    names = {event.name for event in seen}
    assert "launch" in names and not names & {"lookup", "compile", "load"}
    assert all(t.grad is not None for t in (*tensors, bandwidth))
