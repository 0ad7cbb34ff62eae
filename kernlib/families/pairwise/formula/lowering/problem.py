"""A call as kernels see it, and what all of them are launched with."""

from __future__ import annotations

from typing import Any, NamedTuple

from kernlib.descriptors.score.kinds import BOOL, FLOAT, INT, LONG
from kernlib.families.pairwise.formula.spec import COL, FEATURE, LEAST, ROW, Spec
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.parameters import Fields

THREADS = 256
MAX_BLOCKS = 2**31 - 1  # of a grid's first axis
MAX_BATCH_BLOCKS = 65535
# CUDA types of inputs that are no floating-point numbers.
_STORED = {"int32": "int", "int64": "i64", "bool": "unsigned char"}
_OF_KIND = {FLOAT: "AccT", INT: "int", LONG: "i64", BOOL: "unsigned char"}


class Problem(NamedTuple):
    """One call. ``dtypes`` are names of dtypes, "" for inputs without axes. ``result`` is the dtype
    of the arithmetic and of what kernels write, float32 or float64. ``features`` are those of the
    unit, 1 without one; ``sizes`` those of each term. ``strides`` of each input are those of
    (batch, row, column, feature) in elements, 0 for an axis that it lacks. A device scalar has a
    stride over the batch and the dtype of the arithmetic, or of its kind if that is no number."""

    spec: Spec
    dtypes: tuple[str, ...]
    result: str
    batch: int
    rows: int
    cols: int
    features: int
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, int, int, int], ...]

    @property
    def bytes(self) -> int:
        """Those of a number of the arithmetic."""
        return DTYPES[self.result].bytes

    @property
    def tensors(self) -> tuple[int, ...]:
        """The places of inputs that have axes."""
        return tuple(i for i, each in enumerate(self.spec.inputs) if each.axes)

    @property
    def scalars(self) -> tuple[int, ...]:
        """The places of inputs that have none."""
        return tuple(i for i, each in enumerate(self.spec.inputs) if not each.axes)

    def stored(self, place: int) -> str:
        """The CUDA type of an input's elements in memory."""
        dtype = self.dtypes[place]
        if not dtype:
            return _OF_KIND[self.spec.inputs[place].kind]
        return _STORED[dtype] if dtype in _STORED else DTYPES[dtype].cuda

    @property
    def reads_pairs(self) -> bool:
        """Whether an input has a value for each pair."""
        return any({ROW, COL} <= set(each.axes) for each in self.spec.inputs)

    @property
    def has_indices(self) -> bool:
        return self.spec.reduction == LEAST

    @property
    def outputs(self) -> int:
        """Values of a row of the result, of reductions."""
        return self.features if self.spec.unit is not None else 1


def axes_text(axes: tuple[str, ...]) -> str:
    """The place of an element, as arguments of a device function: those it lacks are 0."""
    names = {ROW: "row", COL: "col", FEATURE: "k"}
    return ", ".join(names[axis] if axis in axes else "0" for axis in names)


def pointers_text(problem: Problem) -> str:
    """The addresses that the parameter struct begins with, in C++."""
    return (
        "struct Pointers {\n"
        f"    const void* tensors[{max(1, len(problem.tensors))}];\n"
        "    const i64* ranges;\n    AccT* out;\n    i64* indices;\n};\n"
    )


def pointers(problem: Problem, out: tuple[str, int], indices: tuple[str, int] | None) -> tuple:
    """Their operands: of those that the kernel does not read, the result in their place."""
    tensors = [(f"t{place}", 0) for place in problem.tensors] or [out]
    ranges = ("ranges", 0) if problem.spec.ranged else out
    return (*tensors, ranges, out, indices or out)


def fields(problem: Problem) -> Fields:
    """What a plan fixes: struct Fixed."""
    members = []
    if problem.tensors:
        members.append(f"i64 strides[{4 * len(problem.tensors)}]")
    if problem.scalars:
        members.append(f"i64 scalar_strides[{len(problem.scalars)}]")
    return Fields((
        *members,
        "i64 batch",
        "i64 per_split",  # columns of a block, fewer for the last one
        "int rows", "int cols",
        "int row_blocks", "int splits",
        "int features", "int chunks",  # of the unit, and parts of them, of which a block has one
        f"int sizes[{round_up_even(len(problem.sizes))}]",  # features of each term
    ))  # fmt: skip


def round_up_even(count: int) -> int:
    """An even number, 2 at least, that is not below ``count``."""
    return max(2, count + count % 2)


def fixed(
    problem: Problem, row_blocks: int, splits: int = 1, per_split: int = 0, chunks: int = 1
) -> bytes:
    """Its bytes."""
    each = fields(problem)
    values: dict[str, Any] = {
        "batch": problem.batch,
        "per_split": per_split,
        "rows": problem.rows,
        "cols": problem.cols,
        "row_blocks": row_blocks,
        "splits": splits,
        "features": problem.features,
        "chunks": chunks,
        "sizes": (*problem.sizes, *[0] * (round_up_even(len(problem.sizes)) - len(problem.sizes))),
    }
    if problem.tensors:
        values["strides"] = [x for place in problem.tensors for x in problem.strides[place]]
    if problem.scalars:
        values["scalar_strides"] = [problem.strides[place][0] for place in problem.scalars]
    return each.pack(**values)


def facts(problem: Problem) -> dict[str, Fact]:
    """Facts that all kernels share."""
    return {
        "AccT": DTYPES[problem.result].cuda,
        "SCALARS": len(problem.scalars),
        "RANGED": problem.spec.ranged,
    }
