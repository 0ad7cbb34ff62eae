"""What kernels of attention have in common."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from kernlib.families.blocksparse.lowering.attention import score_source
from kernlib.families.blocksparse.lowering.attention.problem import (
    Attention,
    AttentionGradient,
    Operand,
    Score,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.config import Fact
from kernlib.lowering.kernel import Kernel, named
from kernlib.lowering.parameters import Fields

HALVES = ("float16", "bfloat16")
SIDES = (16, 32, 64, 128)  # of blocks
CHUNK = 8  # elements of 16 bytes


class Scope(NamedTuple):
    """What is known of calls whose kernels are compiled ahead: rows and columns of a block, dtypes,
    the target, features of q and k, and of v; None for all that there are."""

    block: tuple[int, int]
    dtypes: tuple[str, ...]
    arch: str
    features: int | None = None
    values: int | None = None

    @property
    def halves(self) -> list[str]:
        """The dtypes that kernels take."""
        return [dtype for dtype in self.dtypes if dtype in HALVES]


class AttentionKernel(Kernel):
    """A kernel whose subject is a Score. ``title`` is what its descriptions call it, behind
    "attention"."""

    title: ClassVar[str]

    def score_spec(
        self,
        score: Score,
        variant: Any,
        facts: dict[str, Fact],
        fields: Fields,
        *texts: str,
        threads: int,
        shared: int,
        words: list[str],
        includes: tuple[str, ...] = (),
    ) -> KernelSpec:
        """The specification of a variant, of further facts, struct Fixed and further texts."""
        facts = score_source.facts(variant.dtype, score) | facts
        generated = fields.text(), score_source.text(score), *texts
        source = self.source(facts, *generated, includes=(*score_source.INCLUDES, *includes))
        return self.described(source, threads, shared, words)

    def described(self, source: str, threads: int, shared: int, words: list[str]) -> KernelSpec:
        """The specification of a source whose variant ``words`` tell."""
        line = " ".join(["blocksparse attention", *self.title.split(), *words])
        spec = KernelSpec("blocksparse", source, self.entry, threads, shared, description=line)
        return named(spec, *words)


def operand_strides(problem: Attention | AttentionGradient, *names: str) -> dict[str, tuple]:
    """Members of struct Fixed: from one batch, head and row of these to the next."""
    return {f"{name}_strides": getattr(problem, name)[:3] for name in names}


def common_sizes(problem: Attention) -> dict[str, int]:
    """Members of struct Fixed that every kernel has, of the problem's names."""
    names = ("heads", "group", "queries", "keys", "layout_batch", "layout_head")
    return {name: getattr(problem, name) for name in names}


def is_aligned(operand: Operand) -> bool:
    """Whether rows are read and written by 16 bytes."""
    return operand.alignment % 16 == 0 and not any(stride % CHUNK for stride in operand[:3])
