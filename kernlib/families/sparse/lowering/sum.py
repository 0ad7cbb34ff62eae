"""The launch behind a product whose columns were divided: parts of sums, added up in their order.

Every format's product may end in it, with :func:`step`.
"""

from __future__ import annotations

import struct

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.lowering.problem import Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.names import named
from kernlib.lowering.steps import Step

THREADS = 128
FIXED = "<4q2i"
# Targets that know how.
OVERLAPPING = ("sm_90a", "sm_100", "sm_103", "sm_107", "sm_110", "sm_120", "sm_121")


def step(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, parts: int, begin: int = 0
) -> Step:
    """Adds up ``parts`` float32 sums [part][n][row], which begin at a byte of the workspace."""
    one = problem.columns * problem.rows
    fixed = struct.pack(FIXED, problem.rows, one, *problem.out_strides, problem.columns, parts)
    grid = (ceil_div(problem.rows, THREADS), min(problem.columns, 65535))
    made = spec(epilogue, problem.dtype, arch)
    pointers = (("workspace", begin), ("out", 0), *text.vector_pointers(epilogue))
    scalars = text.scalar_count(epilogue)
    return Step(made, grid, fixed, pointers, scalars, overlaps=arch in OVERLAPPING)


def spec(epilogue: tuple[Epilogue, ...], dtype: str, arch: str) -> KernelSpec:
    """The spec of a dtype of the result."""
    overlaps = arch in OVERLAPPING
    size = text.parameters(2, FIXED, epilogue).size
    source = f"""{text.preamble(dtype, dtype, epilogue)}
#define OVERLAPS {int(overlaps)}
constexpr int PARAMETER_BYTES = {size};

#include "sparse/sum.cuh"
"""
    description = f"sparse sum {dtype} {' '.join(map(str, epilogue))}".strip()
    made = KernelSpec("sparse", source, "sparse_sum", THREADS, description=description)
    return named(made, dtype, epilogue=epilogue)
