"""Solvers that promise the same bits each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import kernlib as kl
from kernlib import linalg
from tests.support.repeats import Maker


def iterative(make: Maker) -> Iterator[tuple[str, Callable]]:
    x, y = make(make.rows, 5), make(make.rows, 2)

    def solved() -> tuple[torch.Tensor, ...]:  # a preconditioner would be cuSOLVER's
        numbers = {"regularization": 1.0, "bandwidth": 2.0, "rank": 0}
        found = linalg.solve_kernel(kl.gaussian(), x, y, tol=1e-3, **numbers)
        return found.x, found.residual

    yield "solve_kernel", solved


def direct(make: Maker) -> Iterator[tuple[str, Callable]]:
    m, b = make(65, 65), make(65, 2)
    a = m @ m.mT + torch.eye(65, device=make.device)
    yield "solve_cholesky", lambda: linalg.solve_cholesky(a, b)
    yield "solve_lu", lambda: linalg.solve_lu(a, b)
    yield "eigh", lambda: linalg.eigh(a)
