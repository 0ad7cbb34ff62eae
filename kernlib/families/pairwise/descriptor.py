"""Distance and kernel matrices: every pair of a point of ``a`` and a point of ``b``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from kernlib.descriptors.base import (
    Descriptor,
    check_flag,
    check_precision,
    render,
    shown,
)
from kernlib.descriptors.epilogues import (
    Cauchy,
    Epilogue,
    Gaussian,
    Laplace,
    Matern,
    Polynomial,
    PowerExponential,
    RationalQuadratic,
    as_epilogues,
    refuse_vectors,
)
from kernlib.families.pairwise import stages as norms

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class _Options(TypedDict, total=False):
        """What every named descriptor passes on to :class:`Pairwise`."""

        precision: str | None
        symmetric: bool
        direct: bool

    class _Stages(_Options, total=False):
        """What those without an epilogue of their own pass on as well."""

        epilogue: Epilogue | tuple[Epilogue, ...]


OPERATORS = ("difference", "dot")


@dataclass(frozen=True, slots=True)
class Pairwise(Descriptor):
    """``out[l,m,n] = epilogue(outer(sum_k inner(op(a[l,m,k], b[l,n,k]))))``.

    ``operator`` is ``"difference"`` (``b - a``) or ``"dot"`` (``b * a``); ``inner`` and ``outer``
    are stages of :mod:`kernlib.families.pairwise.stages`; ``epilogue`` is none, one or several of
    :mod:`kernlib.descriptors.epilogues`. ``symmetric`` computes K(a, a): ``b`` is left out, half of
    the sums are computed, and the result is bitwise symmetric.

    ``precision`` is the accuracy asked for: ``"fp32"`` that of fp32 arithmetic, whichever unit
    computes it; ``"tf32"`` and ``"bf16"`` permit the smaller one of tensor cores' single products,
    for squared differences and dot products of float32. None follows torch's own setting,
    ``torch.get_float32_matmul_precision()``, at the time of the call. ``direct`` takes differences
    of coordinates even where tensor cores would do, which is exact near duplicates and slower.

    Raises ValueError for a combination that has no meaning, TypeError for parts of another kind.
    The four stages and their combinations are those of the kermac project.
    """

    family: ClassVar[str] = "pairwise"

    operator: str = "difference"
    # NOTE: functions, because Dynamo traces them where it cannot a default that is an object.
    inner: object = field(default_factory=lambda: norms.Abs())
    outer: object = field(default_factory=lambda: norms.Identity())
    epilogue: Epilogue | tuple[Epilogue, ...] = ()
    precision: str | None = None
    symmetric: bool = False
    direct: bool = False
    # NOTE: kept, so that Dynamo guards a program by it: field by field, it would make symbols of
    # numbers that differ between two descriptors.
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "epilogue", as_epilogues(self.epilogue))
        refuse_vectors(self.epilogue, self.family)
        if not isinstance(self.operator, str) or self.operator not in OPERATORS:
            raise ValueError(f"operator must be one of {OPERATORS}, got {shown(self.operator)}")
        _check_stage("inner", self.inner, norms.INNER)
        _check_stage("outer", self.outer, norms.OUTER)
        check_precision(self.precision)
        check_flag("symmetric", self.symmetric)
        check_flag("direct", self.direct)
        # NOTE: texts are made when they are needed: Dynamo warns of a dataclass's repr.
        if isinstance(self.outer, norms.Root) and not isinstance(self.inner, norms.Power):
            raise ValueError(f"outer=Root() needs inner=Power(), got inner={self.inner}")
        if self.symmetric and self.signed:
            raise ValueError(
                f"symmetric=True needs inner(-v) = inner(v), which {self.inner} of a difference "
                f"is not"
            )
        object.__setattr__(self, "text", render(self))

    def __hash__(self) -> int:
        return hash(self.text)  # which a str computes once

    @property
    def takes_products(self) -> bool:
        """Whether a kernel of tensor cores may compute it, for some tensors and exponents."""
        if self.direct:
            return False
        dot = self.operator == "dot"
        return isinstance(self.inner, norms.Identity if dot else (norms.Square, norms.Power))

    @property
    def signed(self) -> bool:
        """Whether exchanging a and b changes the sum."""
        return self.operator == "difference" and isinstance(
            self.inner, (norms.Identity, norms.Sqrt)
        )

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the epilogues' parameters, in order."""
        return tuple(name for epilogue in self.epilogue for name in epilogue.parameters)

    @property
    def positive(self) -> frozenset[str]:
        """The parameters that must be greater than zero."""
        return frozenset(name for epilogue in self.epilogue for name in epilogue.positive)

    def describe(self) -> str:
        """By the name that people use, if there is one: ``gaussian``, ``matern52(symmetric)``."""
        name, epilogues = _named(self)
        parts = [str(epilogue) for epilogue in epilogues]
        if not name:
            stages = [f"op={self.operator}", f"inner={self.inner}", f"outer={self.outer}"]
            name, parts = "Pairwise", stages + parts
        elif name == "polynomial":
            parts.insert(0, f"degree={self.epilogue[0].degree}")
        parts += ["symmetric"] if self.symmetric else []
        parts += ["direct"] if self.direct else []
        return f"{name}({', '.join(parts)})" if parts else name


# The functions below by what they make; texts, since a table of descriptors would be made by each
# first call, which describes its kernels.
_DISTANCES = {
    "difference Abs() Identity()": "l1_distance",
    "difference Square() Sqrt()": "l2_distance",
    "difference Square() Identity()": "squared_distance",
    "difference Power() Root()": "p_distance",
    "difference Power() Identity()": "power_sum",
    "difference ExpPower() Identity()": "exp_power_sum",
    "dot Identity() Identity()": "dot_product",
}
_KERNELS = {
    "l1_distance Laplace()": "laplace_l1",
    "l2_distance Laplace()": "laplace_l2",
    "p_distance PowerExponential()": "laplace_pq",
    "squared_distance Gaussian()": "gaussian",
    "l2_distance Matern(nu=1.5)": "matern32",
    "l2_distance Matern(nu=2.5)": "matern52",
    "squared_distance RationalQuadratic()": "rational_quadratic",
    "squared_distance Cauchy()": "cauchy",
}


def _named(descriptor: Pairwise) -> tuple[str, tuple[Epilogue, ...]]:
    """The name of a function below that makes the descriptor, "" for none, and the epilogues that
    the function does not bring."""
    stages = f"{descriptor.operator} {descriptor.inner} {descriptor.outer}"
    distance, epilogues = _DISTANCES.get(stages, ""), descriptor.epilogue
    if not distance or not epilogues:
        return distance, epilogues
    if distance == "dot_product" and isinstance(epilogues[0], Polynomial):
        return "polynomial", epilogues[1:]
    kernel = _KERNELS.get(f"{distance} {epilogues[0]}")
    return (kernel, epilogues[1:]) if kernel else (distance, epilogues)


def _check_stage(argument: str, stage: object, allowed: tuple) -> None:
    if not isinstance(stage, allowed):
        known = ", ".join(f"{cls.__name__}()" for cls in allowed)
        raise TypeError(f"{argument} must be one of {known}, got {shown(stage)}")


def l1_distance(**fields: Unpack[_Stages]) -> Pairwise:
    """``sum_k |b - a|``."""
    return Pairwise(inner=norms.Abs(), **fields)


def l2_distance(**fields: Unpack[_Stages]) -> Pairwise:
    """``sqrt(sum_k (b - a)^2)``."""
    return Pairwise(inner=norms.Square(), outer=norms.Sqrt(), **fields)


def squared_distance(**fields: Unpack[_Stages]) -> Pairwise:
    """``sum_k (b - a)^2``."""
    return Pairwise(inner=norms.Square(), **fields)


def p_distance(**fields: Unpack[_Stages]) -> Pairwise:
    """``(sum_k |b - a|^p)^(1/p)``, with ``p`` given to the call."""
    return Pairwise(inner=norms.Power(), outer=norms.Root(), **fields)


def power_sum(**fields: Unpack[_Stages]) -> Pairwise:
    """``sum_k |b - a|^p``, with ``p`` given to the call."""
    return Pairwise(inner=norms.Power(), **fields)


def exp_power_sum(**fields: Unpack[_Stages]) -> Pairwise:
    """``sum_k exp(inner_scale * |b - a|^p)``, with ``p`` and ``inner_scale`` given to the call."""
    return Pairwise(inner=norms.ExpPower(), **fields)


def dot_product(**fields: Unpack[_Stages]) -> Pairwise:
    """``sum_k b * a``."""
    return Pairwise("dot", inner=norms.Identity(), **fields)


def laplace_l1(**fields: Unpack[_Options]) -> Pairwise:
    """``exp(-|b - a|_1 / bandwidth)``."""
    return l1_distance(epilogue=Laplace(), **fields)


def laplace_l2(**fields: Unpack[_Options]) -> Pairwise:
    """``exp(-|b - a|_2 / bandwidth)``."""
    return l2_distance(epilogue=Laplace(), **fields)


def laplace_pq(**fields: Unpack[_Options]) -> Pairwise:
    """``exp(-(|b - a|_p / bandwidth)^q)``, with ``p`` and ``q`` given to the call."""
    return p_distance(epilogue=PowerExponential(), **fields)


def gaussian(**fields: Unpack[_Options]) -> Pairwise:
    """``exp(-|b - a|_2^2 / (2 bandwidth^2))``."""
    return squared_distance(epilogue=Gaussian(), **fields)


def matern32(**fields: Unpack[_Options]) -> Pairwise:
    """Matérn kernel with ``nu = 3/2``."""
    return l2_distance(epilogue=Matern(1.5), **fields)


def matern52(**fields: Unpack[_Options]) -> Pairwise:
    """Matérn kernel with ``nu = 5/2``."""
    return l2_distance(epilogue=Matern(2.5), **fields)


def rational_quadratic(**fields: Unpack[_Options]) -> Pairwise:
    """``(1 + |b - a|_2^2 / (2 alpha bandwidth^2))^-alpha``."""
    return squared_distance(epilogue=RationalQuadratic(), **fields)


def cauchy(**fields: Unpack[_Options]) -> Pairwise:
    """``1 / (1 + |b - a|_2^2 / bandwidth^2)``."""
    return squared_distance(epilogue=Cauchy(), **fields)


def polynomial(degree: int = 3, **fields: Unpack[_Options]) -> Pairwise:
    """``(gamma * <a, b> + offset)^degree``."""
    return dot_product(epilogue=Polynomial(degree), **fields)
