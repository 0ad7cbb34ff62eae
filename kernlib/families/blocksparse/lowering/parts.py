"""The kernel of kernel_sources/blocksparse/parts/parts.cuh: the launch behind a product whose sums
several blocks of threads share, which adds them up in order and finishes the result."""

from __future__ import annotations

from itertools import product

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.lowering.problem import Dense, Sdd, Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Step
from kernlib.records import NamedTuple

KIND = "parts"
COUNTS = (2, 4, 8, 16, 32)  # of a sum
RUN, OWNERS, SHARES = 4, 64, 4  # of parts.cuh
THREADS = OWNERS * SHARES
SHARED_BYTES = 4 * RUN * THREADS
NAMES = ("rows", "out")  # behind the workspace
FIXED, SIDE = "5q8I", "4q"  # struct Fixed, struct Side
MOST_BYTES = 2**28  # of a workspace
OLDER = ("sm_80", "sm_86", "sm_87", "sm_88", "sm_89")  # on which no launch overlaps another


class Sums(NamedTuple):
    """Float32 sums of one part, one behind the other: batches, heads or slots, and of each lines
    and columns, of which those lie side by side that do in the result."""

    batch: int
    panels: int
    lines: int
    columns: int
    along_lines: bool

    @property
    def ends(self) -> tuple[int, int]:
        """What lies apart, and what side by side."""
        return (self.columns, self.lines) if self.along_lines else (self.lines, self.columns)

    @property
    def side(self) -> tuple[int, int, int, int]:
        """From one batch, panel, line and column to the next."""
        far, near = self.ends
        row = round_up(near, RUN)
        step = (1, row) if self.along_lines else (row, 1)
        return self.panels * far * row, far * row, *step

    @property
    def elements(self) -> int:
        return self.batch * self.side[0]


def sums_of(problem: Spmm | Sdd, along_lines: bool) -> Sums:
    """Those of a problem."""
    blocks = problem.blocks
    if isinstance(problem, Sdd):
        return Sums(problem.batch, blocks.capacity, blocks.rows, blocks.cols, along_lines)
    return Sums(problem.batch, blocks.heads, problem.lines, problem.columns, along_lines)


def counts(sums: Sums, most: int) -> list[int]:
    """How many parts sums may have, of which each has something to add up where there are ``most``
    terms; none if they were more than a workspace should hold."""
    return [n for n in COUNTS if n <= most and 4 * n * sums.elements <= MOST_BYTES]


def step(
    epilogue: tuple[Epilogue, ...], problem: Spmm | Sdd, sums: Sums, parts: int, arch: str
) -> Step:
    """The launch that adds up the parts in a workspace and writes the result."""
    slotted = isinstance(problem, Sdd)
    given = problem.values if slotted else problem.out
    view = Dense(*given[:4], given.alignment)
    far, near = sums.ends
    runs = ceil_div(near, RUN)
    total = sums.batch * sums.panels * far * runs
    sides = [number for side in problem.summands for number in side[:4]]
    fixed = (
        *(*view[:4], sums.elements, parts, sums.panels, far, near, runs, total),
        *(_stores(problem.dtype, view, sums), 0),
    )
    pointers = ((WORKSPACE, 0), *((name, 0) for name in NAMES))
    return Step(
        spec(epilogue, problem.dtype, slotted, sums.along_lines),
        (ceil_div(total, OWNERS), 1),
        parameters(epilogue).pack(*fixed, *sides),
        (*pointers, *text.vector_pointers(epilogue), *text.summand_pointers(epilogue)),
        text.scalar_count(epilogue),
        overlaps=arch not in OLDER,
    )


def variants(
    epilogue: tuple[Epilogue, ...], dtypes: tuple[str, ...], slotted: bool
) -> list[KernelSpec]:
    """Every spec that :func:`step` can choose for products whose result has slots, or not."""
    orders = (False,) if slotted else (False, True)
    return [spec(epilogue, dtype, slotted, order) for dtype, order in product(dtypes, orders)]


def spec(
    epilogue: tuple[Epilogue, ...], dtype: str, slotted: bool, along_lines: bool
) -> KernelSpec:
    """The KernelSpec for results of a dtype."""
    words = ["sdd"] * slotted + ["along_lines"] * along_lines
    source = f"""{text.preamble(dtype, dtype, epilogue)}
constexpr bool SLOTTED = {str(slotted).lower()};
constexpr bool ALONG_LINES = {str(along_lines).lower()};
constexpr int SUMMANDS = {len(text.summands(epilogue))};
constexpr int PARAMETER_BYTES = {parameters(epilogue).size};

#include "blocksparse/parts/parts.cuh"
"""
    found = KernelSpec(
        "blocksparse",
        source,
        "blocksparse_parts",
        THREADS,
        SHARED_BYTES,
        description=text.describe("blocksparse", KIND, dtype, "", words, epilogue),
    )
    return named(found, dtype, *words, epilogue=epilogue)


def parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """The parameter struct: sums, the layout's rows, the result, the epilogue's, strides, sizes."""
    sides = SIDE * len(text.summands(epilogue))
    return text.parameters(1 + len(NAMES), f"<{FIXED}{sides}", epilogue)


def _stores(dtype: str, out: Dense, sums: Sums) -> bool:
    """Whether runs are aligned in the result."""
    far_step, near_step = (out.column, out.line) if sums.along_lines else (out.line, out.column)
    outer = zip(
        (out.batch, out.head, far_step), (sums.batch, sums.panels, sums.ends[0]), strict=True
    )
    whole = not any(stride % RUN for stride, count in outer if count > 1)
    return near_step == 1 and whole and out.alignment % (RUN * DTYPES[dtype].bytes) == 0
