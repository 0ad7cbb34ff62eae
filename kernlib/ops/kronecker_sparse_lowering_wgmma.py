"""What Hopper's kernels are assembled from: types and epilogues, the matrix instruction, the
parameter struct, stages that fit shared memory."""

from __future__ import annotations

import struct
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.descriptors.expression import Node, Operation
from kernlib.jit import targets
from kernlib.ops import kronecker_sparse_lowering_source as text
from kernlib.ops.kronecker_sparse_lowering_problem import TYPES, Choice, Problem, ceil

ARCH = "sm_90a"
THREADS = 384
ROW_BYTES = 128  # of a swizzled row of shared memory
SWIZZLE_BYTES = 1024  # whose multiples swizzled rows begin at, where shared memory does at 16
BARRIER_BYTES = 256  # at most, of static shared memory
MAX_STAGES = 8
MAX_TILES = 2**31 - 1  # of all CTAs, counted by an int
_CHEAP = ("+", "-", "*", "neg", "abs", "max", "min")
_KINDS = {"float16": ("f16", 16), "bfloat16": ("bf16", 16), "float32": ("tf32", 8)}


def multiply(
    dtype: str, columns: int, registers: bool, left_lines: bool = False, right_lines: bool = False
) -> str:
    """CUDA text of ``multiply(sums, a, b, accumulate)``: one wgmma of 64 rows by ``columns``, with
    ``a`` in four registers of a thread or, by a descriptor, in shared memory, and ``b`` there:
    depths are neighbours or, as the last arguments say, rows of ``a`` and columns of ``b``."""
    kind, depth = _KINDS[dtype]
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    bound = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if registers:
        parameter, left, next_ = "const u32 (&a)[4]", "{%%%d, %%%d, %%%d, %%%d}", count + 4
        left = left % tuple(range(count, count + 4))
        given = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])'
    else:
        parameter, left, next_ = "u64 a", f"%{count}", count + 1
        given = '"l"(a)'
    transposes = "" if registers else f", {int(left_lines)}"
    transposes = "" if dtype == "float32" else f"{transposes}, {int(right_lines)}"
    shape = f"m64n{columns}k{depth}.f32.{kind}.{kind}"
    return f"""__device__ __forceinline__ void multiply(float (&d)[{count}], {parameter},
                                         u64 b, int accumulate) {{
    asm volatile("{{\\n\\t"
                 ".reg .pred p;\\n\\t"
                 "setp.ne.b32 p, %{next_ + 1}, 0;\\n\\t"
                 "wgmma.mma_async.sync.aligned.{shape} "
                 "{{{sums}}}, {left}, %{next_}, p, 1, 1{transposes};\\n\\t"
                 "}}"
                 : {bound}
                 : {given}, "l"(b), "r"(accumulate));
}}
"""


def preamble(dtype: str, epilogue: tuple[Epilogue, ...], staged: bool = False) -> str:
    """Types, and the epilogues in two parts: the cheap ones at the beginning go over accumulators,
    128 times unrolled, the others, or all if ``staged``, in a loop over the staged tile."""
    count = next(
        (i for i, part in enumerate(epilogue) if staged or not _is_cheap(part.tree())), None
    )
    head, rest = epilogue[:count], () if count is None else epilogue[count:]
    return f"""#include "common/types.cuh"
#include "common/math.cuh"

using InputT = {TYPES[dtype][0]};
using AccT = float;
using OutputT = InputT;

constexpr int VECTORS = {len(text.vectors(epilogue))};
constexpr int SCALARS = {text.scalar_count(epilogue)};
constexpr bool HEAD = {str(bool(head)).lower()};
constexpr bool REST = {str(bool(rest)).lower()};
constexpr int HEAD_VECTORS = {len(text.vectors(head))};
constexpr int HEAD_SCALARS = {text.scalar_count(head)};

{text.finish(head)}
{text.finish(rest, "Rest")}"""


def _is_cheap(node: Node) -> bool:
    """Whether an expression takes but a few instructions."""
    if not isinstance(node, Operation):
        return True
    return node.operator in _CHEAP and all(map(_is_cheap, node.operands))


def default(problem: Problem, known: list[Choice], multiprocessors: int) -> Choice:
    """Of candidates by preference the one taken untuned."""
    return known[0]


def products(dtype: str, precision: str) -> int:
    """Products of one multiplication: 3 for fp32 by 3xTF32."""
    return 3 if (dtype, precision) == ("float32", "fp32") else 1


def row(dtype: str) -> int:
    """Elements of a swizzled row."""
    return ROW_BYTES // TYPES[dtype][1]


def stages(kept: int, stage: int) -> tuple[int, int]:
    """As many stages as fit beside ``kept`` bytes, and the dynamic shared memory of all."""
    kept += SWIZZLE_BYTES
    count = min(MAX_STAGES, (targets.SHARED_BYTES[ARCH] - BARRIER_BYTES - kept) // stage)
    return count, kept + count * stage


class Parameters(NamedTuple):
    """The parameter struct: tensor maps, which align it to 64 bytes, the kernel's own pointers and
    the epilogue's, its scalars, and what is fixed, in a format of :mod:`struct`."""

    maps: int
    pointers: int
    fixed: str
    epilogue: tuple[Epilogue, ...] = ()

    @property
    def size(self) -> int:
        size = self._place() + struct.calcsize(self.fixed)
        return ceil(size, 64) * 64 if self.maps else size

    def pack(self, *values: int) -> bytes:
        """The fixed values, up to the end of the struct."""
        return struct.pack(self.fixed, *values).ljust(self.size - self._place(), b"\0")

    def _place(self) -> int:
        """Where the fixed values begin."""
        pointers = self.pointers + len(text.vectors(self.epilogue))
        return 128 * self.maps + 8 * pointers + 16 * text.scalar_count(self.epilogue)
