"""The kernel largest.cuh of kernel_sources/kronecker_product/hopper: the largest number of each row
of x, or of each column with the factors on the left."""

from __future__ import annotations

from kernlib.families.kronecker_product.lowering.problem import Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Step

THREADS, CHUNK, COLUMNS = 256, 8, 64  # as in largest.cuh
UNROLLED, BLOCKS, MOST_DOWN = 4, 8, 65535  # loads at once; of a multiprocessor; of a grid
PARAMETERS = Parameters(2, "<5q")


def spec(inside: bool) -> KernelSpec:
    """The KernelSpec, for float16."""
    source = f"""#include "common/types.cuh"

constexpr int THREADS = {THREADS};
constexpr bool INSIDE = {str(inside).lower()};
constexpr int PARAMETER_BYTES = {PARAMETERS.size};

#include "kronecker_product/hopper/largest.cuh"
"""
    words = "columns" if inside else "rows"
    entry, description = "kronecker_product_largest", f"kronecker_product largest float16 {words}"
    shared = 4 * (COLUMNS if inside else 1)
    made = KernelSpec("kronecker_product", source, entry, THREADS, shared, description=description)
    return named(made, "float16", words)


def step(problem: Problem, multiprocessors: int, place: tuple[str, int]) -> Step:
    """The launch, which takes zeros at a place to bits of float32."""
    x, inside = problem.x, problem.inside
    along, across = (x.column, x.feature) if inside else (x.feature, x.column)
    aligned = along == 1 and across % CHUNK == 0 and x.alignment % 16 == 0
    blocks = ceil_div(problem.columns, COLUMNS) if inside else problem.columns
    own = THREADS * CHUNK // COLUMNS if inside else THREADS * CHUNK  # features at once
    wanted = ceil_div(BLOCKS * multiprocessors, blocks)
    most = min(ceil_div(problem.in_features, own * UNROLLED), MOST_DOWN)
    sizes = problem.in_features, problem.columns
    fixed = PARAMETERS.pack(*sizes, x.feature, x.column, int(aligned))
    return Step(spec(inside), (blocks, max(1, min(wanted, most))), fixed, (("x", 0), place))
