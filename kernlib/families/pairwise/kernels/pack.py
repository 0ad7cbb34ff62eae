"""What products of tensor cores are launched behind: the centre of the data, and both operands as
words of fp16. A ``variant`` of the products has ``dtype``, ``copies`` (words of a number), ``rows``
and ``columns`` of a tile, and ``depth`` (features of a stage)."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering.pack import PROBES, Workspace, is_difference
from kernlib.families.pairwise.lowering.problem import Layout, Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Step

GROUP = 8  # points of a block
CENTRE_COLUMNS, CENTRE_THREADS = 32, 1024
SAMPLES = 512  # of each operand, for the centre
PACK_WARPS = 8
SAMPLE = Fields(("i64 step", "int points", "int padding"))  # points 0, step, 2 step ...
CENTRE = Fields(
    (
        "View a_view", "View b_view",
        "Sample a_sample", "Sample b_sample",
        "int k", "int pitch",  # features, and from one batch entry's centre to the next one's
        "int batch", "int padding",  # batch entries that share a centre
    ),
    {"Sample": SAMPLE},
)  # fmt: skip
SIDE = Fields((
    "View view",
    "i64 points",  # M or N
    "i64 packed_stride", "i64 info_stride",  # from batch entry to batch entry: bytes, points
    "int tile", "int groups",  # points of a tile; groups of GROUP of a batch entry
    "int entries", "int vectors",  # batch entries; whether features load 16 bytes at a time
))  # fmt: skip
PACK = Fields(
    (
        "Side a_side", "Side b_side",
        "i64 centre_stride",
        "int k", "int stages", "int batch", "int padding",
    ),
    {"Side": SIDE},
)  # fmt: skip


class Centre(Kernel):
    """Finds the centre of differences, and opens the gate."""

    role = "step"
    name = "split centre"
    header = "pairwise/split/centre.cuh"
    entry = "pairwise_split_centre"
    reason = (
        "the centre of the points, which `split` subtracts so that words of 16 bits are accurate"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        dtype: str
        difference: bool

    def step(
        self, problem: Problem, place: Workspace, names: tuple[str, str], difference: bool
    ) -> Step:
        """The launch; ``names`` are the operands in the caller's words."""
        fixed = CENTRE.pack(
            a_view=problem.a[:3],
            b_view=problem.b[:3],
            a_sample=_sample(problem.m),
            b_sample=_sample(problem.n),
            k=problem.k,
            pitch=place.centre_pitch,
            batch=1 if place.centres > 1 else problem.batch,
            padding=0,
        )
        columns = ceil_div(place.centre_pitch, CENTRE_COLUMNS)
        grid = (columns, place.centres) if difference else (1, 1)
        spec = self.spec(None, self.Variant(problem.dtype, difference), "")
        return Step(spec, grid, fixed, _pointers(names, place.centre, place.doubtful))

    def spec(self, subject: None, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        facts = {
            **_facts(variant.dtype, variant.difference),
            "PARAMETER_BYTES": Parameters(4, CENTRE.format).size,
        }
        texts = SAMPLE.text("Sample"), CENTRE.text()
        source = self.source(facts, *texts, includes=("pairwise/view.cuh",))
        words = ["dot"] * (not variant.difference)
        return self.named_spec(source, CENTRE_THREADS, 0, variant.dtype, words)


class Pack(Kernel):
    """Writes both operands as words, and counts doubtful pairs of a sample."""

    role = "step"
    name = "split pack"
    header = "pairwise/split/pack.cuh"
    entry = "pairwise_split_pack"
    reason = "both operands as words of 16 bits for `split`"

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        dtype: str
        copies: int
        depth: int
        difference: bool

    def step(
        self, problem: Problem, variant, place: Workspace, names: tuple[str, str], difference: bool
    ) -> Step:
        """The launch; ``names`` are the operands in the caller's words."""
        a = _side(problem, problem.a, problem.m, variant.rows, place.a_stride, place.a_points)
        b = _side(problem, problem.b, problem.n, variant.columns, place.b_stride, place.b_points)
        fixed = PACK.pack(
            a_side=SIDE.values(**a),
            b_side=SIDE.values(**b),
            centre_stride=place.centre_pitch if place.centres > 1 else 0,
            k=problem.k,
            stages=place.stages,
            batch=problem.batch,
            padding=0,
        )
        pointers = _pointers(
            names, place.centre, place.doubtful, place.packed_a, place.packed_b, place.a_info,
            place.b_info,
        )  # fmt: skip
        blocks = sum(side["groups"] * side["entries"] for side in (a, b))
        one = self.Variant(variant.dtype, variant.copies, variant.depth, difference)
        grid = (blocks + PROBES // PACK_WARPS, 1)
        return Step(self.spec(None, one, ""), grid, fixed, pointers)

    def spec(self, subject: None, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        facts = {
            **_facts(variant.dtype, variant.difference),
            "BY_NORM": False,
            "DEPTH": variant.depth,
            "COPIES": variant.copies,
            "PARAMETER_BYTES": Parameters(8, PACK.format).size,
        }
        texts = SIDE.text("Side"), PACK.text()
        source = self.source(facts, *texts, includes=("pairwise/view.cuh",))
        words = [f"words={variant.copies} depth={variant.depth}"]
        words += ["dot"] * (not variant.difference)
        return self.named_spec(source, 32 * PACK_WARPS, 0, variant.dtype, words)


def _facts(dtype: str, difference: bool) -> dict:
    return {"InputT": DTYPES[dtype].cuda, "DIFFERENCE": difference}


def _sample(points: int) -> tuple[int, ...]:
    """That of an operand."""
    step = ceil_div(points, SAMPLES)
    return SAMPLE.values(step=step, points=ceil_div(points, step), padding=0)


def _side(
    problem: Problem, layout: Layout, points: int, tile: int, packed_stride: int, info_stride: int
) -> dict:
    """The values of an operand's Side."""
    return {
        "view": layout[:3],
        "points": points,
        "packed_stride": packed_stride,
        "info_stride": info_stride,
        "tile": tile,
        "groups": round_up(points, tile) // GROUP,
        "entries": 1 if layout.batch == 0 else problem.batch,
        "vectors": _reads_vectors(layout, problem.dtype),
    }


def _pointers(names: tuple[str, str], *offsets: int) -> tuple[tuple[str, int], ...]:
    return (names[0], 0), (names[1], 0), *((WORKSPACE, offset) for offset in offsets)


def _reads_vectors(layout: Layout, dtype: str) -> bool:
    """Whether 8 features are aligned loads of 16 bytes."""
    run = 16 // DTYPES[dtype].bytes
    aligned = layout.alignment % 16 == 0 and layout.columns == 1
    return aligned and layout.rows % run == 0 and layout.batch % run == 0


def steps(
    descriptor: Pairwise,
    problem: Problem,
    variant,
    place: Workspace,
    names: tuple[str, str] = ("a", "b"),
) -> tuple[Step, Step]:
    """The centre, then the packing; ``names`` are the operands in the caller's words."""
    difference = is_difference(descriptor, problem)
    return (
        Centre().step(problem, place, names, difference),
        Pack().step(problem, variant, place, names, difference),
    )


def opening(problem: Problem, place: Workspace, centred: bool) -> Step:
    """What opens the gate, and finds the centre if ``centred``, where no points are packed."""
    return Centre().step(problem, place, ("a", "b"), centred)
