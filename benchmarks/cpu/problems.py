"""The calls that are measured on a CPU, and what a user of torch would write instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

import kernlib as kl

POINTS, FEATURES = 2000, 64
BANDWIDTH = 8.0
SOLVED = (1000, 2000, 5000)
REGULARIZATION = 1e-2
WEIGHT = 2048  # rows and columns of a sparse weight
DENSITY, BLOCK, STORED = 0.3, 32, 0.2


class Problem(NamedTuple):
    """A call without arguments, plain torch's, and what both should give in float64."""

    ours: Callable[[], torch.Tensor]
    torchs: Callable[[], torch.Tensor]
    exact: Callable[[], torch.Tensor]
    factor: float  # how many times torch's time ours may take, 40 us in any case


def distance(p: float, count: int, features: int) -> Problem:
    """Distances of random points, by torch.cdist."""
    a, b = _points(count, features), _points(count, features, seed=1)
    return Problem(
        lambda: kl.cdist(a, b, p=p),
        lambda: torch.cdist(a, b, p=p),
        lambda: torch.cdist(a.double(), b.double(), p=p),
        1.1,
    )


def gaussian(count: int, features: int) -> Problem:
    """The Gaussian kernel of random points, by torch.cdist, a square and an exponential."""
    a, b = _points(count, features), _points(count, features, seed=1)
    kernel = kl.gaussian()
    return Problem(
        lambda: kl.run_kernel(kernel, a, b, bandwidth=BANDWIDTH),
        lambda: _gaussian(a, b, BANDWIDTH),
        lambda: _gaussian(a.double(), b.double(), BANDWIDTH),
        1.1,
    )


def kernel_system(count: int) -> Problem:
    """A regression on points of 8 features, by torch.linalg.solve of the matrix."""
    x, y = _points(count, 8), _points(count, 1, seed=1)
    kernel = kl.gaussian()

    def solved(x, y):
        k = _gaussian(x, x, 1.0)
        k.diagonal().add_(REGULARIZATION)
        return torch.linalg.solve(k, y)

    return Problem(
        lambda: (
            kl.linalg.solve_kernel(
                kernel, x, y, regularization=REGULARIZATION, tol=1e-4, bandwidth=1.0
            ).x
        ),
        lambda: solved(x, y),
        lambda: solved(x.double(), y.double()),
        2.0,
    )


def sparse(columns: int) -> Problem:
    """A compressed weight times some vectors, beside the dense weight."""
    kept = torch.rand(WEIGHT, WEIGHT, generator=torch.Generator().manual_seed(2)) < DENSITY
    dense, x = _points(WEIGHT, WEIGHT) * kept, _points(columns, WEIGHT, seed=1)
    w = kl.sparse.compress(dense, "bitmap")
    return _product(lambda: kl.sparse.matmul(w, x), x, dense.T)


def block_sparse(columns: int) -> Problem:
    """A block-sparse weight times some vectors, beside the dense weight."""
    blocks = WEIGHT // BLOCK
    mask = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(2)) < STORED
    layout = kl.blocksparse.Layout(mask, BLOCK)
    values = _points(layout.capacity, BLOCK, BLOCK)
    x = _points(WEIGHT, columns, seed=1)
    return _product(lambda: kl.blocksparse.dsd(values, x, layout), layout.to_dense(values), x)


def _product(ours: Callable, left: torch.Tensor, right: torch.Tensor) -> Problem:
    return Problem(ours, lambda: left @ right, lambda: left.double() @ right.double(), 2.0)


def _gaussian(a: torch.Tensor, b: torch.Tensor, bandwidth: float) -> torch.Tensor:
    return torch.exp(-(torch.cdist(a, b) ** 2) / (2 * bandwidth**2))


def _points(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LARGE = f"{POINTS}x{POINTS}x{FEATURES}"
PROBLEMS: dict[str, Callable[[], Problem]] = {
    f"gaussian {LARGE}": lambda: gaussian(POINTS, FEATURES),
    **{
        f"cdist p={p:g} {LARGE}": lambda p=p: distance(p, POINTS, FEATURES)
        for p in (2.0, 1.0, math.inf)
    },
    "gaussian 10x10x3": lambda: gaussian(10, 3),
    "cdist p=2 10x10x3": lambda: distance(2.0, 10, 3),
    **{f"solve_kernel {n}x8": lambda n=n: kernel_system(n) for n in SOLVED},
    **{f"sparse {WEIGHT}x{WEIGHT} {DENSITY:.0%} x{n}": lambda n=n: sparse(n) for n in (1, 16, 128)},
    **{
        f"block-sparse {WEIGHT}x{WEIGHT} {STORED:.0%} x{n}": lambda n=n: block_sparse(n)
        for n in (1, 16, 128)
    },
}
