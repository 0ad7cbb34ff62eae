"""The launch behind a product whose sums several blocks of threads share, which adds them up in
order and finishes the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.lowering import summands
from kernlib.families.blocksparse.lowering.problem import Dense, Sdd, Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

COUNTS = (2, 4, 8, 16, 32)  # of a sum
RUN, OWNERS, SHARES = 4, 64, 4  # of parts.cuh
THREADS = OWNERS * SHARES
SHARED_BYTES = 4 * RUN * THREADS
OPERANDS = (WORKSPACE, "rows", "out")
FIXED = (
    "Side out_view",
    "i64 part_stride",
    "u32 parts", "u32 panels", "u32 far", "u32 near",
    "u32 runs", "u32 total",  # of RUN: along near ones, and in all
    "u32 whole_stores",  # whether runs are aligned in out
    "u32 unused",
)  # fmt: skip
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


def target(problem: Spmm | Sdd, whole_stores: bool, sums: Sums | None = None) -> dict[str, Any]:
    """Where a launch leaves its results, as members of struct Fixed: the problem's, or those of
    parts of the depth."""
    if sums is not None:
        return {"out_view": sums.side, "part_stride": sums.elements, "whole_stores": True}
    out = problem.values if isinstance(problem, Sdd) else problem.out
    beside = summands.values(problem.summands)
    return {"out_view": out[:4], "part_stride": 0, "whole_stores": whole_stores, **beside}


class Parts(Kernel):
    """A block of threads has 64 runs of four results, whose parts four threads each add up."""

    role = "step"
    name = "parts"
    header = "blocksparse/parts/parts.cuh"
    entry = "blocksparse_parts"
    reason = "parts of sums that several blocks share, added up in one order"

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue."""

        dtype: str
        slotted: bool  # whether the result has slots, else heads
        along_lines: bool  # lines lie closer together in the result than columns

    def step(
        self,
        epilogue: tuple[Epilogue, ...],
        problem: Spmm | Sdd,
        sums: Sums,
        parts: int,
        arch: str,
    ) -> Step:
        """The launch that adds up the parts in a workspace and writes the result."""
        slotted = isinstance(problem, Sdd)
        out = problem.values if slotted else problem.out
        view = Dense(*out[:4], out.alignment)
        far, near = sums.ends
        runs = ceil_div(near, RUN)
        total = sums.batch * sums.panels * far * runs
        fixed = _fixed(epilogue).pack(
            out_view=view[:4],
            part_stride=sums.elements,
            parts=parts,
            panels=sums.panels,
            far=far,
            near=near,
            runs=runs,
            total=total,
            whole_stores=_stores(problem.dtype, view, sums),
            unused=0,
            **summands.values(problem.summands),
        )
        variant = self.Variant(problem.dtype, slotted, sums.along_lines)
        return Step(
            self.spec(epilogue, variant),
            (ceil_div(total, OWNERS), 1),
            fixed,
            text.pointers(OPERANDS, epilogue),
            text.scalar_count(epilogue),
            overlaps=arch not in OLDER,
        )

    def behind(
        self,
        main: Step,
        epilogue: tuple[Epilogue, ...],
        problem: Spmm | Sdd,
        sums: Sums,
        parts: int,
        arch: str,
    ) -> Lowered:
        """The launches of so many parts, each of which is computed as ``main`` computes one."""
        tiles, batches = main.grid
        pointers = (*main.pointers[:-1], (WORKSPACE, 0))
        main = main._replace(grid=(tiles * parts, batches), pointers=pointers)
        last = self.step(epilogue, problem, sums, parts, arch)
        return Lowered((main, last), 4 * sums.elements * parts)

    def axes(
        self, epilogue: tuple[Epilogue, ...], scope: tuple[tuple[str, ...], bool]
    ) -> Mapping[str, Iterable]:
        """Of dtypes, and whether results have slots."""
        dtypes, slotted = scope
        orders = (False,) if slotted else (False, True)
        return {"dtype": dtypes, "slotted": [slotted], "along_lines": orders}

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str = "") -> KernelSpec:
        """The specification of a variant."""
        dtype, slotted, along_lines = variant
        fields = _fixed(epilogue)
        facts = {
            **text.facts(dtype, dtype, epilogue),
            "SLOTTED": slotted,
            "ALONG_LINES": along_lines,
            "PARAMETER_BYTES": text.parameters(len(OPERANDS), fields.format, epilogue).size,
        }
        texts = fields.text(), text.typed_finish(epilogue)
        source = self.source(facts, *texts, includes=("common/math.cuh", summands.HEADER))
        words = ["sdd"] * slotted + ["along_lines"] * along_lines
        return self.named_spec(source, THREADS, SHARED_BYTES, dtype, words, epilogue)


PARTS = Parts()


def _fixed(epilogue: tuple[Epilogue, ...]) -> Fields:
    return Fields((*FIXED, *summands.members(epilogue)))


def _stores(dtype: str, out: Dense, sums: Sums) -> bool:
    """Whether runs are aligned in the result."""
    far_step, near_step = (out.column, out.line) if sums.along_lines else (out.line, out.column)
    outer = zip(
        (out.batch, out.head, far_step), (sums.batch, sums.panels, sums.ends[0]), strict=True
    )
    is_aligned = not any(stride % RUN for stride, count in outer if count > 1)
    return near_step == 1 and is_aligned and out.alignment % (RUN * DTYPES[dtype].bytes) == 0
