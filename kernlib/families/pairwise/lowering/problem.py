"""What lowering of pairwise calls shares: one call as its kernels see it, the facts that
descriptors and exponents are in device code, and the names of kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.families.pairwise import stages as norms
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering.finish import COMMON_SCALARS, is_norm, outer
from kernlib.families.pairwise.lowering.layout import Layout, group_bytes
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.config import Constant, Fact
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Kernel, named

THREADS = 256
TILE_K = 16
PROMOTE_K = 64
BIG_TILE, SMALL_TILE = 128, 64
MAX_TILES = 2**31 - 1  # blocks of a grid's first axis
MAX_BATCH_BLOCKS = 65535
OPERANDS = ("a", "b", "out")  # whose addresses the parameter struct starts with
# Headers of the types that struct Config and struct Fixed name.
TYPES = ("common/math.cuh", "pairwise/terms.cuh", "pairwise/view.cuh")

# Host values of p with code of their own; every other value shares "any", device tensors "device".
INNER_CODE = {
    0.0: "Power0",
    0.5: "PowerHalf",
    1.0: "Abs",
    1.5: "PowerThreeHalves",
    2.0: "Square",
    2.5: "PowerFiveHalves",
    3.0: "Power3",
    4.0: "Power4",
    6.0: "Power6",
    float("inf"): "PowerInfinity",
    "any": "Power",
    "device": "PowerOnDevice",
}
EXPONENT_STAGES = {  # inner stages with an exponent: their code for its values
    norms.Power: INNER_CODE,
    norms.ExpPower: {
        1.0: "ExpPower1",
        2.0: "ExpPower2",
        "any": "ExpPower",
        "device": "ExpPowerOnDevice",
        0.0: "ExpPowerOnDevice",
    },
    norms.PowerLog: {"any": "PowerLog"},
}


class Problem(NamedTuple):
    """One call's shapes and layouts, as lowering sees them."""

    m: int
    n: int
    k: int
    batch: int
    a: Layout
    b: Layout
    out: Layout
    dtype: str = "float32"
    out_dtype: str = "float32"
    diagonal: int = 0  # n - m of the entries that receive the regularization
    accumulate: bool = False
    inner: float | str = "any"  # key of inner_codes(descriptor)
    outer: float | str = "any"  # key of EXPONENT_CODE or another, for outer=Power()
    root: bool = False  # outer exponent is 1 / inner exponent

    def transposed(self) -> Problem:
        """The same call with a and b exchanged: it fills out's transpose."""
        return Problem(
            self.n, self.m, self.k, self.batch, self.b, self.a, self.out.transposed(),
            self.dtype, self.out_dtype, -self.diagonal, self.accumulate,
            self.inner, self.outer, self.root,
        )  # fmt: skip


class Call(NamedTuple):
    """What a kernel of a matrix is chosen for: ``strides`` are those of the hyperparameters over
    the batch, ``precision`` what products of float32 may be, "fp32" or "tf32"."""

    descriptor: Pairwise
    problem: Problem
    strides: tuple[int, ...] = ()
    precision: str = "fp32"


class Scope(NamedTuple):
    """What is known of calls whose kernels are compiled ahead."""

    dtypes: tuple[str, ...]
    arch: str


class PairKernel(Kernel):
    """A kernel of a descriptor, whose texts behind the facts are in their arithmetic."""

    def source(self, facts: Mapping[str, Fact], *texts: str, includes: Iterable[str] = ()) -> str:
        arithmetic = "using AccT = Config::AccT;\n"
        return super().source(facts, arithmetic, *texts, includes=includes)

    def described(
        self,
        descriptor: Pairwise,
        source: str,
        threads: int,
        shared_bytes: int,
        words: list[str],
        unsaid: tuple[str, ...] = (),
    ) -> KernelSpec:
        """The specification of a source: its description is the descriptor's, then ``unsaid``, then
        ``words``, which its name has too."""
        line = " ".join([descriptor.describe(), *unsaid, *words])
        spec = KernelSpec("pairwise", source, self.entry, threads, shared_bytes, description=line)
        return named(spec, *short(descriptor), *words, epilogue=descriptor.epilogue)


def inner_codes(descriptor: Pairwise) -> dict[float | str, str]:
    """Kinds of inner exponent that have code of their own, and that code."""
    stage = type(descriptor.inner)
    return EXPONENT_STAGES.get(stage) or {"any": stage.__name__}


def scalar_count(descriptor: Pairwise) -> int:
    return len(COMMON_SCALARS) + len(descriptor.parameters)


def short(descriptor: Pairwise) -> list[str]:
    """A descriptor in a few words, for names of kernels: operator and stages."""
    stages = (type(stage).__name__ for stage in (descriptor.inner, descriptor.outer))
    return [descriptor.operator, *(name for name in stages if name != "Identity")]


def exponents(descriptor: Pairwise, variant) -> list[str]:
    """What tells apart the kernels of a descriptor by their exponents."""
    words, codes = [], inner_codes(descriptor)
    inner = next(kind for kind in codes if codes[kind] == codes[variant.inner])
    words += [f"p={inner}"] * (inner != "any")
    if isinstance(descriptor.outer, norms.Power):
        words.append("outer=" + outer(descriptor, variant)[0].replace(" ", ""))
        words += ["norm"] * is_norm(descriptor, variant)
    return words


def types(dtype: str, out_dtype: str | None = None) -> dict[str, Fact]:
    """Facts: storage, arithmetic and storage of the result."""
    storage = DTYPES[dtype]
    facts: dict[str, Fact] = {"InputT": storage.cuda, "AccT": storage.sums.cuda}
    return facts if out_dtype is None else {**facts, "OutputT": DTYPES[out_dtype].cuda}


def terms(descriptor: Pairwise, variant, swapped: bool = False) -> dict[str, Fact]:
    """Facts of the terms that a kernel sums. ``variant`` has what :func:`finish.finish` reads."""
    inner = inner_codes(descriptor)[variant.inner]
    difference = "SwappedDifference" if swapped else "Difference"
    operation = "Dot" if descriptor.operator == "dot" else difference
    return {
        "Inner": inner,
        "Term": f"{operation}<{inner}>",
        "BY_NORM": is_norm(descriptor, variant),
        "SCALARS": scalar_count(descriptor),
    }


def accesses(**kinds: str) -> dict[str, Fact]:
    """Facts of how operands are read: values of :func:`layout.access` by name."""
    return {name: Constant(f"Access::{kind}") for name, kind in kinds.items()}


def view(layout: Layout) -> tuple[int, int, int]:
    """struct View of a tensor."""
    return layout.batch, layout.rows, layout.columns


def shared_bytes(dtype: str, tile: int, long_k: bool, categories: int = 0) -> int:
    """Two stages of both operands and the tile of sums, which share memory when K is short. Codes
    and tables of categories take that of the stages, or lie behind the sums."""
    accumulator = DTYPES[dtype].sums.bytes
    line = (tile + 16 // accumulator) * accumulator
    stages, sums = 2 * 2 * TILE_K * line, tile * line
    if categories and not long_k:
        sums += group_bytes(tile)
    return stages + sums if long_k else max(stages, sums)
