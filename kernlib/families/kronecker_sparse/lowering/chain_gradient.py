"""Gradients of chains of two factors in half precision, batch first, in one plan: from the gradient
of y and from x, with h computed again.

Each launch is one of another module. What lies between them stays in the workspace: h, its
gradient, and behind these whatever a launch has for itself. Where hidden.cuh takes the factors, h
has each l by itself and the gradient of a bias is a sum beside that of the second weight. Of more l
than it takes, the gradient of y is transposed once, its rows summed for the bias meanwhile, and all
that comes of it, h too, has the batch last: neighbours of one l are d numbers apart otherwise, and
whoever reads them fetches whole sectors for some of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kernlib.families.kronecker_sparse.kernels.chain.fused_chain import ChainScope
from kernlib.families.kronecker_sparse.kernels.chain.hidden import Hidden
from kernlib.families.kronecker_sparse.kernels.factor.hopper import Hopper
from kernlib.families.kronecker_sparse.kernels.gradient import interleaved_gradient
from kernlib.families.kronecker_sparse.kernels.gradient.interleaved_gradient import (
    InterleavedGradient,
)
from kernlib.families.kronecker_sparse.kernels.gradient.weight_gradient import WeightGradient
from kernlib.families.kronecker_sparse.kernels.steps import deinterleave, transpose
from kernlib.families.kronecker_sparse.kernels.steps.split_k_sum import SplitKSum
from kernlib.families.kronecker_sparse.kernels.steps.transpose import ALIGNMENT, Transpose
from kernlib.families.kronecker_sparse.lowering import hopper_common
from kernlib.families.kronecker_sparse.lowering.problem import (
    MAX_BLOCKS,
    Layout,
    OutLayout,
    Pattern,
    Problem,
    Scope,
    is_flat,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import kernel
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

NAMES = "grad", "x", "weight1", "weight2"
CHUNK = 8  # rows of 16 bytes
FLOAT_BYTES = 4
RESULTS = "to_x", "to_weight1", "to_weight2", "to_bias"


class Problems(NamedTuple):
    """What the launches compute."""

    hidden: Problem  # h from x and the first weight
    to_second: Problem  # the gradient of the second weight from that of y and h
    to_hidden: Problem  # that of h from that of y and the second weight
    to_first: Problem  # that of the first weight from that of h and x
    to_x: Problem  # that of x from that of h and the first weight

    @property
    def second(self) -> Pattern:
        """The pattern of the second factor."""
        each = self.to_second
        return each.blocks, each.rows, each.columns, each.lanes


class Needs(NamedTuple):
    """Of which tensors a gradient is asked for."""

    x: bool
    first: bool
    second: bool
    bias: bool


def lower(
    problems: Problems,
    needs: Needs,
    gpu: Gpu,
    lower_one: Callable[[Problem], Lowered],
) -> tuple[Lowered, bool]:
    """The launches for those of ``needs``, and whether the gradient of the bias is among their
    results. ``lower_one`` chooses the kernels of one problem."""
    space = _Space(problems.hidden.dtype)
    if _is_wide(problems, gpu.arch):
        return _wide(space, problems, needs, gpu, lower_one)
    first = problems.hidden
    rows, features = first.rows, first.blocks * first.columns * first.lanes
    apart = needs.second and _is_apart(problems, gpu.arch)
    biased = apart and needs.bias and problems.second[3] in interleaved_gradient.BIAS_LANES
    summed, of_h = problems.to_second, space.room(rows, features)
    h = space.bytes(deinterleave.size(summed)) if apart else space.room(rows, features)
    if apart:
        layout = deinterleave.layout(summed)
        step = Hidden().step(problems.hidden, problems.second, layout, gpu)
        space.add(Lowered((step,)), h=h)
        sums = InterleavedGradient().sums(summed, gpu, biased)
        space.add(sums, left="grad", h=h, out="to_weight2", bias="to_bias")
    elif needs.second:
        space.add(lower_one(problems.hidden), left="x", right="weight1", out=h)
        space.add(lower_one(summed), left="grad", right=h, out="to_weight2")
    if needs.x or needs.first:
        space.add(lower_one(problems.to_hidden), left="grad", right="weight2", out=of_h)
    if needs.first:
        space.add(lower_one(problems.to_first), left=of_h, right="x", out="to_weight1")
    if needs.x:
        space.add(lower_one(problems.to_x), left=of_h, right="weight1", out="to_x")
    return space.lowered(), biased


class _Space:
    """Launches one behind the other, and the workspace that they share: rooms that stay, and behind
    them what each launch has for itself."""

    def __init__(self, dtype: str):
        self._itemsize, self._rooms, self._scratch = DTYPES[dtype].bytes, 0, 0
        self._launches: list[tuple[Lowered, dict[str, str | int]]] = []

    def room(self, rows: int, features: int) -> int:
        """Where one for a matrix begins."""
        return self.bytes(rows * features * self._itemsize)

    def bytes(self, count: int) -> int:
        """Where one of so many bytes begins."""
        place = self._rooms
        self._rooms += round_up(count, ALIGNMENT)
        return place

    def add(self, lowered: Lowered, **places: str | int) -> None:
        """Launches whose tensors are others, by their names, or in rooms."""
        self._scratch = max(self._scratch, lowered.workspace)
        self._launches.append((lowered, places))

    def lowered(self) -> Lowered:
        """All of them."""
        steps: list[Step] = []
        for lowered, names in self._launches:
            places = {WORKSPACE: (WORKSPACE, self._rooms)}
            for name, place in names.items():
                places[name] = (place, 0) if isinstance(place, str) else (WORKSPACE, place)
            steps += [step.placed(places) for step in lowered.steps]
        return Lowered(tuple(steps), self._rooms + self._scratch)


# More l.


def _is_wide(problems: Problems, arch: str) -> bool:
    """Whether there are more l than the other way takes well, in the second factor alone, and lines
    of the batch, and of the sums of rows, are whole 16 bytes."""
    groups, columns, _, lanes = problems.second
    grad, rows, of_y = problems.to_second.left, problems.hidden.rows, groups * columns * lanes
    tiles = ceil_div(rows, transpose.TILE) * ceil_div(of_y, transpose.TILE)
    is_whole = rows % CHUNK == 0 and of_y % CHUNK == 0 and tiles <= MAX_BLOCKS
    most = interleaved_gradient.LANES[-1]
    is_first = problems.hidden.lanes == 1
    return (
        arch == hopper_common.ARCH
        and lanes > most
        and is_first
        and is_whole
        and is_flat(problems.to_second, columns, grad.lane, grad.line, grad.block)
    )


def _wide(
    space: _Space,
    problems: Problems,
    needs: Needs,
    gpu: Gpu,
    lower_one: Callable[[Problem], Lowered],
) -> tuple[Lowered, bool]:
    """:func:`lower` by way of a gradient that has the batch last."""

    def lower_mixed(mixed: Hopper | WeightGradient, problem: Problem) -> Lowered:
        """Of a problem that has the batch last on one side."""
        if not mixed.takes(problem, gpu.arch, mixed=True):
            return lower_one(problem)
        return mixed.launch((), problem, gpu, mixed.default(problem, gpu))

    first, to_second = problems.hidden, problems.to_second
    rows, (groups, columns, depth, lanes) = first.rows, problems.second
    features, of_y = groups * depth * lanes, groups * columns * lanes
    grad, h, of_h = (space.room(rows, count) for count in (of_y, features, features))
    tiles = ceil_div(rows, transpose.TILE)
    sums = space.bytes(FLOAT_BYTES * tiles * of_y) if needs.bias else 0
    turn = Transpose().step(
        first.dtype, (rows, of_y), (to_second.left.depth, rows), to_second.left.alignment,
        (("left", 0), ("out", 0), *[("sums", 0)] * needs.bias), bias=needs.bias,
    )  # fmt: skip
    space.add(Lowered((turn,)), left="grad", out=grad, sums=sums)
    if needs.bias:
        space.add(_sum_of_rows(first, of_y, tiles), workspace=sums, out="to_bias")
    last = Layout(columns * lanes * rows, rows, lanes * rows, 1)
    right = Layout(depth * lanes * rows, rows, lanes * rows, 1)
    if needs.second:
        out = OutLayout(first.columns * rows, rows, 1, rows)
        problem = first._replace(out=out)
        space.add(lower_mixed(Hopper(), problem), left="x", right="weight1", out=h)
        summed = to_second._replace(left=last, right=right)
        space.add(lower_one(summed), left=grad, right=h, out="to_weight2")
    if needs.x or needs.first:
        problem = problems.to_hidden._replace(
            left=Layout(last.block, rows, 1, last.line),
            out=OutLayout(right.block, rows, 1, right.line),
        )
        space.add(lower_one(problem), left=grad, right="weight2", out=of_h)
    if needs.first:
        left = Layout(first.columns * rows, rows, rows, 1)
        problem = problems.to_first._replace(left=left)
        space.add(lower_mixed(WeightGradient(), problem), left=of_h, right="x", out="to_weight1")
    if needs.x:
        problem = problems.to_x._replace(left=Layout(first.columns * rows, rows, 1, rows))
        space.add(lower_mixed(Hopper(), problem), left=of_h, right="weight1", out="to_x")
    return space.lowered(), needs.bias


def _sum_of_rows(problem: Problem, features: int, tiles: int) -> Lowered:
    """The launch that adds up the sums of tiles of rows."""
    one = problem._replace(blocks=1, lanes=1, rows=1, columns=features, out=OutLayout(0, 0, 0, 1))
    partial = OutLayout(features, features, features, 1)
    return Lowered((SplitKSum().step(one, partial, features, tiles),))


def _is_apart(problems: Problems, arch: str) -> bool:
    """Whether h has each l by itself."""
    summed = problems.to_second
    return (
        summed.rows >= summed.columns
        and InterleavedGradient().takes(summed, arch)
        and Hidden().variant_of(problems.hidden, problems.second, arch) is not None
    )


def variants(patterns: tuple[Pattern, Pattern], arch: str, dtypes: list[str]) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose besides those of the factors."""
    (_, b, c, d), (*_, lanes) = patterns
    if d != 1 or arch != hopper_common.ARCH:
        return []
    specs = Hidden().specs((), ChainScope(patterns, tuple(dtypes), arch), arch)
    if lanes > interleaved_gradient.LANES[-1]:
        numbers = tuple((dtype, "fp32") for dtype in dtypes)
        scope = Scope((b, c, 1), numbers, arch, mixed=True)
        specs += kernel.specs((Hopper(), WeightGradient()), (), scope, arch)
        specs += [Transpose().spec((), Transpose.Variant(dtype, bias=True)) for dtype in dtypes]
    return specs
