"""The launches of a Kronecker product: planners group its factors for kernels, of which one is
chosen.

A planner is a kernel to :func:`kernlib.lowering.kernel.choose`. Those that have all factors in one
launch are kernels themselves; :class:`Apart` has a launch for each group of factors, through a
workspace where there are several. Each sort of planners is loaded where it may be chosen, as a
first call waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_product.kernels.base import OneRun
from kernlib.families.kronecker_product.lowering import grouping
from kernlib.families.kronecker_product.lowering.grouping import Group, Size
from kernlib.families.kronecker_product.lowering.problem import Problem
from kernlib.families.kronecker_product.lowering.runs import Run, split
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import kernel
from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Choice, Gpu, Kernel, Option
from kernlib.lowering.steps import WORKSPACE, Lowered


class Apart(Kernel):
    """A launch of one kernel for each group of factors, of which there are ``most`` at most."""

    role = "product"

    def __init__(self, of_run: OneRun, most: float = math.inf):
        self.of_run, self.name, self.most = of_run, of_run.name, most

    def runs(self, problem: Problem, arch: str) -> list[Run]:
        """The runs of factors, first to last; none where the kernel does not take one, or there
        are too many."""
        groups = grouping.groups(self.of_run, grouping.product_of(problem), arch) or ()
        return split(problem, groups) if len(groups) <= self.most else []

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether the kernel takes all factors."""
        return bool(self.runs(problem, arch))

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Problem, gpu: Gpu, choice: Choice
    ) -> Lowered:
        """The launches, in their order."""
        runs, steps = self.runs(problem, gpu.arch), []
        second, size = _intermediates(runs)
        for index, run in enumerate(runs):
            source = (WORKSPACE, 0 if index % 2 else second) if index else ("x", 0)
            target = ("out", 0) if run.ends else (WORKSPACE, second if index % 2 else 0)
            columns = self.of_run.default(run, gpu)
            lowered = self.of_run.launch(epilogue * run.ends, run, gpu, columns)
            steps.append(lowered.steps[0].placed({"x": source, "out": target}))
        return Lowered(tuple(steps), size)

    def specs(self, epilogue: tuple[Epilogue, ...], scope: Group, arch: str) -> list[KernelSpec]:
        """The specifications of all groups' kernels."""
        groups = grouping.groups(self.of_run, scope, arch) or ()
        if len(groups) > self.most:
            return []
        specs = []
        for first, last in groups:
            begins, ends = last == len(scope.sizes), first == 0
            group = scope._replace(sizes=scope.sizes[first:last], begins=begins, ends=ends)
            group = group._replace(inside=scope.inside or not begins)
            specs += self.of_run.specs(epilogue * ends, group, arch)
        return specs


class ModesApart(Apart):
    """Kernels for any sizes, in several launches, which are chosen by their time."""

    def time(self, problem: Problem, gpu: Gpu) -> float:
        """Microseconds, as such launches were measured."""
        from kernlib.families.kronecker_product.lowering import estimates

        launches = []
        for run in self.runs(problem, gpu.arch):
            variant = self.of_run.variant(run, **self.of_run.default(run, gpu), arch=gpu.arch)
            blocks = self.of_run.blocks(run, variant, gpu)
            launches.append(estimates.launch((run,), variant, blocks))
        return estimates.kernel_time(launches)

    def estimate(self, problem: Problem, choice: Choice, gpu: Gpu) -> float:
        """Microseconds where such products were measured, and what waits between two launches is
        not too much; else zero, by rule, behind all that goes before it."""
        from kernlib.families.kronecker_product.lowering import estimates

        if not (estimates.are_known(problem, gpu) and estimates.are_ragged(problem)):
            return 0.0
        _, size = _intermediates(self.runs(problem, gpu.arch))
        return self.time(problem, gpu) if size <= estimates.MOST_BYTES else estimates.TOO_MUCH


def _intermediates(runs: list[Run]) -> tuple[int, int]:
    """Bytes before the second of two buffers, which launches use in turn, and those of both."""
    sizes = [run.elements * DTYPES[run.dtype].sums.bytes for run in runs[:-1]]
    second = round_up(max(sizes[::2], default=0), 256)
    return second, second + max(sizes[1::2], default=0)


@cache
def _hopper() -> tuple[Kernel, ...]:
    from kernlib.families.kronecker_product.kernels.hopper import Hopper, HopperSlabs

    return HopperSlabs(), Hopper()


@cache
def _whole_rows() -> tuple[Kernel, ...]:
    from kernlib.families.kronecker_product.kernels.halves import HALVES

    return (Apart(HALVES, most=1),)


@cache
def _half_slabs() -> tuple[Kernel, ...]:
    from kernlib.families.kronecker_product.kernels.half_slabs import HalfSlabs

    return (HalfSlabs(),)


@cache
def _sums() -> tuple[Kernel, ...]:
    from kernlib.families.kronecker_product.kernels.modes import MODES, Slabs

    return Slabs(), ModesApart(MODES)


def planners() -> tuple[Kernel, ...]:
    """All of them, in order: of equally fast ones the first is chosen."""
    return (*_hopper(), *_whole_rows(), *_half_slabs(), *_sums())


def _of_halves(product: Group, arch: str) -> Iterator[Callable[[], tuple[Kernel, ...]]]:
    """Planners of half-precision numbers, two of which are one of float32, in order. By rule they
    go before kernels for any sizes."""
    if product.dtype == "float64":
        return
    if arch == "sm_90a":
        from kernlib.families.kronecker_product.lowering import passes

        if passes.is_faster(product, arch):
            yield _hopper
    if product.dtype != "float32" or product.precision == "fp32":
        yield from (_whole_rows, _half_slabs)


def _by_halves(problem: Problem, arch: str) -> Option | None:
    """What by rule goes before kernels for any sizes, if anything does."""
    for load in _of_halves(grouping.product_of(problem), arch):
        options = kernel.options(load(), problem, arch)
        if options:
            return options[0]
    return None


def takes(sizes: tuple[Size, ...], dtype: str, arch: str) -> bool:
    """Whether kernels take factors of these rows and columns, on either side."""
    both = (each for size in sizes for each in (size, size[::-1]))
    return all(grouping.fits(Group((each,), 1, dtype, "fp32", False), arch) for each in both)


def runs(problem: Problem, arch: str) -> tuple[tuple[int, int], ...]:
    """The groups of factors that kernels for any sizes apply in one pass each, first to last.
    Raises UnsupportedError for a factor that no block's shared memory holds."""
    from kernlib.families.kronecker_product.kernels.modes import MODES

    groups = grouping.groups(MODES, grouping.product_of(problem), arch)
    if groups is None:
        largest = max(problem.sizes, key=math.prod)
        raise UnsupportedError(
            f"a factor {largest[0]} x {largest[1]} in {problem.dtype} does not fit the shared "
            f"memory of a block of {arch}"
        )
    return groups


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    arch: str,
    multiprocessors: int,
    choice: Mapping[str, object] | None = None,
    passes: int | None = None,
) -> Lowered | None:
    """The launches of a call: of the kind that a choice names, if that takes it, else by rule. By
    rule None where torch is faster, which may compute it with so many ``passes`` over the result
    behind its products; it may not with None."""
    gpu = Gpu(arch, multiprocessors)
    tuned = kernel.match(choice, kernel.options(planners(), problem, arch)) if choice else None
    option = tuned or _by_halves(problem, arch)
    if option is None:
        option = kernel.choose(_sums(), problem, gpu)
        if option is None:
            runs(problem, arch)  # raises
        if passes is not None:
            from kernlib.families.kronecker_product.lowering import by_torch

            if by_torch.gains(problem, option.kernel, gpu, passes):
                return None
    return option.kernel.launch(epilogue, problem, gpu, option.knobs)


def candidates(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
) -> list[tuple[Choice, Lowered]]:
    """The choices that there are for a call, with the launches of each."""
    gpu = Gpu(arch, multiprocessors)
    return [
        (option.choice, option.kernel.launch(epilogue, problem, gpu, option.knobs))
        for option in kernel.options(planners(), problem, arch)
    ]


def variants(
    epilogue: tuple[Epilogue, ...],
    sizes: tuple[Size, ...],
    inside: bool,
    kinds: list[tuple[str, str]],
    arch: str,
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose by rule for factors of these sizes and ``kinds`` of
    numbers: (dtype, precision). None for factors that kernels do not take."""
    specs: list[KernelSpec] = []
    for dtype, precision in kinds:
        elements = grouping.COLUMNS * math.prod(rows for rows, _ in sizes)
        scope = Group(sizes, elements, dtype, precision, inside)
        specs += kernel.specs(_hopper(), epilogue, scope, arch)
        rows = kernel.specs(_whole_rows(), epilogue, scope, arch)
        # Whole rows go before all others, whatever the sizes.
        specs += rows or kernel.specs((*_half_slabs(), *_sums()), epilogue, scope, arch)
    return list(dict.fromkeys(specs))
