"""Hyperparameters of one dimension: a value for each entry of a batch, or for each point.

Beside points without a batch (L,) is a batch. Where L is the number of points it could be either,
and is refused; (L, 1, 1) is always a batch, and (1, 1) one value. A ``regularization`` of K(x, x)
with a value for each point of x is added to the diagonal, behind the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.families.pairwise.descriptor import CODES
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import check_kind, on_device
from kernlib.runtime.tensors import check_memory, is_wrapped, refuse_any_overlap

DIAGONAL = "regularization"
POTENTIALS = ("row_potential", "col_potential")


class Respelled(NamedTuple):
    """A call of hyperparameters (L,) that are a batch, and what it adds to the diagonal."""

    a: torch.Tensor
    b: torch.Tensor | None
    values: dict
    diagonal: torch.Tensor | None


def respelled(a, b, values: dict, beside=None, offsets: tuple = (0, 0)) -> Respelled | None:
    """A call whose hyperparameters have one dimension more or less than kernels take, as they take
    it; None for all others. ``beside`` is an argument that has a batch if it has three dimensions,
    or None, and ``offsets`` are those of rows and columns. Raises ValueError for a value that may
    belong to points as well as to a batch."""
    entries, single, diagonal = [], [], None
    tensors = (beside, *(values.get(name) for name in ("a_codes", "b_codes")))
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or name in CODES:
            continue
        if name in POTENTIALS:
            raise TypeError(
                f"{name} is an argument of kernel_logsumexp alone; where values are exponentials "
                "already, kernel_matmul with a v of exp(col_potential) is their sum"
            )
        if value.dim() == 3 and value.shape[1] == 1 and value.shape[2] == 1:
            entries.append(name)
        elif value.dim() == 2 and value.shape[0] == 1 and value.shape[1] == 1:
            single.append(name)
        elif value.dim() == 1 and _is_of_points(value.shape[0], a, b, tensors):
            _check_diagonal(name, value.shape[0], a, b, offsets)
            diagonal = value
    if not entries and not single and diagonal is None:
        return None
    values = values | {name: values[name].reshape(-1) for name in entries}
    values |= {name: values[name].reshape(()) for name in single}
    if diagonal is not None:
        check_kind(DIAGONAL, diagonal)
        values[DIAGONAL] = 0.0
        diagonal = _placed(diagonal, a)
    flat = entries and a.dim() == 2 and (b is None or b.dim() == 2)
    if flat:
        a, b = a[None], None if b is None else a[None] if b is a else b
    return Respelled(a, b, values, diagonal)


def _is_of_points(count: int, a, b, others: tuple) -> bool:
    """Whether so many values may belong to points, of which there is one set without a batch."""
    second = a if b is None else b
    for t in (a, second):
        if not isinstance(t, torch.Tensor) or t.dim() != 2:
            return False
    if count == 1 or any(isinstance(t, torch.Tensor) and t.dim() == 3 for t in others):
        return False
    return bool(count == a.shape[0] or count == second.shape[0])


def _check_diagonal(name: str, count: int, a, b, offsets: tuple) -> None:
    """Raises ValueError for what is no diagonal of K(x, x)."""
    m, n = a.shape[0], (a if b is None else b).shape[0]
    if name == DIAGONAL and m == n and offsets[0] == offsets[1]:
        return
    also = ""
    if name == DIAGONAL:
        also = ", but for that of a square matrix with row_offset == col_offset"
    raise ValueError(
        f"{name} of shape ({count},) beside {m} and {n} points may be a value for each of {count} "
        f"matrices or for each point: pass shape ({count}, 1, 1) for a batch, which it always is; "
        f"one value for each point is not supported yet{also}"
    )


def _placed(diagonal: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    wide = accumulator(like.dtype)
    if diagonal.requires_grad:
        return diagonal.to(like.device, wide)
    return on_device(DIAGONAL, diagonal, like.device, wide)


def computed(
    run, descriptor, a, b, out, accumulate, row_offset, col_offset, values: dict
) -> torch.Tensor | None:
    """The matrix of a call that is respelled, by ``run``, which is called as
    :func:`kernlib.run_kernel` is; None of all other calls. Raises what :func:`respelled` does."""
    if not any(isinstance(value, torch.Tensor) and value.dim() for value in values.values()):
        return None
    again = respelled(a, b, values, out, (row_offset, col_offset))
    if again is None:
        return None

    def call(a, b, out, accumulate, values):
        offsets = {"row_offset": row_offset, "col_offset": col_offset}
        return run(descriptor, a, b, out=out, accumulate=accumulate, **offsets, **values)

    return _matrix(call, again, out, accumulate)


def _matrix(call, made: Respelled, out, accumulate) -> torch.Tensor:
    """The kernel matrix of ``call(a, b, out, accumulate, values)`` and the diagonal."""
    a, b, values, diagonal = made
    if diagonal is None:
        return call(a, b, out, accumulate, values)
    wide = accumulator(a.dtype)
    if out is None:
        widened = None if b is None else b.to(wide)
        return _added(call(a.to(wide), widened, None, accumulate, values), diagonal).to(a.dtype)
    target = out
    if isinstance(out, torch.Tensor) and out.dtype != wide:  # it would be rounded twice
        refuse_any_overlap(out, a=a, b=b)
        check_memory(out)
        target = torch.empty_like(out, dtype=wide)
        if accumulate is True:
            target.copy_(out)
    call(a, b, target, accumulate, values)
    _added(target, diagonal)
    return out if target is out else out.copy_(target)


def _added(k: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor:
    """One matrix or several with a value added to their diagonals, in place where that is
    allowed."""
    if not is_dynamo_compiling() and is_wrapped(diagonal):
        return k + torch.diag_embed(diagonal)
    k.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return k


def products(call, made: Respelled, v: torch.Tensor | None) -> torch.Tensor:
    """The result of ``call(a, b, v, values)``, a product with the kernel matrix or, without v, its
    row sums, with what the diagonal adds."""
    a, b, values, diagonal = made
    wide = accumulator(a.dtype)
    a, b, v = (t if t is None else t.to(wide) for t in (a, b, v))
    added = diagonal if v is None else v * (diagonal if v.dim() == 1 else diagonal[:, None])
    return (call(a, b, v, values) + added).to(made.a.dtype)
