"""kermac's descriptors: enums for the stages of a pairwise kernel, and the named combinations."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kernlib.descriptors import norms
from kernlib.descriptors.epilogues import Gaussian, Laplace
from kernlib.descriptors.pairwise import Pairwise


class Op(Enum):
    """Of a pair of coordinates: ``DIFF`` b - a, ``DOT`` b * a."""

    DIFF = 0
    DOT = 1


class Inner(Enum):
    """Of each feature's value: itself, ``|v|``, ``v^2``, ``sqrt(v)``, ``|v|^inner_p``."""

    NOOP = 0
    ABS = 1
    SQUARE = 2
    SQRT = 3
    POW = 4


class Outer(Enum):
    """Of the sum: itself, ``|s|``, ``s^2``, ``sqrt(s)``, ``s^outer_p``."""

    NOOP = 0
    ABS = 1
    SQUARE = 2
    SQRT = 3
    POW = 4


class Kernel(Enum):
    """Of the outer stage's value: itself, ``exp(-v / bandwidth)``,
    ``exp(-v / (2 bandwidth^2))``."""

    NONE = 0
    LAPLACE = 1
    GAUSSIAN = 2


_STAGES = {
    "NOOP": norms.Identity(),
    "ABS": norms.Abs(),
    "SQUARE": norms.Square(),
    "SQRT": norms.Sqrt(),
    "POW": norms.Power(),
}
_OPERATORS = {Op.DIFF: "difference", Op.DOT: "dot"}
_EPILOGUES = {Kernel.NONE: None, Kernel.LAPLACE: Laplace(), Kernel.GAUSSIAN: Gaussian()}


class _Fields(NamedTuple):
    op: Op = Op.DIFF
    inner: Inner = Inner.NOOP
    outer: Outer = Outer.NOOP
    kernel: Kernel = Kernel.NONE


class KernelDescriptor(_Fields):
    """The four stages of a pairwise kernel, all 150 combinations of them. Immutable, where kermac's
    could be changed for the whole process. Raises TypeError for a stage of another enum."""

    __slots__ = ()

    def __new__(
        cls,
        op: Op = Op.DIFF,
        inner: Inner = Inner.NOOP,
        outer: Outer = Outer.NOOP,
        kernel: Kernel = Kernel.NONE,
    ):
        made = super().__new__(cls, op, inner, outer, kernel)
        for name, kind, value in zip(made._fields, (Op, Inner, Outer, Kernel), made, strict=True):
            if not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}")
        return made

    @property
    def pairwise(self) -> Pairwise:
        """The same in kernlib's terms."""
        return Pairwise(
            _OPERATORS[self.op],
            _STAGES[self.inner.name],
            _STAGES[self.outer.name],
            _EPILOGUES[self.kernel],
        )


l1_norm = KernelDescriptor(Op.DIFF, Inner.ABS, Outer.NOOP, Kernel.NONE)
l2_norm = KernelDescriptor(Op.DIFF, Inner.SQUARE, Outer.SQRT, Kernel.NONE)
p_norm = KernelDescriptor(Op.DIFF, Inner.POW, Outer.POW, Kernel.NONE)
laplace_l1 = KernelDescriptor(Op.DIFF, Inner.ABS, Outer.NOOP, Kernel.LAPLACE)
laplace_l2 = KernelDescriptor(Op.DIFF, Inner.SQUARE, Outer.SQRT, Kernel.LAPLACE)
mma = KernelDescriptor(Op.DOT, Inner.NOOP, Outer.NOOP, Kernel.NONE)
