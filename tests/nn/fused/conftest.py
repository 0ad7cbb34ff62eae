"""The products that layers compute."""

from __future__ import annotations

import pytest

from kernlib.nn import sparse_linear


@pytest.fixture
def products(monkeypatch) -> list[tuple[int, int]]:
    """The shapes of the matrices that layers multiply by."""
    shapes, run = [], sparse_linear.run_kernel

    def counting(descriptor, matrix, *rest, **named):
        shapes.append(matrix.shape)
        return run(descriptor, matrix, *rest, **named)

    monkeypatch.setattr(sparse_linear, "run_kernel", counting)
    return shapes
