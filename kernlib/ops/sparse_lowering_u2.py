"""Products with the format u2: see :mod:`kernlib.ops.sparse_lowering_slices`."""

from __future__ import annotations

from kernlib.descriptors.epilogues import Epilogue
from kernlib.jit.spec import KernelSpec
from kernlib.ops import sparse_lowering_slices as slices
from kernlib.ops.sparse_format_u2 import CODE
from kernlib.ops.sparse_problem import Problem
from kernlib.ops.steps import Lowered

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
