"""What kernels that share kernel_sources/kronecker_product/modes/parameters.cuh are launched with:
struct Fixed, its values, and the facts that the header reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_product.lowering.problem import Layout
from kernlib.families.kronecker_product.lowering.runs import Part, Run
from kernlib.lowering import config
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.parameters import Fields, Parameters

HEADER = "kronecker_product/types.cuh"  # what generated texts name
TICKET_BYTES = 96  # of shared memory, for what one thread finds for all
GRID_BATCH = 65535  # of a grid's second axis; blocks take what is beyond it in turn
RUN = Fields((
    "Layout source", "Layout target",
    "i64 outers", "i64 columns",  # of a slab; columns of one outer and inner index
    "i64 last_outers", "i64 last_columns",  # of the last slab
    "i64 inners",  # of one outer index
    "i64 tiles", "i64 tiles_of_columns",  # of a slab; of its columns
    # Of the output feature: from one outer index, inner one, column (divided first) and own
    # feature on.
    "i64 feature_outer", "i64 feature_inner", "i64 feature_column", "i64 feature_own",
    "i64 feature_divisor",
    "u32 aligned",  # whether the source takes aligned 16-byte copies along the last dimension
    "u32 columns_first",  # whether columns lie closer together in the source than features
    "u32 aligned_out",  # whether the target does so of 16-byte stores
    "u32 ticket_tiles",  # of a ticket, of hopper/slabs.cuh
))  # fmt: skip


def fields(runs: int, factors: int, epilogue: tuple[Epilogue, ...], powers: int = 0) -> Fields:
    """What a plan fixes of a launch of so many runs and factors, with so many arrays of powers."""
    summands = len(text.summands(epilogue))
    members = [
        f"RunFixed runs[{runs}]",
        f"Matrix matrices[{factors}]",
        "i64 batches",
        "i64 slabs",  # of a batch
        "i64 tickets",  # tiles of a slab in all runs
        "i64 lag",  # slabs that a run is behind the one before
        *[f"PowerPlace places[{powers}]"] * (powers > 0),
        *[f"Layout sides_of_summands[{summands}]"] * (summands > 0),
    ]
    return Fields(members, {"RunFixed": RUN})


def fixed_text(fixed: Fields) -> str:
    """The structs that the header reads, in C++."""
    return RUN.text("RunFixed") + fixed.text()


def parameters(
    runs: int, factors: int, epilogue: tuple[Epilogue, ...], powers: int = 0
) -> Parameters:
    """The parameter struct of such a launch."""
    pointers = 2 * runs + factors + (runs > 1) + powers
    return text.parameters(pointers, fields(runs, factors, epilogue, powers).format, epilogue)


def facts(
    dtypes: tuple[str, str],
    sizes: Sequence[tuple[int, int]],
    runs: int,
    epilogue: tuple[Epilogue, ...],
    powers: int = 0,
) -> dict[str, Fact]:
    """Facts of a kernel of factors of these sizes, of which those and the result have dtypes."""
    rows, widths = (", ".join(str(size[side]) for size in sizes) for side in (0, 1))
    return {
        **text.facts(*dtypes, epilogue),
        "RUNS": runs,
        "POWERS": powers,
        "FACTORS": len(sizes),
        "Rows": f"Sizes<{rows}>",
        "Widths": f"Sizes<{widths}>",
        "PARAMETER_BYTES": parameters(runs, len(sizes), epilogue, powers).size,
    }


def ticket_facts(restaged: bool) -> dict[str, Fact]:
    """What modes/tickets.cuh reads."""
    return {"RESTAGED": restaged, "TICKET_BYTES": TICKET_BYTES}


def run_facts(part: Part, index: int, count: int) -> dict[str, Fact]:
    """Of one of so many runs, what modes/run.cuh and halves/run.cuh read."""
    features, _ = part.features
    return {
        "SourceT": DTYPES[part.source].cuda,
        "TargetT": DTYPES[part.target].cuda,
        "INDEX": index,
        "COLUMNS": part.columns,
        "IN_FEATURES": features,
        "INPUTS": part.columns * features,
        "COLUMNS_LAST": part.inside,
        "WRITTEN_HERE": index > 0,
        "ENDS": index == count - 1,
    }


def numbered(name: str, numbers: Iterable[int]) -> str:
    """A template of numbers, as ``Mode<1, 2>``."""
    return f"{name}<{', '.join(str(int(number)) for number in numbers)}>"


def runs_text(runs: Sequence[Mapping[str, Fact]]) -> str:
    """The struct of each run, and all of them."""
    names = [f"Run{index}" for index in range(len(runs))]
    texts = [config.text(facts, name) for facts, name in zip(runs, names, strict=True)]
    texts += ["using Run = Run0;\n"] * (len(runs) == 1)
    return "".join([*texts, f"using AllRuns = Runs<{', '.join(names)}>;\n"])


def pack(
    epilogue: tuple[Epilogue, ...],
    runs: Sequence[Run],
    numbers: Sequence[tuple],
    counts: tuple[int, int, int, int],
    places: Sequence[int] = (),
    slabs: Sequence[int] | None = None,
) -> bytes:
    """The fixed values of a launch: ``numbers`` are :func:`run_values` of each run, ``counts``
    batches, slabs, tickets and lag, ``slabs`` the elements from one slab of each summand to the
    next."""
    batches, count, tickets, lag = counts
    factors = [factor for run in runs for factor in run.factors]
    more: dict = {"places": places} if places else {}
    if text.summands(epilogue):
        sides = runs[-1].summands
        steps = zip(sides, slabs or [0] * len(sides), strict=True)
        more["sides_of_summands"] = [n for side, step in steps for n in _side(side, (step, 0))]
    return fields(len(runs), len(factors), epilogue, len(places) // 6).pack(
        runs=[number for run in numbers for number in run],
        matrices=[s for f in factors for s in (f.row_stride, f.column_stride, f.batch_stride)],
        batches=batches,
        slabs=count,
        tickets=tickets,
        lag=lag,
        **more,
    )


def run_values(
    run: Run,
    part: Part,
    last: tuple[int, int] | None = None,
    slabs: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0)),
    tiles: int | None = None,
    ticket_tiles: int = 0,
) -> tuple:
    """The values of RUN. ``last`` are outer indices and columns of the last slab, ``slabs`` how far
    one is behind another, and how many are in a ring or 0, in source and in target."""
    across = ceil_div(run.columns, part.columns)
    outers, columns = last or (run.outer, run.columns)
    (source, target), ends = slabs, (part.source, part.target)
    outer, inner, column, feature_offset = run.feature
    return RUN.values(
        source=_side(run.x, source),
        target=_side(run.out, target),
        outers=run.outer,
        columns=run.columns,
        last_outers=outers,
        last_columns=columns,
        inners=run.inner,
        tiles=run.outer * run.inner * across if tiles is None else tiles,
        tiles_of_columns=across,
        feature_outer=outer,
        feature_inner=inner,
        feature_column=column,
        feature_own=feature_offset,
        feature_divisor=run.divisor,
        aligned=_vectors(run, run.x, ends[0], source[0]),
        columns_first=run.x.column < run.x.feature,
        aligned_out=_vectors(run, run.out, ends[1], target[0]),
        ticket_tiles=ticket_tiles,
    )


def _side(side: Layout, slab: tuple[int, int]) -> list[int]:
    return [side.batch, side.outer, side.inner, side.column, side.feature, *slab]


def is_vectors(run: Run, part: Part) -> tuple[bool, bool]:
    """Whether a run of a launch of its own reads, and writes, aligned 16 bytes at once."""
    return _vectors(run, run.x, part.source, 0), _vectors(run, run.out, part.target, 0)


def _vectors(run: Run, side: Layout, dtype: str, slab: int) -> bool:
    """Whether source or target takes aligned 16-byte copies along the tile's last dimension, a slab
    so many elements behind the one before it."""
    chunk = 16 // DTYPES[dtype].bytes
    along, across = (side.column, side.feature) if run.inside else (side.feature, side.column)
    others = [across, slab, *[side.outer] * (run.outer > 1), *[side.inner] * (run.inner > 1)]
    others += [side.batch] * (run.batch > 1)
    return along == 1 and not any(s % chunk for s in others) and side.alignment % 16 == 0
