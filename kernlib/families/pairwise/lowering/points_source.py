"""CUDA text and specifications of gradients of many features (points.py)."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import pack, reduce
from kernlib.families.pairwise.lowering.backward import ROLES
from kernlib.families.pairwise.lowering.backward_source import (
    LARGEST,
    Derivatives,
    SlopeSource,
    slopes,
)
from kernlib.families.pairwise.lowering.finish import finish_reduced
from kernlib.families.pairwise.lowering.pack import ARCH, BARRIER_BYTES
from kernlib.families.pairwise.lowering.problem import scalar_count, short
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.wgmma import multiply

TILE_N, GROUP = 64, 256  # lines of a stage, and of those that are scaled alike
DIRECT_TILE = 64  # rows, and lines, of a block of the lanes' kernel
DIRECT_LINE = DIRECT_TILE + 4  # floats of shared memory that a feature takes
MAX_STAGES = 8
# Pairs of the sample, of 4096, above which the lanes do the work: of 0.4 % doubtful ones products
# take twice their time.
DOUBTFUL = pack.PROBES // 256
IN_WORKSPACE, POINTERS = 7, 14  # of struct PointsLaunch
FIXED = "12q4q6qd4i"  # what it holds behind the strides of its numbers
PACK_THREADS, DIRECT_THREADS = 256, 256
# What Slopes takes of a sum, for infinite ones. Here a sum that is infinite may make a NaN, which
# closes the gate, and saves a slot a pair.
BOUNDED = f"fminf(s, {LARGEST})"


class Variant(NamedTuple):
    """Everything that code generation chooses besides the descriptor and its derivatives. The names
    of ``depth``, ``rows``, ``columns``, ``copies`` and ``promote`` are those that the packing of
    points reads."""

    role: str
    depth: int  # features of a sum as padded
    width: int  # features of a line as padded
    sets: int  # columns of g and v
    weighted: bool
    points: bool
    values: bool
    hyper: int
    difference: bool
    counted: bool  # whether the width has room for a one
    warpgroups: int  # of 64 rows each
    inner: float | str
    outer: float | str
    root: bool
    epsilon: bool

    dtype = "float32"
    copies = 2  # words of a number
    columns = TILE_N
    promote = 1

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def numbers(self) -> int:
        """Of a row, and of a line, behind its point."""
        return self.sets * (2 if self.role == "both" else 1)

    @property
    def point_bytes(self) -> int:
        """Of the words of one point."""
        return 2 * self.copies * self.depth

    @property
    def lines_bytes(self) -> int:
        """Of the features of a stage's lines, of what these are multiplied by, and of numbers."""
        features = TILE_N * self.copies * self.width * 2 + 4 * self.width if self.points else 0
        return features + 4 * TILE_N * self.numbers

    @property
    def stage_bytes(self) -> int:
        return TILE_N * (self.point_bytes + pack.INFO_BYTES) + self.lines_bytes

    @property
    def resident_bytes(self) -> int:
        return self.point_bytes * self.rows

    @property
    def stages(self) -> int:
        """As many as fit into shared memory."""
        room = targets.SHARED_BYTES[ARCH] - BARRIER_BYTES - self.resident_bytes
        return min(MAX_STAGES, room // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.resident_bytes + self.stages * self.stage_bytes

    @property
    def direct_bytes(self) -> int:
        """Of shared memory of the kernel of the lanes."""
        floats = (2 * self.depth + DIRECT_TILE) * DIRECT_LINE + 2 * DIRECT_TILE * self.numbers
        return 4 * floats


def spec(descriptor: Pairwise, derivatives: Derivatives, made: Variant) -> KernelSpec:
    """The KernelSpec of the products."""
    source = f"""{_head(descriptor, made)}
constexpr int WARPGROUPS = {made.warpgroups};
constexpr int STAGES = {made.stages};
constexpr int COPIES = {made.copies};
constexpr int DOUBTFUL = {DOUBTFUL};
constexpr int DYNAMIC_BYTES = {made.shared_bytes};

{multiply("float16", made.width, True)}
{multiply("float16", TILE_N, False)}
{_functions(descriptor, derivatives, made).replace(BOUNDED, "s")}
#include "pairwise/points/points.cuh"
"""
    words = [*_words(made), f"rows={made.rows}"]
    threads = 128 * (made.warpgroups + 1)
    return _named(descriptor, "main", source, threads, made.shared_bytes, words)


def direct_spec(
    descriptor: Pairwise, derivatives: Derivatives, made: Variant, gated: bool
) -> KernelSpec:
    """The KernelSpec of the kernel of the lanes, behind a gate or alone."""
    source = f"""{_head(descriptor, made)}
constexpr bool GATED = {str(gated).lower()};
constexpr int DYNAMIC_BYTES = {made.direct_bytes};

{_functions(descriptor, derivatives, made)}
#include "pairwise/points/direct.cuh"
"""
    words = [*_words(made), *["gated"] * gated]
    return _named(descriptor, "direct", source, DIRECT_THREADS, made.direct_bytes, words)


def pack_spec(descriptor: Pairwise, made: Variant) -> KernelSpec:
    """The KernelSpec of the packing of lines, which no epilogue changes."""
    source = f"""{_head(descriptor, made._replace(values=False, hyper=0))}
#include "pairwise/points/pack.cuh"
"""
    words = [made.role, f"K={made.width} C={made.sets * made.weighted}"]
    words += ["numbers"] * (not made.points) + ["dot"] * (not made.difference)
    words += ["counted"] * made.counted
    words.append(f"scalars={scalar_count(descriptor)}")
    description = f"pairwise points pack {' '.join(words)}"
    entry = "pairwise_points_pack"
    found = KernelSpec("pairwise", source, entry, PACK_THREADS, description=description)
    return named(found, *words)


def _head(descriptor: Pairwise, made: Variant) -> str:
    """What all of the sources begin with."""
    scalars = scalar_count(descriptor)
    parameters = Parameters(POINTERS, f"<{scalars}q{FIXED}", scalars)
    numbers = {
        "SCALARS": scalars,
        "COLUMNS": made.sets,
        "HYPER": made.hyper,
        "WIDTH": made.width,
        "V_COPIES": made.copies,
        "DEPTH": made.depth,
    }
    flags = {
        "WEIGHTED": made.weighted,
        "WANTS_POINTS": made.points,
        "WANTS_VALUES": made.values,
        "COUNTED": made.counted,
    }
    lines = [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    lines += [f"constexpr bool {name} = {str(on).lower()};" for name, on in flags.items()]
    text = "\n".join(lines)
    fixed = reduce.fields(scalars).text()
    head = pack.constants(made.dtype, made.difference, parameters.size, fixed, SCALARS=scalars)
    return f"""{head}
#include "pairwise/reduce/math.cuh"

enum class Role {{ {", ".join(ROLES)} }};
constexpr Role ROLE = Role::{made.role};
{text}
"""


def _functions(descriptor: Pairwise, derivatives: Derivatives, made: Variant) -> str:
    """Finish and Slopes."""
    text = finish_reduced(descriptor, made, SlopeSource)
    return f"{text}\n{slopes(descriptor, derivatives, made.root)}"


def _words(made: Variant) -> list[str]:
    """What sets a kernel apart from others of its descriptor."""
    wanted = [name for name in ("points", "values") if getattr(made, name)]
    words = [made.role, *wanted, *[f"hyperparameters={made.hyper}"] * bool(made.hyper)]
    words += [f"K={max(made.width, made.depth)} C={made.sets * made.weighted}"]
    return words + ["counted"] * made.counted + ["epsilon"] * made.epsilon


def _named(
    descriptor: Pairwise, kind: str, source: str, threads: int, shared: int, words: list[str]
) -> KernelSpec:
    words = [descriptor.describe(), f"gradient of points {kind}", *words]
    entry = f"pairwise_points_{kind}"
    made = KernelSpec("pairwise", source, entry, threads, shared, description=" ".join(words))
    return named(made, *short(descriptor), *words[1:], epilogue=descriptor.epilogue)
