"""The patch of pairs that a thread of the kernels for any number of features has, and the shared
memory of a block (kernel_sources/pairwise/formula/sums.cuh, formula/tile.cuh)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from kernlib.families.pairwise.formula.lowering.problem import Problem
from kernlib.families.pairwise.formula.lowering.source import Text, by_term, formula
from kernlib.jit import targets
from kernlib.lowering.arithmetic import ceil_div, round_up

LANES, CHUNK = 16, 16  # threads of a tile's side, and features that come at once
SIDES = (4, 2, 1)
MOST_SUMS = 128  # registers of a thread, of sums of its pairs
FEW_SUMS = 40  # of which leave room for two blocks of a multiprocessor


class Patch(NamedTuple):
    """``side`` by ``side`` pairs of a thread, of which it has ``span`` features of the unit; blocks
    of a multiprocessor; bytes of shared memory."""

    text: Text
    side: int
    span: int
    resident: int
    shared: int

    @property
    def tile(self) -> int:
        return LANES * self.side


@lru_cache(maxsize=256)
def matrix(problem: Problem, arch: str) -> Patch:
    """Of values that are stored."""
    return _fitting(problem, arch, False)


@lru_cache(maxsize=256)
def tile(problem: Problem, arch: str) -> Patch:
    """Of reductions."""
    return _fitting(problem, arch, problem.spec.unit is not None)


def _fitting(problem: Problem, arch: str, has_unit: bool) -> Patch:
    """The largest patch whose sums fit registers and whose words fit shared memory, or else the
    smallest."""
    text = formula(problem, by_term(problem), sums_of_pairs=True)
    for side in SIDES:
        span = 0
        if has_unit:  # as many features as a thread has pairs of a row, or as few as there are
            span = next(x for x in (1, 2, 4) if x == side or x * LANES >= problem.features)
        words = problem.bytes // 4
        sums = (len(problem.sizes) + 1) * side * side + 2 * side * span
        shared = _shared(problem, text, side, span)
        fits = shared <= targets.SHARED_BYTES[arch] - 256  # beside a few numbers of a block
        if side == 1 or (fits and sums * words <= MOST_SUMS):
            resident = 2 if sums * words <= FEW_SUMS else 1
            return Patch(text, side, span, resident, shared)
    raise AssertionError("one side is the last")


def _shared(problem: Problem, text: Text, side: int, span: int) -> int:
    size, pad = LANES * side, 16 // problem.bytes
    line, terms = size + pad, len(problem.sizes)
    widths = zip(text.row.featured, text.col.featured, text.thread.featured, strict=True)
    chunks = [(r + c) * CHUNK * line + t * CHUNK for r, c, t in widths]
    words = (text.row.free + text.col.free) * size + round_up(max(chunks[:terms], default=0), pad)
    if span:
        unit = LANES * span + pad
        words += size * line + text.thread.featured[-1] * unit
        words += (text.row.featured[-1] + text.col.featured[-1]) * size * unit
    return max(16, words * problem.bytes)


def row_blocks(problem: Problem, patch: Patch) -> int:
    """Blocks of the rows of a matrix."""
    return ceil_div(problem.rows, patch.tile)
