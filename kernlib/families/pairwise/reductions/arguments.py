"""A reduction of a kernel matrix as it was asked for: its arguments checked, its shapes known."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernlib.descriptors.base import Descriptor, as_int, refuse_descriptor, shown
from kernlib.families.pairwise import checks
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import plain
from kernlib.runtime.tensors import (
    check_dense,
    check_memory,
    is_mapped,
    materialised,
    refuse_overlap,
    refuse_transforms,
)

_ADVICE = (
    "reductions of kernel matrices support as torch.vmap alone, where they take no out: gradients "
    "are torch.autograd.grad's, outside of torch.func"
)


class Request(NamedTuple):
    """A reduction's arguments. ``v`` is None, or (N, C) or (L, N, C), of a log-sum-exp what it adds
    to the values of each column; ``descriptor`` is symmetric no more, and ``b`` given."""

    descriptor: Pairwise
    a: torch.Tensor
    b: torch.Tensor
    v: torch.Tensor | None
    row_offset: int
    col_offset: int
    hyperparameters: dict

    def transposed(self) -> Request:
        """With a and b exchanged, whose matrix is the transpose unless the descriptor is signed."""
        return self._replace(
            a=self.b, b=self.a, row_offset=self.col_offset, col_offset=self.row_offset
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that a gradient may reach, by name."""
        named = {"a": self.a, "b": self.b, "v": self.v, **self.hyperparameters}
        return {name: t for name, t in named.items() if isinstance(t, torch.Tensor)}


class Nearest(NamedTuple):
    """The reduction of a row to its ``k`` smallest or largest entries and their places; others are
    called by a name."""

    k: int
    largest: bool


class Shape(NamedTuple):
    """``batch`` entries of a matrix M x N over K features, which all share one or are ``matrices``
    of their own; ``columns`` of v, 0 without one. ``batched``: whether results have a batch
    dimension."""

    m: int
    n: int
    k: int
    batch: int
    columns: int
    batched: bool
    matrices: int


def request_of(descriptor, a, b, v, row_offset, col_offset, hyperparameters) -> Request:
    """The request of a call whose tensors are dense; ``v`` (N,) becomes (N, 1). Raises TypeError,
    ValueError."""
    check_tensors(descriptor, a, b, v)
    refuse_transforms(_ADVICE, a=a, b=b, v=v)
    descriptor, b = sides(descriptor, a, b, row_offset, col_offset)
    if v is not None:
        v = materialised(v[:, None] if v.dim() == 1 else v)
    a, b = materialised(a), materialised(b)
    values = {name: plain(name, value) for name, value in hyperparameters.items()}
    return Request(descriptor, a, b, v, row_offset, col_offset, values)


def refuse_own_names(task: str, descriptor, own: tuple[str, ...]) -> None:
    """Raises ValueError for a parameter of the descriptor by the name of one of the task's ``own``
    arguments, which would take its value."""
    for name in descriptor.parameters if isinstance(descriptor, Pairwise) else ():
        if name in own:
            raise ValueError(
                f"parameter name {name!r} of {descriptor.describe()} is taken by an argument of "
                f"{task}; choose another"
            )


def refuse_differentiated(a, b, v, values: dict) -> None:
    """Raises RuntimeError for a tensor inside a transform of torch.func other than vmap."""
    if not is_mapped(a, b, v, *values.values()):
        tensors = {name: t for name, t in values.items() if isinstance(t, torch.Tensor)}
        refuse_transforms(_ADVICE, a=a, b=b, v=v, **tensors)


def check_tensors(descriptor, a, b, v) -> None:
    """Raises TypeError for what is no Pairwise descriptor, and for what is neither a dense tensor
    nor None."""
    if not isinstance(descriptor, Pairwise):
        kind = "Pairwise descriptor" if isinstance(descriptor, Descriptor) else "descriptor"
        refuse_descriptor(f"{kind} such as gaussian()", descriptor)
    checks.check_tensors(a, b, None)
    check_dense((), v=v)


def sides(descriptor: Pairwise, a, b, row_offset, col_offset) -> tuple[Pairwise, torch.Tensor]:
    """A descriptor that is symmetric no more, and b, which for one that was is a. Raises
    ValueError."""
    if descriptor.symmetric:
        if b is not None and b is not a:
            raise ValueError("symmetric=True reduces K(a, a): leave b out, or use symmetric=False")
        if row_offset != col_offset:
            raise ValueError(
                f"symmetric=True needs row_offset == col_offset, got {row_offset} and {col_offset}"
            )
        descriptor, b = descriptor.replace(symmetric=False), a
    if b is None:
        raise ValueError("b is missing; for K(a, a) pass a twice or use symmetric=True")
    return descriptor, b


def shape_of(request: Request, reduction: str | Nearest = "matmul") -> Shape:
    """Check the request of a reduction. Raises ValueError, TypeError."""
    descriptor, a, b, v, rows, columns, values = request
    call = checks.check_call(descriptor, a, b, None, False, rows, columns, values)
    size = _result(call.out_shape, a, v, reduction)
    batched = len(size) > (1 if v is None else 2)
    width = 0 if v is None else v.shape[-1]
    batch = size[0] if batched else 1
    return Shape(call.m, call.n, call.k, batch, width, batched, call.batch)


def check_meta(
    descriptor, a, b, v, row_offset, col_offset, hyperparameters, reduction: str = "matmul"
) -> Shape:
    """Check a call on tensors of the meta device as one on others is. Raises ValueError,
    TypeError."""
    request = request_of(descriptor, a, b, v, row_offset, col_offset, hyperparameters)
    return shape_of(request, reduction)


def result_shape(
    a, b, v, tensors: dict[str, torch.Tensor], reduction: str = "matmul"
) -> tuple[int, ...]:
    """The shape of a result, (M,) or (M, C) behind a batch if there is one, after the checks that
    need no descriptor and no value: sizes may be symbols. Raises ValueError and TypeError."""
    return _result(checks.check_shapes(a, b, None, tensors), a, v, reduction)


def _result(
    matrix: tuple[int, ...], a: torch.Tensor, v: torch.Tensor | None, reduction: str | Nearest
) -> tuple[int, ...]:
    """The result's shape from that of the matrix; v is checked."""
    if v is None:
        return tuple(matrix[:-1])
    batch = matrix[0] if len(matrix) == 3 else 1
    _check_v(v, a, matrix[-1], batch, reduction)
    columns = tuple(v.shape[-1:]) if v.dim() > 1 else ()
    if v.dim() == 3:
        return (v.shape[0] if batch == 1 else batch, matrix[-2], *columns)
    return (*matrix[:-1], *columns)


def _check_v(
    v: torch.Tensor, a: torch.Tensor, n: int, batch: int, reduction: str | Nearest
) -> None:
    is_potential = reduction == "logsumexp"
    if v.dim() not in (1, 2, 3):
        raise ValueError(f"v must be (N,), (N, C) or (L, N, C), got shape {tuple(v.shape)}")
    if v.shape[-2 if v.dim() > 1 else 0] != n:
        raise ValueError(
            f"v must have a row for each of the {n} points of b, got shape {tuple(v.shape)}"
        )
    if v.dtype != (accumulator(a.dtype) if is_potential else a.dtype):
        raise TypeError(f"v must be {a.dtype} as a and b, got {v.dtype}")
    if v.device != a.device:
        raise ValueError(f"v must be on the inputs' device {a.device}, got {v.device}")
    if v.dim() == 3 and v.shape[0] != 1 and batch != 1 and v.shape[0] != batch:
        name = "col_potential" if is_potential else "v"
        raise ValueError(f"batches must be 1 or equal, got inputs: {batch}, {name}: {v.shape[0]}")


def check_out(out: torch.Tensor, shape: tuple[int, ...], request: Request) -> None:
    """Raises ValueError or TypeError for an ``out`` that cannot take a result."""
    check_result(out, shape, request.a)
    check_memory(out)
    refuse_overlap(out, **request.tensors())


def check_result(out: torch.Tensor, shape: tuple[int, ...], a: torch.Tensor) -> None:
    """Raises ValueError or TypeError for an ``out`` of the wrong kind, wherever it lies."""
    check_dense(("out",), out=out)
    checks.check_result(out, shape, a)


def check_k(k, n: int) -> None:
    """Raises TypeError, ValueError for a count of neighbours that is not within 1 to N."""
    k = as_int("k", k)
    if not 1 <= k <= n:
        raise ValueError(f"k must be from 1 to the {n} points of b, got {shown(k)}")


def check_some(n: int) -> None:
    """Raises ValueError where there is nothing to choose from."""
    if n == 0:
        raise ValueError("the smallest of a row needs at least one point in b, which has none")
