"""One call or more of every family, beside what one would write in torch: for demo and bench."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

BOUNDS = {"fp32": 1e-5, "fp16": 2e-3}  # of errors, relative to float64 in the Frobenius norm
CHECKED_ROWS = 64  # of a result, which float64 computes too


class Place(NamedTuple):
    """Where the calls run and what kernels are compiled for; ``index`` is None without a GPU."""

    index: int | None
    name: str
    arch: str


class Call(NamedTuple):
    """A call of :func:`kernlib.run_kernel` with ``operands`` and ``arguments``, and the same result
    by ``rival(*dense, **arguments)`` in torch. The rows of the result are those of ``dense[0]``."""

    family: str
    name: str
    precision: str
    descriptor: Any
    operands: tuple
    arguments: dict[str, Any]
    rival: Callable[..., Tensor]
    dense: tuple[Tensor, ...]

    def run(self) -> Tensor:
        import kernlib

        return kernlib.run_kernel(self.descriptor, *self.operands, **self.arguments)

    def by_torch(self) -> Tensor:
        return self.rival(*self.dense, **self.arguments)

    def error(self) -> float:
        """The error of the first rows, against torch in float64."""
        rows, *rest = self.dense
        operands = [rows[:CHECKED_ROWS], *rest]
        arguments = {name: _wide(value) for name, value in self.arguments.items()}
        exact = self.rival(*map(_wide, operands), **arguments)
        return ((self.run()[:CHECKED_ROWS].double() - exact).norm() / exact.norm()).item()

    @property
    def bound(self) -> float:
        """The largest error that is right."""
        return BOUNDS[self.precision]


def _wide(value):
    return value.double() if hasattr(value, "double") else value


def compiled(calls: list[Call], place: Place, show: bool | None = None) -> list[frozenset[str]]:
    """Compile the calls' kernels together, on all cores; the keys of each call's. ``show`` is as
    for :func:`kernlib.compile`'s ``progress``."""
    from kernlib.ahead import build_all, specs
    from kernlib.jit import service

    where = () if place.index is None else (place.index,)
    needed = [
        specs(call.descriptor, place.arch, call.operands, call.arguments, *where) for call in calls
    ]
    build_all([(spec, place.arch) for group in needed for spec in group], None, show)
    return [frozenset(service.digest(spec, place.arch).hex() for spec in group) for group in needed]


class Maker:
    """Makes calls on one device, with equal numbers for each maker of one device."""

    def __init__(self, device):
        import torch

        self._device = device
        self._random = torch.Generator(device).manual_seed(0)

    def pairwise(self, name: str, points: int, columns: int, features: int, width: float) -> Call:
        """``gaussian`` or ``laplace_l1`` of a bandwidth."""
        import kernlib as kl

        x, y = self._normal("fp32", points, features), self._normal("fp32", columns, features)
        rival = {"gaussian": gaussian, "laplace_l1": laplace}[name]
        text = f"{name} {points}x{columns}x{features}"
        descriptor = getattr(kl, name)()
        arguments = {"bandwidth": width}
        return Call("pairwise", text, "fp32", descriptor, (x, y), arguments, rival, (x, y))

    def kronecker_sparse(self, pattern: tuple, rows: int, precision: str) -> Call:
        """A layer: one factor, a bias and GELU."""
        import kernlib as kl

        descriptor = kl.KroneckerSparse(*pattern, epilogue=(kl.Bias(), kl.Gelu()))
        x = self._normal(precision, rows, descriptor.in_features)
        weight = self._normal(precision, *pattern) / pattern[2] ** 0.5
        bias = {"bias": self._normal(precision, descriptor.out_features)}
        text = f"({','.join(map(str, pattern))}), {rows} rows"
        both = (x, weight)
        return Call("Kronecker-sparse", text, precision, descriptor, both, bias, factor, both)

    def kronecker_product(self, sizes: tuple, rows: int, precision: str) -> Call:
        import math

        import kernlib as kl

        descriptor = kl.KroneckerProduct(sizes)
        x = self._normal(precision, rows, math.prod(sizes))
        factors = [self._normal(precision, size, size) / size**0.5 for size in sizes]
        text = f"{'⊗'.join(map(str, sizes))}, {rows} rows"
        both = (x, *factors)
        return Call("Kronecker product", text, precision, descriptor, both, {}, kronecker, both)

    def sparse(self, rows: int, columns: int, precision: str, format: str = "auto") -> Call:
        """A weight of which half is pruned, times one vector. Of the formats with kernels for
        float32, "macko" is made fastest on a CPU."""
        import kernlib as kl

        drawn = self._normal(precision, rows, columns) / columns**0.5
        dense = kl.sparse.magnitude(drawn, density=0.5)
        x = self._normal(precision, 1, columns)
        operands, text = (kl.sparse.compress(dense, format), x), f"{rows}x{columns}, half zeros"
        return Call("sparse", text, precision, kl.SparseMatmul(), operands, {}, linear, (x, dense))

    def block_sparse(self, size: int, rows: int, precision: str) -> Call:
        """A quarter of the 64 x 64 blocks."""
        import kernlib as kl

        layout = kl.blocksparse.random(size, size, 64, 0.25, device=self._device)
        values = self._normal(precision, layout.capacity, 64, 64) / size**0.5
        x, descriptor = self._normal(precision, rows, size), kl.BlockSparseMatmul("dds")
        dense, text = layout.to_dense(values), f"{size}x{size}, 1 in 4"
        operands = (layout, x, values)
        return Call("block-sparse", text, precision, descriptor, operands, {}, matmul, (x, dense))

    def _normal(self, precision: str, *sizes: int) -> Tensor:
        import torch

        drawn = torch.randn(sizes, generator=self._random, device=self._device, dtype=torch.float32)
        return drawn.half() if precision == "fp16" else drawn


# What one would write in torch.


def gaussian(x, y, bandwidth: float) -> Tensor:
    import torch

    return torch.exp(torch.cdist(x, y).square() / (-2 * bandwidth**2))


def laplace(x, y, bandwidth: float) -> Tensor:
    import torch

    return torch.exp(torch.cdist(x, y, p=1) / -bandwidth)


def factor(x, weight, bias) -> Tensor:
    import torch

    a, _, c, d = weight.shape
    product = torch.einsum("nikl,ijkl->nijl", x.view(-1, a, c, d), weight)
    return torch.nn.functional.gelu(product.flatten(1) + bias)


def kronecker(x, *factors) -> Tensor:
    """The last factor on contiguous runs, and its index to the front, factor after factor."""
    y = x
    for factor in reversed(factors):
        y = (y.reshape(len(x), -1, len(factor)) @ factor).mT.reshape(len(x), -1)
    return y


def linear(x, weight) -> Tensor:
    import torch

    return torch.nn.functional.linear(x, weight)


def matmul(x, dense) -> Tensor:
    return x @ dense
