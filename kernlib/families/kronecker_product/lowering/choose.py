"""The launches of a Kronecker product: one for each run of factors, through a workspace where there
are several."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_product.lowering import (
    by_torch,
    estimates,
    grouping,
    halves,
    hopper,
    hopper_variant,
    modes,
    slabs,
)
from kernlib.families.kronecker_product.lowering.grouping import Size
from kernlib.families.kronecker_product.lowering.problem import Problem
from kernlib.families.kronecker_product.lowering.runs import Run, split
from kernlib.families.kronecker_product.lowering.variant import Variant, spec
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.choice import Choice
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.steps import WORKSPACE, Lowered

COLUMNS = 1024  # that the time of a run is estimated for
LEAST_NARROW, WIDE_ROWS = 4, 32  # such factors, so wide, of which other kernels take two at once
MOST_WHOLE = 1 << 15, 1 << 12  # features of tf32's rows, and columns, that a block keeps whole


def takes(sizes: tuple[grouping.Size, ...], dtype: str, arch: str) -> bool:
    """Whether kernels take factors of these rows and columns, on either side."""
    limits = (
        grouping.arithmetic_of(dtype, "fp32"),
        modes.most_features(dtype),
        modes.room(dtype, arch),
    )
    return all(grouping.fits((each,), *limits) for size in sizes for each in (size, size[::-1]))


def runs(problem: Problem, arch: str) -> tuple[tuple[int, int], ...]:
    """The runs of factors that are applied in one pass each, first to last. Raises UnsupportedError
    for a factor that no block's shared memory holds."""
    sizes = problem.sizes
    found = _runs(sizes, problem.dtype, problem.precision, arch)
    if found is None:
        largest = max(sizes, key=math.prod)
        raise UnsupportedError(
            f"a factor {largest[0]} x {largest[1]} in {problem.dtype} does not fit the shared "
            f"memory of a block of {arch}"
        )
    return found


def _runs(sizes: tuple, dtype: str, precision: str, arch: str) -> tuple | None:
    """Those of any number of columns, so that the bits of one do not depend on it."""
    arithmetic = grouping.arithmetic_of(dtype, precision)
    most, room = modes.most_features(dtype), modes.room(dtype, arch)
    item, sums = DTYPES[dtype].bytes, DTYPES[dtype].sums.bytes

    def cost(run: tuple[Size, ...], elements: int, begins: bool, ends: bool) -> float | None:
        if not grouping.fits(run, arithmetic, most, room):
            return None
        return grouping.cycles(
            run,
            elements,
            (item * begins, item * ends),
            (sums * (not begins), sums * (not ends)),
            arithmetic,
            grouping.fits(run, arithmetic, most, room // 2),
            max(grouping.widest(run), modes.TILE_BYTES // sums),
        )

    return grouping.groups(sizes, COLUMNS * _features(sizes), cost)


def _features(sizes: tuple[Size, ...]) -> int:
    return math.prod(rows for rows, _ in sizes)


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
    given = epilogue, problem, arch, multiprocessors
    named = _KINDS.get(str((choice or {}).get("kind")))
    found = named(*given) if named else None
    if found is not None:
        return found
    for lower_by in (_hopper_by_rule, _by_halves):
        found = lower_by(*given)
        if found is not None:
            return found
    return _by_rule(*given, passes)


def candidates(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
) -> list[tuple[Choice, Lowered]]:
    """The choices that there are for a call, with the launches of each."""
    given = epilogue, problem, arch, multiprocessors
    made = ((kind, lower_by(*given)) for kind, lower_by in _KINDS.items())
    return [({"kind": kind}, lowered) for kind, lowered in made if lowered is not None]


def _by_halves(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
) -> Lowered | None:
    """One launch, of one run of factors or several."""
    device, sizes = (arch, multiprocessors), problem.sizes
    found = _half_runs(sizes, problem.dtype, problem.precision, problem.inside, arch)
    if found is None:
        return None
    if len(found) == 1:
        (run,) = split(problem, found)
        columns = halves.columns_of(run, problem.dtype, *device)
        made = halves.variant(sizes, problem.dtype, problem.inside, columns, arch)
        operands = (("x", 0), ("out", 0), *((f"factor{number}", 0) for number in range(len(sizes))))
        return Lowered((halves.step(epilogue, run, made, *device, operands),))
    made = _half_slabs(sizes, problem.dtype, problem.inside, found, arch, _is_varied(problem))
    return None if made is None else slabs.lower(epilogue, problem, found, made, *device)


def _slabs_of(problem: Problem, found: tuple, arch: str) -> slabs.Variant | None:
    """The kernel that takes runs of factors in one launch; None where there is none."""
    if len(found) < 2:
        return None
    sizes = problem.sizes
    own = tuple(sizes[first:last] for first, last in found)
    kinds = problem.dtype, problem.precision, problem.inside, arch, _is_varied(problem)
    return slabs.variant(own, *kinds)


def _by_slabs(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
) -> Lowered | None:
    found = runs(problem, arch)
    made = _slabs_of(problem, found, arch)
    if made is None:
        return None
    return slabs.lower(epilogue, problem, found, made, arch, multiprocessors)


def _by_modes(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
) -> Lowered:
    return _apart(epilogue, problem, runs(problem, arch), arch, multiprocessors)


def _by_rule(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    arch: str,
    multiprocessors: int,
    passes: int | None,
) -> Lowered | None:
    """By one launch for all runs, where that gains, or one for each; None for torch."""
    found, device = runs(problem, arch), (arch, multiprocessors)
    lowered = _apart(epilogue, problem, found, *device)
    own = zip(_launches(problem, found, *device), lowered.steps, strict=True)
    launches = [estimates.Launch((run,), one, step.grid[0]) for (run, one), step in own]
    made = _slabs_of(problem, found, arch)
    whole = None if made is None else slabs.lower(epilogue, problem, found, made, *device)
    if whole is not None:
        one = estimates.Launch(tuple(split(problem, found)), made, whole.steps[-1].grid[0])
        if estimates.are_known(problem, device) and estimates.are_ragged(problem):
            times = estimates.kernel_time([one]), estimates.kernel_time(launches)
            gains = times[0] < times[1] or lowered.workspace > estimates.MOST_BYTES
        else:
            gains = slabs.gains(problem, found, made, *device)
        lowered, launches = (whole, [one]) if gains else (lowered, launches)
    if passes is not None and by_torch.gains(problem, launches, device, passes):
        return None
    return lowered


def _hopper_by_rule(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
) -> Lowered | None:
    kind = problem.dtype, problem.precision, problem.inside, arch
    gains = by_wgmma(problem.sizes, *kind)
    return hopper.lower(epilogue, problem, arch, multiprocessors) if gains else None


def by_wgmma(sizes: tuple[Size, ...], dtype: str, precision: str, inside: bool, arch: str) -> bool:
    """Whether the kernels of wgmma are faster than those for every GPU, where both take a product:
    measured on an H200, of 1024 rows. They are not where rows that a block keeps whole are read and
    written once (1024 x 16^4 of float16 in half the time), nor where several matrices are narrower
    than the tiles that they are multiplied as (32^4 on either side)."""
    found = hopper_variant.passes(sizes, dtype, precision, inside, arch)
    if len(found) < 2:
        return len(found) == 1
    if _is_whole(sizes, dtype, precision, inside, arch):
        return len(found) == 2 and inside and dtype != "float32"
    if inside and (dtype, precision) != ("float32", "tf32"):
        narrow = [part.rows for part in found if part.rows < hopper_variant.PANEL]
        return len(narrow) < LEAST_NARROW or min(narrow) < WIDE_ROWS
    return len([part for part in found[1:] if part.rows < hopper_variant.PANEL]) < 2


def _is_whole(sizes: tuple[Size, ...], dtype: str, precision: str, inside: bool, arch: str) -> bool:
    """Whether a block of the other kernels keeps rows, and is fast."""
    if (dtype, precision) == ("float32", "tf32"):
        is_short = _features(sizes) <= MOST_WHOLE[inside]
        return is_short and max(rows for rows, _ in sizes) < WIDE_ROWS
    runs = _half_runs(sizes, dtype, precision, inside, arch)
    return runs is not None and len(runs) == 1


def _is_varied(problem: Problem) -> bool:
    """Whether factors differ from batch to batch."""
    return any(factor.batch_stride for factor in problem.factors)


def _half_runs(
    sizes: tuple[Size, ...], dtype: str, precision: str, inside: bool, arch: str
) -> tuple | None:
    return halves.runs(sizes, dtype, precision, inside, COLUMNS * _features(sizes), arch)


def _half_slabs(sizes, dtype: str, inside: bool, found: tuple, arch: str, is_varied: bool):
    own = tuple(sizes[first:last] for first, last in found)
    return halves.variant_of_slabs(own, dtype, inside, arch, is_varied)


def _apart(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    found: tuple[tuple[int, int], ...],
    arch: str,
    multiprocessors: int,
) -> Lowered:
    """One launch for each run."""
    sums = DTYPES[problem.dtype].accumulator
    launches, steps = _launches(problem, found, arch, multiprocessors), []
    kept = [part.elements * DTYPES[sums].bytes for part, _ in launches[:-1]]
    second = round_up(max(kept[::2], default=0), 256)  # two buffers, in turn
    whole = second + max(kept[1::2], default=0)
    for index, ((part, made), (first, last)) in enumerate(zip(launches, found, strict=True)):
        source = (WORKSPACE, 0 if index % 2 else second) if index else ("x", 0)
        ends = index == len(launches) - 1
        target = ("out", 0) if ends else (WORKSPACE, second if index % 2 else 0)
        operands = (source, target, *((f"factor{number}", 0) for number in range(first, last)))
        own = epilogue if ends else ()
        steps.append(modes.step(own, part, made, arch, multiprocessors, operands))
    return Lowered(tuple(steps), whole)


def _launches(
    problem: Problem, found: tuple[tuple[int, int], ...], arch: str, multiprocessors: int
) -> list[tuple[Run, Variant]]:
    """Each run, and the kernel that takes it alone."""
    parts, made = split(problem, found), []
    for index, part in enumerate(parts):
        kind = problem.dtype, problem.precision
        columns = modes.columns_of(part, *kind, arch, multiprocessors)
        dtypes = _dtypes(problem.dtype, index == 0, index == len(parts) - 1)
        own = part.sizes, dtypes, problem.precision, part.inside, columns, arch
        made.append((part, modes.variant(*own)))
    return made


# The kinds of kernels that a choice names.
_KINDS: dict[str, Callable[..., Lowered | None]] = {
    "hopper": hopper.lower,
    "halves": _by_halves,
    "slabs": _by_slabs,
    "modes": _by_modes,
}


def variants(
    epilogue: tuple[Epilogue, ...],
    sizes: tuple[grouping.Size, ...],
    inside: bool,
    kinds: list[tuple[str, str]],
    arch: str,
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose by rule for factors of these sizes and ``kinds`` of
    numbers: (dtype, precision). None for factors that kernels do not take."""
    made = []
    for dtype, precision in kinds:
        if by_wgmma(sizes, dtype, precision, inside, arch):
            made += hopper.specs(epilogue, sizes, dtype, precision, inside, arch)
        found = _half_runs(sizes, dtype, precision, inside, arch)
        if found is not None and len(found) == 1:
            for bits in range(halves.most_columns(sizes, dtype, inside, arch).bit_length()):
                one = halves.variant(sizes, dtype, inside, 1 << bits, arch)
                made.append(halves.spec(epilogue, one, arch))
            continue
        if found is not None:
            many = [_half_slabs(sizes, dtype, inside, found, arch, each) for each in (False, True)]
            made += [slabs.clear(), *(halves.spec(epilogue, one, arch) for one in many if one)]
        parts = _runs(sizes, dtype, precision, arch) or ()
        for index, (first, last) in enumerate(parts):
            ends, own = index == len(parts) - 1, sizes[first:last]
            dtypes = _dtypes(dtype, index == 0, ends)
            within = inside or index > 0
            for bits in range(modes.most_columns(own, within, dtype, precision, arch).bit_length()):
                one = modes.variant(own, dtypes, precision, within, 1 << bits, arch)
                made.append(spec(epilogue if ends else (), one, arch))
        made += _in_slabs(epilogue, sizes, inside, dtype, precision, parts, arch)
    return list(dict.fromkeys(made))


def _in_slabs(epilogue, sizes, inside: bool, dtype: str, precision: str, parts, arch: str) -> list:
    """The kernels of runs in one launch, if there are several."""
    if len(parts) < 2:
        return []
    own = tuple(sizes[first:last] for first, last in parts)
    found = [slabs.variant(own, dtype, precision, inside, arch, each) for each in (False, True)]
    made = [spec(epilogue, each, arch) for each in found if each is not None]
    return [slabs.clear(), *made] if made else []


def _dtypes(dtype: str, begins: bool, ends: bool) -> tuple[str, str, str]:
    """Those of x, factors and result of a launch: between two they are those of the sums."""
    sums = DTYPES[dtype].accumulator
    return dtype if begins else sums, dtype, dtype if ends else sums
