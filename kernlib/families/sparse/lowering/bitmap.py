"""The product of a bitmap matrix with few vectors: bitmap/bitmap.cuh, and sum.cuh behind it where
its columns are more than the warps of a CTA take side by side, and CTAs do not take one range of
those after the other. Where it can,
:mod:`~kernlib.families.sparse.lowering.bitmap_many` multiplies more. ``codes`` is what values in
fewer bits are made of, such as "int8", or "" where values have all of their bits."""

from __future__ import annotations

import struct
from itertools import product
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.sparse.lowering import bitmap_many
from kernlib.families.sparse.lowering import sum as last
from kernlib.families.sparse.lowering.problem import Problem
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.steps import Lowered, Step

AT_ONCE = 16  # vectors of a launch
# In two launches: 215 us for 32 of them with 8192 x 28672 at density .5, beside 304 of laying the
# matrix out and cuBLAS on an H200, by the measured time of 16.
MOST_COLUMNS = 2 * AT_ONCE
CHUNK_ROWS, CHUNK_COLUMNS = 16, 256
WORD_BYTES = 512  # of a chunk's bitmap
MAX_STAGES = 8
# Of codes, which memory brings faster than warps decode them: with 4, int4 at density .5 took 48.9
# us where 2 take 46.1 on an H200 (8192 x 28672), as the second to fourth chunks delay the first.
MAX_STAGES_OF_CODES = 2
RING_OFFSET = 128
SLOT_TAIL = 16  # bytes behind a chunk: up to 12 are read for nothing, 8 are a barrier
WARPS = (16, 12, 8)  # of a CTA
# Of one that multiplies codes, which are fewer bytes and take fewer registers: 28 were 3 to 13 %
# faster than 16 on an H200 at 8192 x 28672, 20 and 24 slower.
WARPS_OF_CODES = (28, 16, 8)
FIXED = "<4q12i"  # struct Fixed
POINTERS = 4
MAX_UNITS = 2**31 - 1
# CTAs take all ranges of their slabs up to this many vectors times ranges behind the first, as each
# of those is read anew by all CTAs. On an H200 with a launch of something else between products
# 4096 x 11008 at density .5, of 3 ranges, takes 21.0, 21.6, 23.0 and 26.1 us for 1, 2, 4 and 8
# vectors so, and 21.8, 22.2, 23.1 and 25.1 with a second launch for the sums; one behind the other
# 18.3, 18.8, 19.7 and 22.6 so, and 20.3, 21.0, 21.8 and 23.8.
MOST_READ_ANEW = 8
MOST_RANGES_OF_CODES = 2  # with int8 and one vector 4 ranges take 4 % longer, as x becomes digits
LEAST_STAGES = 3  # that are left beside the sums that CTAs hold, if there were more
WITHOUT_E4M3 = ("sm_80", "sm_86", "sm_87")  # targets without an instruction that makes halves of it


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue. ``tiles`` of 8 vectors, 0 for a
    single vector; ``sums``, whether the result goes to the workspace."""

    dtype: str
    warps: int
    tiles: int
    sums: bool
    codes: str = ""


def takes(problem: Problem, arch: str, codes: str = "") -> bool:
    """Whether the kernels compute a problem: half types, and up to MOST_COLUMNS vectors, or as many
    as :mod:`~kernlib.families.sparse.lowering.bitmap_many` takes; of codes AT_ONCE."""
    is_many = not codes and bitmap_many.takes(problem, arch)
    return is_many or _takes_few(problem, arch, codes)


def _most_tiles(arch: str, codes: str = "") -> int:
    """Tiles of 8 vectors that one launch takes."""
    return 1 if arch in bitmap_many.ARCHS and not codes else AT_ONCE // 8


def _takes_few(problem: Problem, arch: str, codes: str) -> bool:
    most = bitmap_many.LEAST_COLUMNS - 1 if arch in bitmap_many.ARCHS else MOST_COLUMNS
    most = AT_ONCE if codes else most
    if problem.dtype not in ("float16", "bfloat16") or not 0 < problem.columns <= most:
        return False
    warps = _warps(problem, arch, codes)
    units = _slabs(problem) * _ranges(problem, warps)
    return 0 < units <= MAX_UNITS and problem.cols <= MAX_UNITS - CHUNK_COLUMNS


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    arch: str,
    multiprocessors: int,
    codes: str = "",
) -> Lowered:
    """The launches of a call. Raises UnsupportedError where :func:`takes` says no."""
    if not takes(problem, arch, codes):
        name = f"bitmap-{codes}" if codes else "bitmap"
        raise UnsupportedError(
            f"no {name} kernel multiplies a {problem.rows} x {problem.cols} {problem.dtype} matrix "
            f"by {problem.columns} vectors"
        )
    if not codes and bitmap_many.takes(problem, arch):
        return bitmap_many.lower(epilogue, problem, arch, multiprocessors)
    if problem.columns > AT_ONCE:
        return _one_by_one(epilogue, problem, arch, multiprocessors)
    warps = _warps(problem, arch, codes)
    ranges = _ranges(problem, warps)
    variant = _variant(problem, warps, False)._replace(codes=codes)
    if not has_all_ranges(problem, variant, ranges, arch, multiprocessors):
        variant = variant._replace(sums=True)
    made = spec(() if variant.sums else epilogue, variant, arch)
    fixed, ctas = _fixed(problem, variant, ranges, arch, multiprocessors)
    grid = (ctas, 1)
    operands = (("data", 0), ("offsets", 0), ("x", 0))
    if variant.sums:
        main = Step(made, grid, fixed, (*operands, ("workspace", 0)))
        size = 4 * ranges * problem.columns * problem.rows
        return Lowered((main, last.step(epilogue, problem, arch, ranges)), size)
    pointers = (*operands, ("out", 0), *text.vector_pointers(epilogue))
    return Lowered((Step(made, grid, fixed, pointers, text.scalar_count(epilogue)),))


def _one_by_one(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
) -> Lowered:
    """Launches of up to AT_ONCE vectors each, one behind the other, which share the workspace."""
    item = DTYPES[problem.dtype].bytes
    steps, workspace = [], 0
    for first in range(0, problem.columns, AT_ONCE):
        part = problem._replace(columns=min(AT_ONCE, problem.columns - first))
        lowered = lower(epilogue, part, arch, multiprocessors)
        begins = {
            "x": first * problem.x_stride * item,
            "out": first * problem.out_strides[0] * item,
        }
        for step in lowered.steps:
            pointers = tuple((name, at + begins.get(name, 0)) for name, at in step.pointers)
            steps.append(step._replace(pointers=pointers))
        workspace = max(workspace, lowered.workspace)
    return Lowered(tuple(steps), workspace)


def ahead(step: Step) -> Step:
    """The first launch, of a frozen matrix: the copy engine fills the ring before it waits."""
    return step._replace(overlaps=True)


def _fixed(
    problem: Problem, variant: Variant, ranges: int, arch: str, multiprocessors: int
) -> tuple[bytes, int]:
    """struct Fixed, and the CTAs."""
    slabs, chunks, slot = _slabs(problem), _chunks(problem), _slot(problem)
    units = slabs * ranges if variant.sums else slabs  # that are shared out
    ctas = min(units, multiprocessors)
    running = 0 if variant.sums else _running(variant, slabs, ranges, ctas)
    stages = _stages(problem, variant, arch, running)
    fixed = struct.pack(
        FIXED, problem.rows, problem.x_stride, *problem.out_strides,
        problem.cols, problem.columns, chunks, slabs, stages, slot,
        *divmod(units, ctas), *divmod(chunks, ranges), ranges, _dynamic(variant, arch) - running,
    )  # fmt: skip
    return fixed, ctas


def _stages(problem: Problem, variant: Variant, arch: str, running: int = 0) -> int:
    """Chunks of a warp's ring that fit beside ``running`` bytes of sums, at most MAX_STAGES."""
    most = MAX_STAGES_OF_CODES if variant.codes else MAX_STAGES
    return min(most, (_ring(variant, arch) - running) // (variant.warps * _slot(problem)))


def _running(variant: Variant, slabs: int, ranges: int, ctas: int) -> int:
    """Bytes of the sums that a CTA holds from range to range."""
    of_slab = 512 * variant.tiles or 64
    return round_up(ceil_div(slabs, ctas) * of_slab, 128) if ranges > 1 else 0


def has_all_ranges(
    problem: Problem, variant: Variant, ranges: int, arch: str, multiprocessors: int
) -> bool:
    """Whether CTAs take all ranges of their slabs, in one launch: where none has more units by
    that than by cutting a slab's ranges apart, and x is small enough to be read for each range."""
    if ranges == 1:
        return True
    most_ranges = MOST_RANGES_OF_CODES if variant.codes else ranges
    if ranges > most_ranges or (ranges - 1) * problem.columns > MOST_READ_ANEW:
        return False
    slabs = _slabs(problem)
    running = _running(variant, slabs, ranges, min(slabs, multiprocessors))
    stages = _stages(problem, variant, arch)
    if _stages(problem, variant, arch, running) < min(stages, LEAST_STAGES):
        return False
    units = ceil_div(slabs * ranges, multiprocessors)  # of the CTA with most, cut anywhere
    return ceil_div(slabs, multiprocessors) * ranges <= units


def _warps(problem: Problem, arch: str, codes: str = "") -> int:
    """Warps of a CTA: of those that leave room for two stages the fewest that make as few ranges as
    any, as others stand idle."""
    every = WARPS_OF_CODES if codes else WARPS
    known = [_variant(problem, warps)._replace(codes=codes) for warps in every]
    fitting = [v.warps for v in known if _has_registers(v, arch) and _stages(problem, v, arch) >= 2]
    return min(fitting or every[-1:], key=lambda warps: (_ranges(problem, warps), warps))


def _has_registers(variant: Variant, arch: str) -> bool:
    """Whether its kernel spills none, or of codes next to none: 16 vectors take up to 168. ptxas
    takes more for Blackwell's sm_12x."""
    if variant.codes and arch.startswith("sm_12") and variant.warps > 16:
        return False
    return variant.tiles < 2 or variant.warps <= (16 if variant.codes else 12)


def _variant(problem: Problem, warps: int, sums: bool = True) -> Variant:
    return Variant(problem.dtype, warps, _tiles(problem.columns), sums)


def _slot(problem: Problem) -> int:
    """Bytes of the ring's places: the largest chunk and SLOT_TAIL."""
    return -(-(problem.fact("largest") + SLOT_TAIL) // 128) * 128


def _slabs(problem: Problem) -> int:
    return ceil_div(problem.rows, CHUNK_ROWS)


def _chunks(problem: Problem) -> int:
    return ceil_div(problem.cols, CHUNK_COLUMNS)


def _ranges(problem: Problem, warps: int) -> int:
    return -(-_chunks(problem) // warps)


def _tiles(columns: int) -> int:
    return 0 if columns == 1 else ceil_div(columns, 8)


def _static(variant: Variant) -> int:
    """Shared memory that the kernel declares: ranks, and the barriers of sums."""
    return variant.warps * WORD_BYTES + 128


def _sums(variant: Variant, arch: str) -> int:
    """Bytes of the slabs' sums that wait, in front of the ring."""
    depth = 2 if arch in last.OVERLAPPING else 3
    return variant.warps * (depth * 512 * variant.tiles if variant.tiles else 4 * 64)


def _dynamic(variant: Variant, arch: str) -> int:
    """All that is left of a CTA's shared memory: sums and the ring."""
    return (targets.SHARED_BYTES[arch] - _static(variant)) // 128 * 128


def _ring(variant: Variant, arch: str) -> int:
    return _dynamic(variant, arch) - _sums(variant, arch) - RING_OFFSET


def spec(epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
    """The KernelSpec of a variant."""
    size = text.parameters(POINTERS, FIXED, epilogue).size
    out = "float32" if variant.sums else variant.dtype
    source = f"""{text.preamble(variant.dtype, out, epilogue)}
{_of_codes(variant, arch)}constexpr int WARPS = {variant.warps};
constexpr int COLUMN_TILES = {variant.tiles};
constexpr bool SUMS = {str(variant.sums).lower()};
constexpr int PARAMETER_BYTES = {size};
#define COPY_ENGINE {int(arch in last.OVERLAPPING)}

#include "sparse/bitmap/bitmap.cuh"
"""
    words = [
        *[variant.codes] * bool(variant.codes),
        f"warps={variant.warps}",
        f"vectors={8 * variant.tiles or 1}",
        *["sums"] * variant.sums,
    ]
    description = " ".join(["sparse bitmap", variant.dtype, *words, *map(str, epilogue)])
    threads, shared = 32 * variant.warps, _dynamic(variant, arch)
    made = KernelSpec("sparse", source, "sparse_bitmap", threads, shared, description=description)
    return named(made, variant.dtype, *words, epilogue=epilogue)


def _of_codes(variant: Variant, arch: str) -> str:
    """What a source says of codes: nothing where there are none."""
    if not variant.codes:
        return ""
    in_digits = variant.codes != "fp8" and not variant.tiles  # by tensor cores of integers
    known = {"CODES": variant.codes.upper(), "E4M3": int(arch not in WITHOUT_E4M3)}
    known["IN_DIGITS"] = int(in_digits)
    lines = [f"#define {name} {value}" for name, value in known.items()]
    return "\n".join([*lines, '#include "sparse/quantised/quantised.cuh"', "", ""])


def variants(
    epilogue: tuple[Epilogue, ...], dtypes: tuple[str, ...], arch: str, codes: str = ""
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose."""
    found, every = [], WARPS_OF_CODES if codes else WARPS
    for dtype in (d for d in dtypes if DTYPES[d].bytes == 2):
        for warps, tiles, sums in product(
            every, range(_most_tiles(arch, codes) + 1), (False, True)
        ):
            variant = Variant(dtype, warps, tiles, sums, codes)
            if not _has_registers(variant, arch):
                continue
            found.append(spec(() if sums else epilogue, variant, arch))
        found.append(last.spec(epilogue, dtype, arch))
    found += bitmap_many.variants(epilogue, dtypes, arch)
    return list(dict.fromkeys(found))
