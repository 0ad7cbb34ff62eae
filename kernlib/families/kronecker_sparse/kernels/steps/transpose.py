"""Matrices turned over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.families.kronecker_sparse.lowering.problem import (
    Scope,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Step

THREADS = 256
TILE = 64
ALIGNMENT = 256  # of each operand in the workspace
FIXED = Fields((
    "i64 row_stride", "i64 pitch",  # of in and of out
    "u32 rows", "u32 columns",  # n and f
    "u32 column_tiles",
    "u32 vectors",  # whether rows of in take aligned 16-byte loads
    "u32 whole",  # whether lines of out take aligned 16-byte stores
    "u32 unused",
))  # fmt: skip


class Transpose(Kernel):
    """Turns a matrix and, if it is to, adds up its rows by tiles."""

    role = "step"
    name = "turn"
    header = "kronecker_sparse/transpose.cuh"
    entry = "kronecker_sparse_transpose"
    reason = (
        "x turned to batch last, or the result back: the product between them is `hopper`'s, "
        "chosen where a model of times says that this is fastest"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        dtype: str
        bias: bool = False

    def step(
        self,
        dtype: str,
        sizes: tuple[int, int],
        strides: tuple[int, int],
        alignment: int,
        pointers: tuple[tuple[str, int], ...],
        aligned: bool = True,
        bias: bool = False,
    ) -> Step:
        """The launch that turns ``sizes``, rows and columns, at the first of ``pointers`` to
        columns and rows at the second: rows and turned columns lie ``strides`` elements apart. The
        first row begins at ``alignment`` modulo 16. Turned columns take whole 16 bytes, aligned, of
        which the last may end in zeros, if they are said to be ``aligned``; else they lie anywhere,
        and nothing behind them is written. With ``bias`` a third pointer gets the sums of TILE rows
        each, in float32."""
        rows, columns = sizes
        row_stride, pitch = strides
        chunk = 16 // DTYPES[dtype].bytes
        tiles = ceil_div(columns, TILE), ceil_div(rows, TILE)
        fixed = FIXED.pack(
            row_stride=row_stride,
            pitch=pitch,
            rows=rows,
            columns=columns,
            column_tiles=tiles[0],
            vectors=row_stride % chunk == 0 and alignment % 16 == 0,
            whole=aligned,
            unused=0,
        )
        spec = self.spec((), Transpose.Variant(dtype, bias))
        return Step(spec, (tiles[0] * tiles[1], 1), fixed, pointers)

    def axes(self, subject: tuple, scope: Scope) -> Mapping[str, Iterable]:
        """Without sums."""
        return {"dtype": scope.dtypes, "bias": (False,)}

    def spec(self, subject: tuple, variant: Variant, arch: str = "") -> KernelSpec:
        """The specification of a variant, of half types if it sums rows too."""
        dtype, bias = variant
        facts = {
            "InputT": DTYPES[dtype].cuda,
            "HALF_INPUT": dtype != "float32",
            "BIAS": bias,
            "PARAMETER_BYTES": Parameters(2 + bias, FIXED.format).size,
        }
        source = self.source(facts, FIXED.text())
        return Transpose().named_spec(source, THREADS, 0, dtype, ["bias"] * bias)


def pitch(dtype: str, count: int) -> int:
    """From one turned line of ``count`` elements to the next: whole chunks of 16 bytes."""
    chunk = 16 // DTYPES[dtype].bytes
    return round_up(count, chunk)


def size(dtype: str, lines: int, count: int) -> int:
    """Workspace of turned lines of ``count`` elements each, in bytes."""
    return ceil_div(lines * pitch(dtype, count) * DTYPES[dtype].bytes, ALIGNMENT) * ALIGNMENT
