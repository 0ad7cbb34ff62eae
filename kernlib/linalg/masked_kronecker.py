"""Kronecker products on incomplete grids: ``P (K1 ⊗ ... ⊗ KN) Q^T``, with P and Q the rows of the
identity that say which entries of the grid there are.

A Gaussian process on a grid of which some values are missing has such a covariance, which is no
Kronecker product itself: products with it are products with all of the grid, and systems are solved
by conjugate gradients. Its missing values are neither needed nor made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.debug import eager_only, takes_debug
from kernlib.descriptors.base import shown
from kernlib.families.kronecker_product.matmul import as_factors, kron_matmul
from kernlib.linalg.checks import refuse_meta
from kernlib.linalg.iterative import CGResult, check_limits, solve, warn_unless_converged
from kernlib.linalg.kronecker import (
    as_columns,
    as_noise,
    as_square,
    broadcast_batches,
    features,
)
from kernlib.linalg.kronecker_gradients import ImplicitSolve, product, symmetric
from kernlib.runtime.arguments import check_same_kind
from kernlib.runtime.dtypes import FLOAT_TYPES
from kernlib.runtime.tensors import (
    broadcast_shapes,
    check_dense,
    materialised,
    refuse_transforms,
    stand_ins,
)

Product = Callable[[torch.Tensor], torch.Tensor]
_NO_TRANSFORMS = "masked_kron_solve does not support; give it a batch instead"


@takes_debug
def masked_kron_matmul(
    x: torch.Tensor,
    factors: Sequence[torch.Tensor],
    rows: torch.Tensor,
    columns: torch.Tensor | None = None,
    *,
    precision: str | None = None,
    debug: bool = False,
) -> torch.Tensor:
    """``P (K1 ⊗ ... ⊗ KN) Q^T x``: the entries ``rows`` of ``(K1 ⊗ ... ⊗ KN) z``, where z has x at
    the entries ``columns`` and 0 at all others.

    - ``x``: (m,), or (..., m, C), m being the number of ``columns``.
    - ``factors``: as for :func:`kernlib.kron_matmul` with ``side="left"``, rectangular as they may
      be: those of a covariance between a grid of new points and that of the data are.
    - ``rows``, ``columns``: int64 tensors of one dimension, on x's device, in any order, none
      twice: indices into the grid in the order of the Kronecker product, ``i1 * n_2 + i2`` for two
      factors. Without ``columns`` they are the rows.
    - Dtypes, batches and ``precision`` are those of :func:`kernlib.kron_matmul`.
    - ``debug``: True writes the call's events to stderr.

    Indices in host memory are looked at in each call; of those on a device nothing is, and torch
    asserts there that they are in range, but not that none is twice. Gradients of x and the factors
    are recorded, and those of the gradients. The latent Kronecker structure is that of arXiv
    2506.06895.

    Raises ValueError for shapes and indices that do not fit, and for no ``columns`` where the
    product is not square, TypeError for other dtypes and what is no tensor.

    Example:
        >>> factors = [torch.diag(torch.tensor([1.0, 2.0])), torch.diag(torch.tensor([1.0, 10.0]))]
        >>> kl.linalg.masked_kron_matmul(torch.ones(3), factors, torch.tensor([0, 1, 3]))
        tensor([ 1., 10., 20.])
    """
    check_dense(("x",), x=x)
    factors = as_factors(factors)
    height, width = _sizes(x, factors)
    if columns is None and height != width:
        raise ValueError(
            f"columns must be given where the product of factors is not square: it is {height} by "
            f"{width}"
        )
    rows = _checked("rows", rows, height, x)
    columns = rows if columns is None else _checked("columns", columns, width, x)
    count, vector = columns.shape[0], x.dim() == 1
    x = x.unsqueeze(-1) if vector else x
    if x.dim() < 2 or x.shape[-2] != count:
        shape = tuple(x.shape[:-1] if vector else x.shape)
        raise ValueError(
            f"x must be ({count},) or (..., {count}, C) for so many columns, got shape {shape}"
        )
    grid = kron_matmul(_scattered(x, columns, width), factors, side="left", precision=precision)
    y = grid.index_select(-2, rows)
    return y.squeeze(-1) if vector else y


@eager_only
def masked_kron_solve(
    factors: Sequence[torch.Tensor],
    b: torch.Tensor,
    index: torch.Tensor,
    *,
    noise: float | torch.Tensor,
    tol: float = 1e-6,
    max_iter: int = 1000,
    check_every: int = 10,
    preconditioner: Product | None = None,
    debug: bool = False,
) -> CGResult:
    """Solve ``(P (K1 ⊗ ... ⊗ KN) P^T + noise I) x = b`` by :func:`conjugate_gradient`.

    - ``factors``: (..., n_i, n_i) with a positive semidefinite product, of which the lower
      triangle is read; their gradients are symmetric.
    - ``b``: (m,) or (..., m, C), m being the number of observed entries; (..., m) with the batch of
      the matrix is one vector. Each column of each entry of a batch has step sizes of its own.
    - ``index``: the entries of the grid that are observed, as ``rows`` of
      :func:`masked_kron_matmul`.
    - ``noise``: 0 or greater, a number, or a tensor of shape () or of a batch; one of m values is
      refused beside factors without a batch.
    - ``preconditioner``: a function of v of x's shape, (m,) for a vector, to an approximate
      inverse times v; gradients are not taken through it.
    - ``tol``, ``max_iter``, ``check_every``: as those of :func:`conjugate_gradient`.
    - ``debug``: True writes the call's events to stderr.
    - Batches of all of them broadcast. float32 or float64, the same for all tensors.

    The result is that of :func:`conjugate_gradient`: x, the true relative residuals, () or (..., C)
    in float64, and the number of iterations. A residual above ``tol`` warns with a
    :class:`kernlib.ConvergenceWarning`. In float32 they reach 1e-6 for condition numbers to 100,
    and 1e-4 at 1e4.

    Gradients of x by factors, b and noise are recorded, and those of the gradients: of a further
    system each, solved as this one and with its warning, and hence as accurate as ``tol``.

    Latent Kronecker Gaussian processes are those of arXiv 2506.06895.

    Raises ValueError for shapes, indices, noise and limits out of range, TypeError for other dtypes
    and what is no function, RuntimeError inside transforms of torch.func.

    Example:
        >>> factors = [torch.diag(torch.tensor([1.0, 2.0])), torch.diag(torch.tensor([1.0, 10.0]))]
        >>> b, index = torch.tensor([2.0, 11.0, 21.0]), torch.tensor([0, 1, 3])
        >>> kl.linalg.masked_kron_solve(factors, b, index, noise=1.0).x.round(decimals=4)
        tensor([1., 1., 1.])
    """
    factors = as_square(factors)
    tol, max_iter, check_every = check_limits(tol, max_iter, check_every)
    is_function = callable(preconditioner) and not isinstance(preconditioner, type)
    if preconditioner is not None and not is_function:
        raise TypeError(f"preconditioner must be a function of v, got {shown(preconditioner)}")
    check_dense(("index",), index=index)
    refuse_transforms(_NO_TRANSFORMS, index=index)
    index = _checked("index", index, features(factors), factors[0])
    noise = as_noise(noise, factors, index.shape[0])
    batch = broadcast_batches(factors, noise)
    columns, vector = as_columns(b, "b", factors, batch, index.shape[0])
    for name, tensor in (("b", b), ("noise", noise), ("factors", factors[0])):
        refuse_meta(name, tensor)
    results: list[CGResult] = []
    options = preconditioner, tol, max_iter, check_every
    system = _Observed(index, features(factors), vector, options, results)
    x = ImplicitSolve.apply(system, columns, noise, *(symmetric(f) for f in factors))
    warn_unless_converged("masked_kron_solve", results[0], tol)
    _, residual, iterations = results[0]
    if vector:
        x, residual = x.squeeze(-1), residual.squeeze(-1)
    return CGResult(x, residual, iterations)


class _Observed(NamedTuple):
    """A system of observed entries, for :class:`ImplicitSolve`."""

    index: torch.Tensor
    size: int  # of the grid
    vector: bool
    options: tuple  # preconditioner, tol, max_iter, check_every
    results: list[CGResult]  # to which each solution is added

    def solve(self, b: torch.Tensor, noise: torch.Tensor, factors) -> torch.Tensor:
        batch = broadcast_shapes(b.shape[:-2], broadcast_batches(factors, noise))
        columns = _Columns(*b.shape[-2:], batch)
        shift = noise[..., None, None]
        grid = b.new_zeros(*batch, self.size, columns.each)

        def matmul(v: torch.Tensor) -> torch.Tensor:
            v = columns.apart(v)
            grid.index_copy_(-2, self.index, v)  # what is not observed stays 0
            y = product(grid, factors).index_select(-2, self.index)
            return columns.side_by_side(y + shift * v)

        preconditioner, *limits = self.options
        if preconditioner is not None:
            preconditioner = columns.function(preconditioner, self.vector)
        right = columns.side_by_side(b.expand(*batch, *b.shape[-2:]))
        x, residual, iterations = solve(matmul, right, preconditioner, None, *limits)
        residual = residual.view(*batch, columns.each)
        self.results.append(CGResult(x, residual, iterations))
        return columns.apart(x).contiguous()

    def solve_again(self, b: torch.Tensor, noise: torch.Tensor, factors) -> torch.Tensor:
        """For a gradient."""
        again = self._replace(results=[])
        x = ImplicitSolve.apply(again, b, noise, *factors)
        warn_unless_converged("a gradient of masked_kron_solve", again.results[0], self.options[1])
        return x

    def product(self, x: torch.Tensor, factors) -> torch.Tensor:
        y = product(_scattered(x, self.index, self.size), factors)
        return y.index_select(-2, self.index)


class _Columns(NamedTuple):
    """The columns of all entries of a batch side by side in one matrix: :func:`conjugate_gradient`
    steps each column alone."""

    rows: int
    each: int
    batch: torch.Size

    def side_by_side(self, v: torch.Tensor) -> torch.Tensor:
        return v.movedim(-2, 0).reshape(self.rows, math.prod(self.batch) * self.each)

    def apart(self, v: torch.Tensor) -> torch.Tensor:
        return v.view(self.rows, *self.batch, self.each).movedim(0, -2)

    def function(self, preconditioner: Product, vector: bool) -> Product:
        """A function of the columns, of one of v as its caller knows it."""

        def called(v: torch.Tensor) -> torch.Tensor:
            v = self.apart(v)
            v = v.squeeze(-1) if vector else v
            y = preconditioner(v)
            if not isinstance(y, torch.Tensor) or y.shape != v.shape:
                shown = getattr(y, "shape", None)
                shown = type(y).__name__ if shown is None else f"shape {tuple(shown)}"
                raise ValueError(
                    f"preconditioner must return a tensor of shape {tuple(v.shape)}, got {shown}"
                )
            return self.side_by_side(y.unsqueeze(-1) if vector else y)

        return called


def _sizes(x: torch.Tensor, factors) -> list[int]:
    """Rows and columns of the product of factors. Raises ValueError and TypeError."""
    for index, factor in enumerate(factors):
        name = f"factors[{index}]"
        check_same_kind("x", x, name, factor, FLOAT_TYPES)
        if factor.dim() < 2:
            raise ValueError(f"{name} must be a matrix, got shape {tuple(factor.shape)}")
    return [math.prod([factor.shape[d] for factor in factors]) for d in (-2, -1)]


def _scattered(x: torch.Tensor, columns: torch.Tensor, size: int) -> torch.Tensor:
    """x (..., m, C) at its entries of the grid."""
    return x.new_zeros(*x.shape[:-2], size, x.shape[-1]).index_copy(-2, columns, x)


def _checked(name: str, index, size: int, like: torch.Tensor) -> torch.Tensor:
    """Entries of a grid of ``size``, in memory. Raises ValueError and TypeError."""
    check_dense((name,), **{name: index})
    if index.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {index.dtype}")
    if index.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(index.shape)}")
    if index.device != like.device:
        raise ValueError(f"{name} must be on {like.device} as the others, got {index.device}")
    if _is_traced(index):
        return index
    index = materialised(index)  # of a zero tensor torch's functions would read no memory
    if index.device.type != "cpu" or not index.numel():
        return index
    least, most = map(int, index.aminmax())
    if least < 0 or most >= size:
        wrong = least if least < 0 else most
        entries = f"0 to {size - 1}, entries of the grid" if size else "empty, as the grid is"
        raise ValueError(f"{name} must be {entries}, got {wrong}")
    there = torch.zeros(size, dtype=torch.bool, device="cpu")
    there[index] = True
    twice = index.numel() - int(there.sum())
    if twice:
        raise ValueError(f"{name} must hold no entry twice, got {twice} that stand there before")
    return index


def _is_traced(index: torch.Tensor) -> bool:
    """Whether it has no values to look at."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return is_dynamo_compiling() or stand_ins(index) or wrapped(index)
