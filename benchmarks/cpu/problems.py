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
SMALL_WEIGHTS = ((64, 1), (512, 1), (512, 16))  # rows and columns of a weight, vectors
SMALL_BLOCKS = ((256, 8), *SMALL_WEIGHTS[1:])
SMALL_DENSITY, SMALL_STORED = 0.5, 0.25
FACTORS = (  # patterns of Kronecker-sparse factors, rows of x
    ((1, 16, 16, 4), 8),
    ((6, 64, 64, 1), 16),
    ((6, 64, 64, 1), 1024),
    ((1, 768, 192, 2), 197),
    ((4, 32, 32, 8), 256),
    ((1, 64, 64, 16), 2048),
)
GRIDS = (  # sizes of square factors of Kronecker products, rows of x
    ((5, 3), 10),
    ((16, 16, 16), 1),
    ((16, 16, 16), 256),
    ((64, 64), 16),
    ((64, 64), 256),
    ((7, 11, 13), 100),
    ((32, 32, 32), 16),
)


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


def kronecker_sparse(pattern: tuple, rows: int, activated: bool = False) -> Problem:
    """A Kronecker-sparse factor, by one einsum; with a bias and GELU, if it is ``activated``."""
    a, _, c, d = pattern
    made = kl.KroneckerSparse(*pattern, epilogue=(kl.Bias(), kl.Gelu()) if activated else ())
    x, weight = _points(rows, a * c * d), _points(*pattern, seed=1) / c**0.5
    bias = _points(made.out_features, seed=2)

    def product(x, weight, bias):
        y = torch.einsum("nikl,ijkl->nijl", x.view(-1, a, c, d), weight).flatten(1)
        return torch.nn.functional.gelu(y + bias) if activated else y

    given = {"bias": bias} if activated else {}
    return Problem(
        lambda: kl.run_kernel(made, x, weight, **given),
        lambda: product(x, weight, bias),
        lambda: product(x.double(), weight.double(), bias.double()),
        1.1,
    )


def kronecker_product(sizes: tuple, rows: int) -> Problem:
    """A product with square factors, factor by factor on the strides of what there is."""
    x = _points(rows, math.prod(sizes))
    factors = [_points(size, size, seed=1) / size**0.5 for size in sizes]

    def product(y, *factors):
        for index, factor in enumerate(factors):
            before = rows * math.prod(sizes[:index])
            last = index == len(factors) - 1
            y = y.reshape(before, -1) if last else y.reshape(before, len(factor), -1)
            y = y @ factor if last else factor.mT @ y
        return y.reshape(rows, -1)

    return Problem(
        lambda: kl.kron_matmul(x, factors),
        lambda: product(x, *factors),
        lambda: product(x.double(), *(factor.double() for factor in factors)),
        1.1,
    )


def sparse(columns: int, size: int = WEIGHT, density: float = DENSITY) -> Problem:
    """A compressed weight times some vectors, beside the dense weight."""
    kept = torch.rand(size, size, generator=torch.Generator().manual_seed(2)) < density
    dense, x = _points(size, size) * kept, _points(columns, size, seed=1)
    w = kl.sparse.compress(dense, "bitmap")
    return _product(lambda: kl.sparse.matmul(w, x), x, dense.T)


def block_sparse(columns: int, size: int = WEIGHT, stored: float = STORED) -> Problem:
    """A block-sparse weight times some vectors, beside the dense weight."""
    layout, values = _blocks(size, stored)
    x = _points(size, columns, seed=1)
    return _product(lambda: kl.blocksparse.dsd(values, x, layout), layout.to_dense(values), x)


def block_sparse_layer(rows: int, size: int, stored: float) -> Problem:
    """The product of a linear layer, ``x W^T``, beside the dense weight."""
    layout, values = _blocks(size, stored)
    x, dense = _points(rows, size, seed=1), layout.to_dense(values)
    return _product(lambda: kl.blocksparse.dds(x, values, layout, transpose_b=True), x, dense.T)


def _blocks(size: int, stored: float) -> tuple[kl.blocksparse.Layout, torch.Tensor]:
    blocks = size // BLOCK
    mask = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(2)) < stored
    layout = kl.blocksparse.Layout(mask, BLOCK)
    return layout, _points(layout.capacity, BLOCK, BLOCK)


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
    **{
        f"sparse {size}x{size} {SMALL_DENSITY:.0%} x{n}": (
            lambda n=n, size=size: sparse(n, size, SMALL_DENSITY)
        )
        for size, n in SMALL_WEIGHTS
    },
    **{
        f"block-sparse {size}x{size} {SMALL_STORED:.0%} x{n}": (
            lambda n=n, size=size: block_sparse(n, size, SMALL_STORED)
        )
        for size, n in SMALL_BLOCKS
    },
    f"block-sparse layer 1024x1024 {SMALL_STORED:.0%} x256": (
        lambda: block_sparse_layer(256, 1024, SMALL_STORED)
    ),
    **{
        f"Kronecker-sparse ({','.join(map(str, pattern))}) x{rows}": (
            lambda pattern=pattern, rows=rows: kronecker_sparse(pattern, rows)
        )
        for pattern, rows in FACTORS
    },
    "Kronecker-sparse (6,64,64,1) x1024, bias and GELU": (
        lambda: kronecker_sparse((6, 64, 64, 1), 1024, activated=True)
    ),
    **{
        f"Kronecker product {'x'.join(map(str, sizes))}, {rows} rows": (
            lambda sizes=sizes, rows=rows: kronecker_product(sizes, rows)
        )
        for sizes, rows in GRIDS
    },
}
