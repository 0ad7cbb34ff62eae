"""What both of Hopper's kernels are assembled from: the matrix instruction, checks of what the copy
engine can address, tiles that fit shared memory."""

from __future__ import annotations

from kernlib.descriptors.epilogues import Epilogue
from kernlib.descriptors.expression import Node, Operation
from kernlib.jit import targets
from kernlib.ops import kronecker_sparse_lowering_source as text
from kernlib.ops.kronecker_sparse_lowering_problem import TYPES, Problem, ceil

ARCH = "sm_90a"
THREADS = 384
ROW_BYTES = 128  # of a swizzled row of shared memory
MAX_STAGES = 8
DEEP = 1024  # depth from which few tiles are summed in parts
MAX_TILES = 2**31 - 1
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


def preamble(dtype: str, epilogue: tuple[Epilogue, ...]) -> str:
    """Types, and the epilogues in two parts: the cheap ones at the beginning go over accumulators,
    128 times unrolled, the others in a loop over the staged tile."""
    count = next((i for i, part in enumerate(epilogue) if not _is_cheap(part.tree())), None)
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


def products(problem: Problem) -> int:
    """Products of one multiplication: 3 for fp32 by 3xTF32."""
    return products_of(problem.dtype, problem.precision)


def products_of(dtype: str, precision: str) -> int:
    return 3 if (dtype, precision) == ("float32", "fp32") else 1


def is_deep(problem: Problem) -> bool:
    """Whether tiles are few and their sums long, as in the gradient of a weight."""
    return problem.depth > DEEP and problem.depth >= 4 * max(problem.rows, problem.columns)


def addressable(dtype: str, alignment: int, sizes: tuple, strides: tuple[int, ...]) -> bool:
    """Whether a tensor map holds a tensor: strides, in elements, of all dimensions but the
    innermost, whose size comes first among ``sizes``."""
    itemsize = TYPES[dtype][1]
    steps = [s * itemsize for s, n in zip(strides, sizes[1:], strict=True) if n > 1]
    return (
        alignment % 16 == 0
        and all(0 < size < 2**31 for size in sizes)
        and all(step > 0 and step % 16 == 0 and step < 2**40 for step in steps)
    )


def byte_strides(dtype: str, sizes: tuple, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor map: of a single entry any that a map may have."""
    itemsize = TYPES[dtype][1]
    pairs = zip(strides, sizes[1:], strict=True)
    return tuple(stride * itemsize if size > 1 else 16 for stride, size in pairs)


def stages(shared: int, stage: int) -> int:
    """As many stages as fit beside ``shared`` bytes."""
    return min(MAX_STAGES, (targets.SHARED_BYTES[ARCH] - shared) // stage)


def parameter_bytes(maps: int, pointers: int, scalars: int, fixed: int) -> int:
    """Size of the parameter struct, which tensor maps align to 64 bytes."""
    return ceil(128 * maps + 8 * pointers + 16 * scalars + fixed, 64) * 64
