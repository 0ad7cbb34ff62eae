"""Kronecker-sparse products in plain torch, and how long they and a case will take.

Every rival is ``f(x, stored, out)`` with the weight in the form that it likes best, and returns one
contiguous tensor like ``out``, which it may use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.kronecker_sparse.problems import KINDS, Problem
from kernlib.families.kronecker_sparse import reference

DENSE_BYTES = 4e9  # of the dense matrix
DENSE_MS = 50.0  # and its time, by estimate
GRID_LANES = 256  # a*d above which the grid has no dense rival

# For estimates: times of bmm and einsum over those of memory, as measured on an H200; calls of a
# case; seconds to compile an expression, to prepare a case and to prepare a rival.
OVER_MEMORY = {"fp16": 7.0, "bf16": 7.0, "tf32": 8.0, "fp32": 9.0}
CALLS = {"patterns": 9, "train": 9, "grid": 4}
COMPILE_S, CASE_S, RIVAL_S = 1.2, 0.08, 0.06


class Rival(NamedTuple):
    """How the weight (a, b, c, d) is held, and what multiplies."""

    store: Callable[[torch.Tensor], torch.Tensor]
    call: Callable[..., torch.Tensor]


def rivals(problem: Problem) -> dict[str, Callable[[], Rival]]:
    """What makes each rival of a case."""
    found = {"bmm": lambda: Rival(blocks, bmm(problem))}
    found["einsum"] = lambda: Rival(blocks, einsum(problem))
    if problem.section == "patterns":
        found["torch.compile"] = lambda: Rival(blocks, compiled(problem))
    if has_dense(problem):
        found["dense"] = lambda: Rival(matrix, dense(problem))
    return found


def blocks(weight: torch.Tensor) -> torch.Tensor:
    """(a, d, b, c), contiguous: a matrix for every pair (i, l)."""
    return weight.permute(0, 3, 1, 2).contiguous()


def matrix(weight: torch.Tensor) -> torch.Tensor:
    """The dense matrix (a*b*d, a*c*d)."""
    return reference.dense(tuple(weight.shape), weight)


def bmm(problem: Problem) -> Callable:
    """Gather the features of each pair (i, l) to a matrix, one ``torch.bmm``, scatter its result:
    without copies where strides can say it."""
    a, b, c, d = problem.pattern

    def first(x, stored, out):
        gathered = x.view(-1, a, c, d).permute(1, 3, 0, 2).flatten(0, 1)
        place = out.view(-1, a, b, d).permute(1, 3, 0, 2)
        return _into(place, gathered, stored.flatten(0, 1).mT, out, direct=d == 1)

    def last(x, stored, out):
        gathered = x.view(a, c, d, -1).transpose(1, 2).flatten(0, 1)
        place = out.view(a, b, d, -1).transpose(1, 2)
        return _into(place, stored.flatten(0, 1), gathered, out, direct=a == 1 or d == 1)

    return last if problem.batch_last else first


def _into(place, left, right, out, direct: bool) -> torch.Tensor:
    """The products of matrices at ``place``, a view (a, d, ...) of ``out``, where torch.bmm writes
    them itself if two strides are enough."""
    if direct:
        torch.bmm(left, right, out=place.flatten(0, 1))
    else:
        place.copy_(torch.bmm(left, right).view(place.shape))
    return out


def einsum(problem: Problem) -> Callable:
    """One ``torch.einsum``."""
    a, b, c, d = problem.pattern

    def first(x, stored, out=None):
        y = torch.einsum("nikl,iljk->nijl", x.view(-1, a, c, d), stored)
        return y.reshape(-1, a * b * d).contiguous()

    def last(x, stored, out=None):
        y = torch.einsum("ikln,iljk->ijln", x.view(a, c, d, -1), stored)
        return y.reshape(a * b * d, -1).contiguous()

    return last if problem.batch_last else first


def compiled(problem: Problem) -> Callable:
    """The einsum by torch.compile."""
    torch._dynamo.reset()  # past eight sizes of one function it would be run as it is
    return torch.compile(einsum(problem), dynamic=False, fullgraph=True)


def dense(problem: Problem) -> Callable:
    """A product with the dense matrix."""
    if problem.batch_last:
        return lambda x, stored, out=None: stored @ x
    return lambda x, stored, out=None: F.linear(x, stored)


# How long.


def dense_ms(problem: Problem) -> float:
    """Milliseconds of a product with the dense matrix, by estimate."""
    inputs, outputs = problem.features
    return 2e3 * problem.batch * inputs * outputs / KINDS[problem.kind].dense_rate


def has_dense(problem: Problem) -> bool:
    """Whether the dense matrix is worth its memory and its time."""
    a, _, _, d = problem.pattern
    inputs, outputs = problem.features
    fits = inputs * outputs * problem.dtype.itemsize <= DENSE_BYTES
    few = problem.section != "grid" or a * d <= GRID_LANES
    return fits and few and dense_ms(problem) <= DENSE_MS


def seconds(problem: Problem) -> float:
    """What a case takes on an H200, by estimate."""
    names = ("einsum",) if problem.section == "train" else tuple(rivals(problem))
    torch_ms = OVER_MEMORY[problem.kind] * problem.memory_ms * problem.products
    dense = dense_ms(problem)
    each = [2 * problem.floor()[0], *(dense if name == "dense" else torch_ms for name in names)]
    compiling = COMPILE_S * ("torch.compile" in names)
    return CASE_S + RIVAL_S * len(each) + compiling + CALLS[problem.section] * sum(each) / 1e3
