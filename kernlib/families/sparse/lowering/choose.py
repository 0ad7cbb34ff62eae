"""From a product with a compressed matrix to kernels, grids and parameters, by its format.

Pure arithmetic on plain data. Each format that has kernels of its own has a module, or for u8, u4
and u2 an object of the module ``slices``, for values in fewer bits one of ``quantised``, with

    takes(problem, arch) -> whether it computes a problem
    lower(epilogue, problem, arch, multiprocessors) -> Lowered
    variants(epilogue, dtypes, arch) -> every spec that its lower() can choose
    ahead(step) -> its first launch, which reads nothing but the matrix before it waits for the
                   launch before it; formats whose kernels cannot have no such name
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.lowering.codes import SLICES
from kernlib.families.sparse.lowering.problem import Problem
from kernlib.families.sparse.lowering.sum import OVERLAPPING
from kernlib.families.sparse.lowering.value_codes import QUANTISED
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered

if TYPE_CHECKING:
    from kernlib.families.sparse.lowering.quantised import QuantisedKernels
    from kernlib.families.sparse.lowering.slices import SlicesKernels

# Those with kernels; a dense matrix is cuBLAS's.
FORMATS = ("bitmap", "macko", *SLICES, *QUANTISED)


def kernels_of(name: str) -> ModuleType | SlicesKernels | QuantisedKernels:
    """The kernels of a format that has some."""
    if name in SLICES:
        return import_module("kernlib.families.sparse.lowering.slices").KERNELS[name]
    if name in QUANTISED:
        return import_module("kernlib.families.sparse.lowering.quantised").KERNELS[name]
    return import_module(f"kernlib.families.sparse.lowering.{name}")


def takes(name: str, problem: Problem, arch: str) -> bool:
    """Whether a format's kernels compute a problem; else it is decoded and multiplied by cuBLAS."""
    return name in FORMATS and kernels_of(name).takes(problem, arch)


def lower(
    name: str, epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
) -> Lowered:
    """The launches of a call by a format's kernels, which must take it."""
    return kernels_of(name).lower(epilogue, problem, arch, multiprocessors)


def ahead(name: str, lowered: Lowered, arch: str) -> Lowered:
    """The launches of a call with a frozen matrix, which nothing writes: the first may read it
    before the launch before it has ended."""
    kernels = kernels_of(name)
    if arch not in OVERLAPPING or not lowered.steps or not hasattr(kernels, "ahead"):
        return lowered
    first, *others = lowered.steps
    return lowered._replace(steps=(kernels.ahead(first), *others))


def variants(
    name: str, epilogue: tuple[Epilogue, ...], dtypes: tuple[str, ...], arch: str
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose; none for a format without kernels."""
    return kernels_of(name).variants(epilogue, dtypes, arch) if name in FORMATS else []
