"""kermac's descriptors: enums for the stages of a pairwise kernel, and the named combinations."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kernlib.descriptors.base import shown
from kernlib.descriptors.epilogues import Gaussian, Laplace
from kernlib.families.pairwise import stages as norms
from kernlib.families.pairwise.descriptor import Pairwise


class InnerOperator(Enum):
    """The operation on a pair of coordinates: ``DIFF`` b - a, ``DOT`` b * a."""

    DIFF = auto()
    DOT = auto()


class PowerType(Enum):
    """Of each feature's value, or of the sum: itself, ``|v|``, ``v^2``, ``sqrt(v)``, and ``POW``,
    ``|v|^inner_p`` of a feature and ``s^outer_p`` of the sum."""

    NOOP = auto()
    ABS = auto()
    SQUARE = auto()
    SQRT = auto()
    POW = auto()


class KernelType(Enum):
    """The function of the outer stage's value: itself, ``exp(-v / bandwidth)``, ``exp(-v / (2
    bandwidth^2))``."""

    NONE = auto()
    LAPLACE = auto()
    GAUSSIAN = auto()


class Symmetry(Enum):
    """No call of kermac takes it; for K(a, a) by half of the sums see
    :class:`kernlib.Pairwise`."""

    NonSymmetric = auto()
    Symmetric = auto()


_STAGES = {
    PowerType.NOOP: norms.Identity(),
    PowerType.ABS: norms.Abs(),
    PowerType.SQUARE: norms.Square(),
    PowerType.SQRT: norms.Sqrt(),
    PowerType.POW: norms.Power(),
}
_OPERATORS = {InnerOperator.DIFF: "difference", InnerOperator.DOT: "dot"}
_EPILOGUES = {
    KernelType.NONE: None,
    KernelType.LAPLACE: Laplace(),
    KernelType.GAUSSIAN: Gaussian(),
}
_KINDS = {
    "inner_operator": InnerOperator,
    "inner_power": PowerType,
    "outer_power": PowerType,
    "kernel_type": KernelType,
}


@dataclass(frozen=True)
class KernelDescriptor:
    """The four stages of a pairwise kernel, all 150 combinations of them. Immutable, where kermac's
    could be changed for the whole process.

    - ``inner_operator``: an :class:`InnerOperator`, of each pair of coordinates.
    - ``inner_power``, ``outer_power``: a :class:`PowerType`, of each feature and of the sum.
    - ``kernel_type``: a :class:`KernelType`, of what the outer stage gives.

    ``pairwise`` is the same in kernlib's terms. Raises TypeError for a stage of another enum.
    """

    inner_operator: InnerOperator = InnerOperator.DIFF
    inner_power: PowerType = PowerType.NOOP
    outer_power: PowerType = PowerType.NOOP
    kernel_type: KernelType = KernelType.NONE
    # Kept, as it takes 14 us to make.
    pairwise: Pairwise = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise TypeError(f"{name} must be of {kind.__name__}, got {shown(value)}")
        stages = _STAGES[self.inner_power], _STAGES[self.outer_power]
        pairwise = Pairwise(_OPERATORS[self.inner_operator], *stages, _EPILOGUES[self.kernel_type])
        object.__setattr__(self, "pairwise", pairwise)


def _difference(inner: PowerType, outer: PowerType, kernel: KernelType) -> KernelDescriptor:
    return KernelDescriptor(InnerOperator.DIFF, inner, outer, kernel)


kernel_descriptor_l1_norm = _difference(PowerType.ABS, PowerType.NOOP, KernelType.NONE)
kernel_descriptor_l2_norm = _difference(PowerType.SQUARE, PowerType.SQRT, KernelType.NONE)
kernel_descriptor_p_norm = _difference(PowerType.POW, PowerType.POW, KernelType.NONE)
kernel_descriptor_laplace_l1 = _difference(PowerType.ABS, PowerType.NOOP, KernelType.LAPLACE)
kernel_descriptor_laplace_l2 = _difference(PowerType.SQUARE, PowerType.SQRT, KernelType.LAPLACE)
kernel_descriptor_mma = KernelDescriptor(InnerOperator.DOT)

# Shorter names of the same.
Op, Inner, Outer, Kernel = InnerOperator, PowerType, PowerType, KernelType
l1_norm, l2_norm = kernel_descriptor_l1_norm, kernel_descriptor_l2_norm
p_norm, mma = kernel_descriptor_p_norm, kernel_descriptor_mma
laplace_l1, laplace_l2 = kernel_descriptor_laplace_l1, kernel_descriptor_laplace_l2
