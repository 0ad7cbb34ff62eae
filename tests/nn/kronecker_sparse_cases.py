"""What the tests of KSLinear share: patterns, tensors and the matrix by its index formula."""

from __future__ import annotations

import torch

import kernlib.nn.kronecker_sparse as implementation
from kernlib.nn import KSLinear

ALGOS = ("kernel", "einsum", "bmm", "dense", "sparse", "bsr")
LAYOUTS = (False, True)  # bs_last

# b != c, gcd(b, c) = 1, a > 1 with d > 1, block-diagonal, dense, diagonal, and sizes of 1.
PATTERNS = [
    (2, 3, 5, 4), (1, 4, 7, 1), (3, 4, 6, 1), (1, 6, 4, 3), (5, 1, 1, 3), (2, 1, 4, 2),
    (2, 8, 1, 3), (1, 1, 1, 1),
]  # fmt: skip
CHAIN = [(2, 3, 6, 4), (4, 5, 6, 1), (1, 3, 4, 5)]


def random(*shape, dtype=torch.float64, seed=0, requires_grad=False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return values.requires_grad_(requires_grad)


def matrix(weight: torch.Tensor) -> torch.Tensor:
    """K of one factor in float64, entry by entry."""
    a, b, c, d = weight.shape
    values = weight.detach().double()
    found = torch.zeros(a * b * d, a * c * d, dtype=torch.float64)
    for i in range(a):
        for l in range(d):
            rows = [i * b * d + j * d + l for j in range(b)]
            columns = [i * c * d + k * d + l for k in range(c)]
            for j, row in enumerate(rows):
                for k, column in enumerate(columns):
                    found[row, column] = values[i, j, k, l]
    return found


def product(layer: KSLinear) -> torch.Tensor:
    """The matrix of a layer in float64, of matrices by the index formula."""
    found = torch.eye(layer.in_features, dtype=torch.float64)
    for weight in layer.factors:
        found = matrix(weight) @ found
    return found


def layer(patterns, algo="auto", bs_last=False, dtype=torch.float64, seed=0, **options) -> KSLinear:
    """A layer whose parameters depend on patterns and seed alone."""
    if isinstance(patterns[0], int):
        patterns = [patterns]
    made = KSLinear(patterns, algo=algo, bs_last=bs_last, dtype=dtype, **options)
    with torch.no_grad():
        for place, parameter in enumerate(made.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed + 17 * place) / 2)
    return made


def noted_storage(monkeypatch) -> list:
    """What later calls derive of each weight and keep, None where they keep nothing."""
    noted, real = [], implementation.derived

    def derived(*given):
        noted.append(real(*given))
        return noted[-1]

    monkeypatch.setattr(implementation, "derived", derived)
    return noted


def inputs(made: KSLinear, *batch, seed=1, **options) -> torch.Tensor:
    """An input of a layer with these batch dimensions, in its dtype."""
    shape = (made.in_features, *batch) if made.bs_last else (*batch, made.in_features)
    return random(*shape, dtype=made.factors[0].dtype, seed=seed, **options)


def expected(made: KSLinear, x: torch.Tensor) -> torch.Tensor:
    """Product and bias in float64, without activation, in the layout of the layer."""
    first = x.detach().double().movedim(0, -1) if made.bs_last else x.detach().double()
    found = first @ product(made).T
    if made.bias is not None:
        found = found + made.bias.detach().double()
    return found.movedim(-1, 0) if made.bs_last else found


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return ((found.detach().double() - wanted).norm() / wanted.norm()).item()
