"""How the pairs of a reduction are divided among threads and blocks."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.errors import UnsupportedError
from kernlib.families.pairwise.formula.lowering.problem import MAX_BLOCKS, THREADS, Problem
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.division import MAX_PLACES, Sums, split

RESIDENT = 2  # blocks of a multiprocessor, as __launch_bounds__ promises
# Where whole rows make few blocks: rows of a thread, and threads that share a row's columns.
SHAPES = ((2, 1), (2, 8), (2, 32), (1, 32))
FEWEST_COLUMNS = 16  # of a block
STAGE_BYTES, MOST_STAGE = 32 << 10, 2048  # of columns in shared memory
FEW_STAGES = (THREADS, THREADS // 2, THREADS // 4, 32, 16)
FEW_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# What Work.duration counts beside pairs, in issue slots of the warps of a block, as measured for
# pairwise reductions: a wait for a stage, each time that partners meet, a launch that joins partial
# results, and each of those.
FILLING, MEETING, JOINING, JOIN = 600, 150, 1500, 40


class Cut(NamedTuple):
    """Rows of a thread, threads of a block that share a row's columns, and columns of a block."""

    rows: int
    partners: int
    per_split: int


class Work(NamedTuple):
    """What is divided: the columns of ``sums`` for ``rows`` rows, of which a pair takes ``slots``
    issue slots, and a column ``line_bytes`` of shared memory; ``chunks`` are blocks that have other
    features of the same pairs."""

    rows: int
    sums: Sums
    chunks: int
    slots: int
    line_bytes: int
    multiprocessors: int

    def stage(self, partners: int) -> int:
        """Columns in shared memory: of partners many, so that a block waits for few stages."""
        fit = STAGE_BYTES // self.line_bytes
        if partners > 1 and fit >= THREADS:
            return min(MOST_STAGE, fit // THREADS * THREADS)
        return next(columns for columns in FEW_STAGES if columns <= max(FEW_STAGES[-1], fit))

    def row_blocks(self, rows: int, partners: int) -> int:
        return ceil_div(self.rows, rows * THREADS // partners)

    def blocks(self, cut: Cut) -> int:
        splits = ceil_div(self.sums.n, cut.per_split)
        return self.row_blocks(cut.rows, cut.partners) * splits * self.chunks * self.sums.batch

    def duration(self, cut: Cut) -> float:
        """An estimate, in issue slots of the warps of a block."""
        each, splits = ceil_div(self.blocks(cut), self.multiprocessors), self.sums.n / cut.per_split
        columns = ceil_div(cut.per_split, cut.partners)
        busy = columns * (cut.rows * self.slots + self.line_bytes // 16)
        busy += ceil_div(cut.per_split, THREADS) * self.line_bytes  # to fill a stage
        waiting = ceil_div(cut.per_split, self.stage(cut.partners)) * FILLING
        waiting += (cut.partners.bit_length() - 1) * MEETING
        joining = JOINING + splits * JOIN if splits > 1 else 0
        return busy * each + waiting * ceil_div(each, RESIDENT) + joining


def sums_of(problem: Problem) -> Sums:
    """The sums of a problem; there is one column at least, which makes a block."""
    size = problem.bytes * problem.outputs + 8 * problem.has_indices
    return Sums(max(1, problem.cols), problem.rows, problem.batch, size)


def cut(work: Work, rows: int) -> Cut:
    """The cut that is done first: of large problems that of ``rows`` and whole stages, else one of
    :data:`SHAPES` too."""
    stage = work.stage(1)
    long = Cut(rows, 1, stage)
    enough = work.blocks(long) >= 4 * RESIDENT * work.multiprocessors
    if work.rows > (rows - 1) * THREADS and enough:
        blocks = work.row_blocks(rows, 1) * work.chunks
        slots = RESIDENT * work.multiprocessors
        return long._replace(per_split=split(work.sums, blocks, stage, slots))
    shapes = dict.fromkeys([(rows, 1), *((min(few, rows), many) for few, many in SHAPES)])
    cuts = (
        Cut(few, partners, columns)
        for few, partners in shapes
        for columns in _per_splits(work, few, partners)
    )
    return min(cuts, key=work.duration)


def cut_ranges(work: Work, rows: int) -> Cut:
    """The cut of rows that have columns of their own, how many nobody says: few rows together, as
    a block goes over all columns that one of its rows has; partners until each multiprocessor has
    two blocks, and parts of the columns only where that does not do."""
    enough = 2 * work.multiprocessors
    if work.row_blocks(rows, 1) >= 4 * enough:
        return Cut(rows, 1, work.sums.n)
    for partners in (1, 2, 4, 8, 16, 32):
        blocks = work.row_blocks(1, partners) * work.sums.batch * work.chunks
        if blocks >= enough:
            return Cut(1, partners, work.sums.n)
    parts = min(FEW_SPLITS[-1], ceil_div(enough, blocks), ceil_div(work.sums.n, THREADS))
    return Cut(1, partners, ceil_div(ceil_div(work.sums.n, parts), partners) * partners)


def _per_splits(work: Work, rows: int, partners: int) -> list[int]:
    """The columns of a block that are worth a look: of splits that give each multiprocessor one
    block, two and so on, and of few splits."""
    sums, unit = work.sums, max(FEWEST_COLUMNS, partners)
    units = ceil_div(sums.n, unit)
    most = min(units, sums.most)
    least = min(most, ceil_div(units * unit, MAX_PLACES))
    each = work.row_blocks(rows, partners) * sums.batch * work.chunks
    counts = [blocks * work.multiprocessors // each for blocks in range(1, 9)]
    counts = sorted({max(least, min(count, most)) for count in (*counts, *FEW_SPLITS) if count})
    return [ceil_div(units, count) * unit for count in counts]


def check_grid(blocks: int, problem: Problem) -> int:
    """The blocks of a grid's first axis. Raises UnsupportedError for more than it can hold."""
    if blocks > MAX_BLOCKS:
        raise UnsupportedError(
            f"{problem.rows} rows and {problem.cols} columns of a formula are {blocks} blocks of a"
            f" grid, of at most {MAX_BLOCKS}: compute them in parts"
        )
    return blocks
