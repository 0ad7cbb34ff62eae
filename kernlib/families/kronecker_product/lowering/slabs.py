"""Several runs of factors in one launch, by slabs of a problem's columns that stay in the L2 cache:
how a problem is cut, and the launches."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_product.kernels.base import PartsKernel
from kernlib.families.kronecker_product.kernels.clear import CLEAR
from kernlib.families.kronecker_product.lowering import grouping, parameters
from kernlib.families.kronecker_product.lowering.grouping import Group, Size
from kernlib.families.kronecker_product.lowering.problem import Problem
from kernlib.families.kronecker_product.lowering.runs import Run, split
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

SLAB_BYTES = 4 << 20  # of what one run hands to the next
RESTAGED_BYTES = 32 << 20  # the same where a block stages matrices anew with each change of runs
DISTANCE = 2  # tickets between a tile and what it waits for, as a multiple of the blocks
EXPONENT_BYTES = 2
COLUMNS_INSIDE = 32  # the fewest of a slab with the factors on the left, where rows of x hold them
MOST_TICKETS = 2**31  # a counter has 32 bits, and each block takes one too many


class Plan(NamedTuple):
    """How a problem is cut: its runs in a slab, the kernel, columns of a slab but the last of a
    batch, slabs of a batch, tickets of a slab in all runs, by how many slabs a run is behind the
    one before, and how many blocks there are at most. ``ring`` slabs are under way between two
    runs: one that is written, one that is read, and those between."""

    runs: list[Run]
    variant: Any
    columns: int
    count: int
    tickets: int
    lag: int
    blocks: int

    @property
    def ring(self) -> int:
        """Slabs that the ring between two runs has room for."""
        return 2 * self.lag + 1


class InSlabs(PartsKernel):
    """A kernel of several runs of factors. ``of_run`` is the kernel of one, for which factors are
    grouped."""

    of_run: Kernel

    def variant_of(
        self, groups: tuple[tuple[Size, ...], ...], kind: Group, restaged: bool, blocks: int, arch
    ) -> Any | None:
        """The kernel of runs of factors of these sizes, first to last, of which a multiprocessor
        has room for so many blocks; None where there is none."""
        raise NotImplementedError

    def variant(self, kind: Group, groups: tuple, is_varied: bool, arch: str) -> Any | None:
        """The kernel of groups of a product's factors, of matrices that vary with the batch or not:
        one of which a multiprocessor holds two blocks, if there is any, and first one that has all
        matrices at once. None where not even one run's fit."""
        sizes = tuple(kind.sizes[first:last] for first, last in groups)
        for blocks, restaged in ((2, False), (2, True), (1, False), (1, True)):
            if restaged or not is_varied:
                variant = self.variant_of(sizes, kind, restaged, blocks, arch)
                if variant is not None and variant.resident(arch) >= blocks:
                    return variant
        return None

    def plan(self, problem: Problem, gpu: Gpu) -> Plan | None:
        """How a problem is cut; None where it is one run, or there is no room for matrices."""
        kind = grouping.product_of(problem)
        groups = grouping.groups(self.of_run, kind, gpu.arch)
        if groups is None or len(groups) < 2:
            return None
        is_varied = any(factor.batch_stride for factor in problem.factors)
        variant = self.variant(kind, groups, is_varied, gpu.arch)
        if variant is None:
            return None
        columns = _columns(problem, groups, variant)
        runs, blocks = split(problem, groups, columns), variant.resident(gpu.arch) * gpu[1]
        tickets = sum(
            run.outer * run.inner * ceil_div(run.columns, part.columns)
            for run, part in zip(runs, variant.parts, strict=True)
        )
        count, lag = ceil_div(problem.columns, columns), ceil_div(DISTANCE * blocks, tickets)
        return Plan(runs, variant, columns, count, tickets, lag, blocks)

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether there are several runs, with no more tickets on any GPU of an arch than a counter
        has."""
        plan = self.plan(problem, Gpu(arch, targets.MULTIPROCESSORS[arch][1]))
        if plan is None:
            return False
        slabs = problem.batch * plan.count + len(plan.runs) * plan.lag
        return slabs * plan.tickets < MOST_TICKETS

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Problem, gpu: Gpu, choice: Choice
    ) -> Lowered:
        """The launch of all runs, behind another that clears its counters."""
        plan = self.plan(problem, gpu)
        variant, runs, slabs = plan.variant, plan.runs, problem.batch * plan.count
        counters = 1 + len(runs) * slabs
        at, rings, between = round_up(4 * counters, 256), [], []
        for run in runs[:-1]:
            rings.append((WORKSPACE, at))
            between.append((run.elements // problem.batch, plan.ring))
            at = round_up(at + plan.ring * between[-1][0] * variant.itemsize, 256)
        ends = [(plan.columns * side.column, 0) for side in (problem.x, problem.out)]
        sides = list(zip([ends[0], *between], [*between, ends[1]], strict=True))
        last = (problem.columns - 1) % plan.columns + 1  # columns of the last slab
        numbers = [
            parameters.run_values(_within(run, slab), part, _last(run, problem, plan, last), slab)
            for run, part, slab in zip(runs, variant.parts, sides, strict=True)
        ]
        places, powers = [], []
        for writer, reader in pairwise(runs) if variant.powers else ():
            places += _place(writer, reader, problem.inside, plan.columns)
            powers.append((WORKSPACE, at))
            at = round_up(at + plan.ring * places[-1] * EXPONENT_BYTES, 256)
        factors = [name for run in runs for name in run.names]
        pointers = [("x", 0), *rings, *rings, ("out", 0), *factors, (WORKSPACE, 0), *powers]
        pointers += text.vector_pointers(epilogue) + text.summand_pointers(epilogue)
        fixed = parameters.pack(
            epilogue,
            runs,
            numbers,
            (problem.batch, plan.count, plan.tickets, plan.lag),
            places,
            [plan.columns * side.column for side in problem.summands],
        )
        tickets = (slabs + (len(runs) - 1) * plan.lag) * plan.tickets
        grid = min(plan.blocks, tickets), 1
        spec = self.spec(epilogue, variant, gpu.arch)
        step = Step(spec, grid, fixed, tuple(pointers), text.scalar_count(epilogue))
        return Lowered((CLEAR.step(counters), step), at)

    def specs(self, epilogue: tuple[Epilogue, ...], scope: Group, arch: str) -> list[KernelSpec]:
        """The specifications of a product's variants, matrices that vary with the batch or not, and
        that of the kernel that clears counters."""
        groups = grouping.groups(self.of_run, scope, arch)
        if groups is None or len(groups) < 2:
            return []
        variants = [self.variant(scope, groups, each, arch) for each in (False, True)]
        specs = [self.spec(epilogue, each, arch) for each in variants if each is not None]
        return [CLEAR.spec(), *specs]


def _columns(problem: Problem, groups: tuple[tuple[int, int], ...], variant: Any) -> int:
    """The columns of a slab."""
    most = max(
        math.prod(f.rows for f in problem.factors[:first])
        * math.prod(f.columns for f in problem.factors[first:])
        for first, _ in groups[:-1]
    )
    size = RESTAGED_BYTES if variant.restaged else SLAB_BYTES
    columns = max(1, size // (most * variant.itemsize))
    if problem.inside:
        columns = max(COLUMNS_INSIDE, columns // COLUMNS_INSIDE * COLUMNS_INSIDE)
    return min(columns, problem.columns)


def _place(writer: Run, reader: Run, inside: bool, slab: int) -> list[int]:
    """A PowerPlace, which says which of the writer's columns an element of the reader's tile is of,
    and the count of these columns in a slab: from one outer index of the reader, feature and inner
    index on, of inner index and column modulo two numbers."""
    rows = math.prod(factor.rows for factor in reader.factors)
    behind = writer.inner if inside else (writer.columns if writer.inside else 1)
    count = writer.outer * writer.inner * writer.columns
    if inside:
        return [rows * behind * slab, behind * slab, slab, behind, slab, count]
    return [reader.inner * rows * behind, behind, rows * behind, reader.inner, behind, count]


def _within(run: Run, slabs: tuple) -> Run:
    """A run whose source or target may be a ring, which knows no batches."""
    sides = zip((run.x, run.out), slabs, strict=True)
    x, out = (side._replace(batch=0) if ring else side for side, (_, ring) in sides)
    return run._replace(x=x, out=out)


def _last(run: Run, problem: Problem, plan: Plan, columns: int) -> tuple[int, int]:
    """Outer indices and columns of a run in a slab of so few columns of the problem."""
    if not problem.inside and (run.inside or run.outer > 1):
        return run.outer // plan.columns * columns, run.columns
    return run.outer, run.columns // plan.columns * columns
