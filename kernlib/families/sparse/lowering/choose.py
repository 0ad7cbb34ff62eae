"""From a product with a compressed matrix to kernels, grids and parameters, by its format.

Pure arithmetic on plain data. Each format that has kernels of its own has a module,
with

    MOST_COLUMNS                                        vectors that one call takes
    takes(problem, arch) -> whether it computes a problem
    lower(epilogue, problem, arch, multiprocessors) -> Lowered
    variants(epilogue, dtypes, arch) -> every spec that its lower() can choose
    READS_AHEAD    whether its first launch, where it may overlap the one before, reads the matrix
                   and nothing else before it waits for that; if not, it is not there
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.lowering.problem import Problem
from kernlib.families.sparse.lowering.sum import OVERLAPPING
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered

FORMATS = ("bitmap", "macko", "u8", "u4", "u2")  # those with kernels; a dense matrix is cuBLAS's


def module_of(name: str) -> ModuleType:
    """The module of a format with kernels."""
    return import_module(f"kernlib.families.sparse.lowering.{name}")


def takes(name: str, problem: Problem, arch: str) -> bool:
    """Whether a format's kernels compute a problem; else it is decoded and multiplied by cuBLAS."""
    return name in FORMATS and module_of(name).takes(problem, arch)


def lower(
    name: str, epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
) -> Lowered:
    """The launches of a call by a format's kernels, which take it."""
    return module_of(name).lower(epilogue, problem, arch, multiprocessors)


def reads_ahead(name: str, arch: str) -> bool:
    """Whether the first launch of a format's kernels may begin before the one before it has ended,
    if that does not write the matrix: if it is frozen."""
    return arch in OVERLAPPING and getattr(module_of(name), "READS_AHEAD", False)


def variants(
    name: str, epilogue: tuple[Epilogue, ...], dtypes: tuple[str, ...], arch: str
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose; none for a format without kernels."""
    return module_of(name).variants(epilogue, dtypes, arch) if name in FORMATS else []
