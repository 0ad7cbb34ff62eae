"""Products with the format u2: see :mod:`kernlib.families.sparse.lowering.slices`."""

from __future__ import annotations

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.lowering import codes, slices
from kernlib.families.sparse.lowering.problem import Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered

CODE = codes.U2
MOST_COLUMNS = slices.MOST_COLUMNS
READS_AHEAD = True


def takes(problem: Problem, arch: str) -> bool:
    """Whether :func:`lower` takes a problem."""
    return slices.takes(problem, arch)


def lower(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
) -> Lowered:
    """The launches of a product."""
    return slices.lower(CODE, epilogue, problem, arch, multiprocessors)


def variants(
    epilogue: tuple[Epilogue, ...], dtypes: tuple[str, ...], arch: str
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose."""
    return slices.variants(CODE, epilogue, dtypes, arch)
