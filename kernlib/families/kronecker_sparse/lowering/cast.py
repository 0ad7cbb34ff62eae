"""The kernel of kernel_sources/kronecker_sparse/cast.cuh: what a plan of half types reads and
writes of float32 tensors, such as the master weights of mixed precision and their gradients."""

from __future__ import annotations

from collections.abc import Mapping

from kernlib.families.kronecker_sparse.lowering.transpose import ALIGNMENT
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

WIDE = "float32"
THREADS = 256
CHUNK = 8  # elements of a thread
ARRAYS = 3  # of one launch
PARAMETERS = Parameters(2 * ARRAYS, f"<{ARRAYS + 1}q")

Pointer = tuple[str, int]


def lower(
    lowered: Lowered,
    dtype: str,
    read: Mapping[str, int],
    written: Mapping[str, int],
    is_aligned: bool = True,
) -> Lowered:
    """Launches that take tensors of a half ``dtype``, with float32 ones in the place of some: those
    of ``read`` are rounded before the first launch, and ``written`` are what it widens behind the
    last. Both are numbers of elements by names, at most ARRAYS each. ``is_aligned`` says whether
    the float32 tensors begin at whole 16 bytes."""
    rooms: dict[str, Pointer] = {}
    size = 0
    for name, count in (*read.items(), *written.items()):
        rooms[name] = WORKSPACE, size
        size += round_up(count * DTYPES[dtype].bytes, ALIGNMENT)
    places = {**rooms, WORKSPACE: (WORKSPACE, size)}
    steps = [step.placed(places) for step in lowered.steps]
    if read:
        arrays = [((name, 0), rooms[name], count) for name, count in read.items()]
        steps.insert(0, _step(WIDE, dtype, arrays, is_aligned))
    if written:
        arrays = [(rooms[name], (name, 0), count) for name, count in written.items()]
        steps.append(_step(dtype, WIDE, arrays, True))
    return Lowered(tuple(steps), size + lowered.workspace)


def _step(
    source: str, target: str, arrays: list[tuple[Pointer, Pointer, int]], is_aligned: bool
) -> Step:
    """The launch that casts arrays, each read from one place and written to another."""
    counts = [count for *_, count in arrays]
    blocks = ceil_div(sum(ceil_div(count, CHUNK) for count in counts), THREADS)
    unused = ARRAYS - len(arrays)
    fixed = PARAMETERS.pack(*counts, *[0] * unused, is_aligned)
    (first, to, _), *_ = arrays
    sources = [each[0] for each in arrays] + [first] * unused
    targets = [each[1] for each in arrays] + [to] * unused
    return Step(spec(source, target), (blocks, 1), fixed, (*sources, *targets))


def variants(dtypes: list[str]) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for half ``dtypes``."""
    pairs = [pair for dtype in dtypes for pair in ((WIDE, dtype), (dtype, WIDE))]
    return [spec(*pair) for pair in pairs]


def spec(source: str, target: str) -> KernelSpec:
    """The KernelSpec that casts one dtype to another."""
    text = f"""#include "common/types.cuh"

using InputT = {DTYPES[source].cuda};
using OutputT = {DTYPES[target].cuda};

constexpr int PARAMETER_BYTES = {PARAMETERS.size};

#include "kronecker_sparse/cast.cuh"
"""
    description = f"kronecker_sparse cast {source} {target}"
    entry = "kronecker_sparse_cast"
    result = KernelSpec("kronecker_sparse", text, entry, THREADS, description=description)
    return named(result, source, target)
