"""Gradients of a Kronecker product by its factors and by x: one launch for each group of factors,
and one that adds up what their blocks have summed.

Where there are several groups, what each makes of x is made again first, as none of it was kept.
The gradient by it then takes its place in the workspace.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kernlib.families.kronecker_product.kernels.gradients import GRADIENTS, Job, fits, most_columns
from kernlib.families.kronecker_product.kernels.modes import MODES
from kernlib.families.kronecker_product.kernels.sum import SUM
from kernlib.families.kronecker_product.lowering import grouping
from kernlib.families.kronecker_product.lowering.problem import Factor, Layout, Problem
from kernlib.families.kronecker_product.lowering.runs import Run, split
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import WORKSPACE, Lowered

MOST_FACTORS = 128  # whose strides a launch's parameters hold


class Gradients(NamedTuple):
    """Of a product, whose ``out`` is the layout of the gradient that is given: where the one by x
    goes, whether it is computed, of which factors a call is given the transpose, and whether a
    gradient by a factor is the sum of all batches."""

    product: Problem
    back: Layout
    by_x: bool
    turned: tuple[bool, ...]
    is_one_sum: bool


def takes(sizes: tuple[grouping.Size, ...], dtype: str, arch: str) -> bool:
    """Whether kernels compute the gradients by factors of these rows and columns: a block's shared
    memory and registers hold each of them."""
    return len(sizes) <= MOST_FACTORS and all(fits((size,), dtype, arch) for size in sizes)


def lower(gradients: Gradients, arch: str, multiprocessors: int) -> Lowered:
    """The launches. Operands are ``x``, ``grad``, ``to_x`` if that is one of the gradients,
    ``factor0`` and so on, and ``to_factor0`` and so on."""
    problem, gpu = gradients.product, Gpu(arch, multiprocessors)
    itemsize = DTYPES[problem.dtype].sums.bytes
    runs, at, places = _runs(gradients, arch), 0, []
    for run in runs[:-1]:
        places.append((WORKSPACE, at))
        at = round_up(at + run.elements * itemsize, 256)
    sources, grads = [("x", 0), *places], [*places, ("grad", 0)]
    forward = []
    for run, source, target in zip(runs[:-1], sources[:-1], places, strict=True):
        lowered = MODES.launch((), run, gpu, MODES.default(run, gpu))
        forward.append(lowered.steps[0].placed({"x": source, "out": target}))
    backward, summed, base = [], [], at
    for index in reversed(range(len(runs))):
        by_x = gradients.by_x or index > 0
        job = Job(runs[index], gradients.is_one_sum, by_x, at, sources[index], grads[index])
        backward += GRADIENTS.launch((), job, gpu, {}).steps
        matrices, size = GRADIENTS.matrices(job, gpu, (at - base) // itemsize)
        summed += matrices
        at = round_up(at + size, 256)
    last = SUM.step(problem, gradients.turned, gradients.is_one_sum, summed, (WORKSPACE, base))
    return Lowered((*forward, *backward, last), at)


def _runs(gradients: Gradients, arch: str) -> list[Run]:
    """Those whose gradients one pass takes, first to last as they are applied to x."""
    product = grouping.product_of(gradients.product)
    groups = grouping.groups(GRADIENTS, product, arch)
    assert groups is not None, product
    return split(gradients.product, groups, back=gradients.back)


def variants(
    sizes: tuple[grouping.Size, ...], inside: bool, kinds: list[tuple[str, str]], arch: str
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for factors of these sizes and ``kinds`` of numbers:
    (dtype, precision). None for factors that kernels do not take."""
    specs: list[KernelSpec] = []
    for dtype, precision in kinds:
        if takes(sizes, dtype, arch):
            specs += _variants(_some(sizes, dtype, precision, inside), arch)
    return list(dict.fromkeys(specs))


def _variants(gradients: Gradients, arch: str) -> list[KernelSpec]:
    specs, matrices, runs, problem = [], 0, _runs(gradients, arch), gradients.product
    for run in runs:
        for by_x in {True, not run.begins}:
            variant = GRADIENTS.variant(run, by_x, Gpu(arch, 1))
            for bits in range(most_columns(variant, arch).bit_length()):
                specs.append(GRADIENTS.spec((), variant._replace(columns=1 << bits), arch))
        matrices += len(variant.modes)
        if not run.ends:
            specs += MODES.specs((), run, arch)
    return [
        *specs,
        SUM.spec(None, SUM.Variant(problem.dtype, len(problem.factors), matrices), arch),
    ]


def _some(sizes: tuple[grouping.Size, ...], dtype: str, precision: str, inside: bool) -> Gradients:
    """Those of some product of factors of these sizes."""
    columns = grouping.COLUMNS
    factors = tuple(Factor(rows, columns, columns, 1) for rows, columns in sizes)
    ends = (math.prod(rows for rows, _ in sizes), math.prod(columns for _, columns in sizes))
    x, out = (Layout(0, 0, *((1, columns) if inside else (count, 1))) for count in ends)
    problem = Problem(1, columns, inside, factors, x, out, dtype, precision)
    return Gradients(problem, x, True, (False,) * len(sizes), True)
