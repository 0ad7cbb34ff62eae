"""Kernels of products with many columns (product.py): which calls they take, and
what code generation chooses."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import pack
from kernlib.families.pairwise.lowering import reduce as direct
from kernlib.families.pairwise.lowering.exponents import entries, is_exponent
from kernlib.families.pairwise.lowering.finish import is_norm
from kernlib.families.pairwise.lowering.pack import BARRIER_BYTES, PRECISIONS
from kernlib.families.pairwise.lowering.problem import ARCH, inner_codes
from kernlib.families.pairwise.lowering.reduce import LANES, MOST_WIDE, Problem
from kernlib.jit import targets

WIDTHS = (16, 32, 48, 64, 96, MOST_WIDE)  # columns of v that a launch takes
NARROW, MIDDLE = 32, 64  # up to which registers hold the sums of four and three warpgroups
DEPTHS = (16, 32, 64, 128)  # features of sums of words
# Terms that take numbers of the call, which sums on the lanes do not have, or a unit (unit.cuh).
NUMBERED = {
    None, "Power", "PowerOnDevice", "PowerLog",
    "ExpPower", "ExpPower1", "ExpPower2", "ExpPowerOnDevice",
}  # fmt: skip
TILE_N, GROUP = 64, 256  # n of a stage, and of those summed in one go
LEAST_STAGES, MAX_STAGES = 2, 8


class Variant(NamedTuple):
    """Everything that code generation chooses besides the descriptor. The names of ``rows``,
    ``columns`` and what follows are those that the packing of points reads."""

    dtype: str
    sums: str  # a key of SUMS
    depth: int  # features of a sum on the lanes, else those or entries as padded
    copies: int  # words of a value of the matrix, and of a point's number
    v_copies: int  # of a number of v
    width: int  # columns of v
    warpgroups: int  # of 64 rows each
    inner: float | str
    outer: float | str
    root: bool
    epsilon: bool
    regularized: bool
    behind: bool = False  # of a kernel of folded exponents

    columns = TILE_N
    promote = 1

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def features(self) -> int:
        return self.depth if self.sums == "lanes" else 0

    @property
    def v_bytes(self) -> int:
        """Of the words of v of a stage, and of what its columns are multiplied by."""
        return TILE_N * self.v_copies * self.width * 2 + 4 * self.width

    @property
    def point_bytes(self) -> int:
        """Of one point of a or b."""
        each = {"lanes": 4, "words": 2 * self.copies, "folded": 2}[self.sums]
        return self.depth * each

    @property
    def stage_bytes(self) -> int:
        info = pack.INFO_BYTES if self.sums == "words" else 0
        return TILE_N * (self.point_bytes + info) + self.v_bytes

    @property
    def resident_bytes(self) -> int:
        return 0 if self.sums == "lanes" else self.point_bytes * self.rows

    @property
    def stages(self) -> int:
        """As many as fit into shared memory."""
        room = targets.SHARED_BYTES[ARCH] - BARRIER_BYTES - self.resident_bytes
        return min(MAX_STAGES, room // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.resident_bytes + self.stages * self.stage_bytes


def is_on_lanes(descriptor: Pairwise, problem: Problem) -> bool:
    """Whether the lanes sum, exactly: norms of few features whose terms have no numbers."""
    code = inner_codes(descriptor).get(problem.inner)
    if code in NUMBERED or (code != "Square" and is_norm(descriptor, problem)):
        return False
    return problem.k <= LANES or (
        problem.k <= direct.SMALL_K and not is_of_words(descriptor, problem)
    )


def is_of_words(descriptor: Pairwise, problem: Problem) -> bool:
    product = descriptor.takes_products and pack.is_product(descriptor, problem)
    return product and problem.k <= DEPTHS[-1]


def variants(
    descriptor: Pairwise, problem: Problem, precision: str | None
) -> tuple[Variant, Variant | None]:
    """That of a call, of folded exponents where its epilogue is one, and then the one behind it."""
    second = _plain(descriptor, problem, precision)
    if not second.behind:
        return second, None
    return _fitting(second._replace(sums="folded", depth=entries(problem))), second


def _plain(descriptor: Pairwise, problem: Problem, precision: str | None) -> Variant:
    """The variant of a call whose exponents are not folded."""
    copies = PRECISIONS[precision or "fp32"]  # none is permitted where sums are no products
    on_lanes = is_on_lanes(descriptor, problem)
    depth = problem.k if on_lanes else next(d for d in DEPTHS if d >= problem.k)
    return _fitting(Variant(
        problem.dtype, "lanes" if on_lanes else "words", depth, copies,
        copies if problem.dtype == "float32" else 1,
        next(w for w in WIDTHS if w >= problem.columns), 3,
        problem.inner, problem.outer, problem.root, problem.epsilon, problem.regularized,
        is_exponent(descriptor, problem),
    ))  # fmt: skip


def _fitting(variant: Variant) -> Variant:
    """With as many warpgroups as registers and shared memory hold."""
    narrow = NARROW // 2 if variant.sums == "words" else NARROW
    counts = (4, 3, 2) if variant.width <= narrow else (3, 2) if variant.width <= MIDDLE else (2,)
    for count in counts:
        variant = variant._replace(warpgroups=count)
        if variant.stages >= LEAST_STAGES:
            break
    return variant
