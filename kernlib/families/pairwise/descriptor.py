"""Distance and kernel matrices: every pair of a point of ``a`` and a point of ``b``."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from kernlib.descriptors.base import (
    Descriptor,
    as_int,
    check_flag,
    check_precision,
    explained,
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
from kernlib.families.pairwise.combined import Combined, named

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import TypedDict, Unpack

    class _Options(TypedDict, total=False):
        """What every named descriptor passes on to :class:`Pairwise`."""

        precision: str | None
        symmetric: bool
        direct: bool
        categories: int
        features: Iterable[int] | slice | None

    class _Stages(_Options, total=False):
        """What those without an epilogue of their own pass on as well."""

        epilogue: Epilogue | tuple[Epilogue, ...]


OPERATORS = ("difference", "dot")
MOST_CATEGORIES = 128  # whose sizes are parameters of a kernel
CODES = ("a_codes", "b_codes", "tables")  # arguments of a call with categories besides its points


@explained
@dataclass(frozen=True, slots=True, repr=False)
class Pairwise(Combined, Descriptor):
    """``out[l,m,n] = epilogue(outer(sum_k inner(op(a[l,m,k], b[l,n,k]))))``.

    ``operator`` is ``"difference"`` (``b - a``) or ``"dot"`` (``b * a``); ``inner`` and ``outer``
    are stages of :mod:`kernlib.families.pairwise.stages`; ``epilogue`` is none, one or several of
    :mod:`kernlib.descriptors.epilogues`. ``symmetric`` computes K(a, a): ``b`` is left out, half of
    the sums are computed, and the result is bitwise symmetric.

    ``precision`` is the accuracy asked for: ``"fp32"`` that of fp32 arithmetic, whichever unit
    computes it; ``"tf32"`` and ``"bf16"`` permit the smaller one of tensor cores' single products,
    for squared differences and dot products of float32. None follows what torch's
    settings permit to its own products at the time of the call. ``direct`` takes differences
    of coordinates even where tensor cores would do, which is exact near duplicates and slower.

    Functions such as :func:`kernlib.gaussian` take ``features=range(8)`` too, or other places of
    features: of these alone, as a :class:`kernlib.Formula`, whose sums and products with others are
    formulas again.

    ``categories`` is the number of categorical features, each of which adds an entry of a table to
    the sum: ``epilogue(outer(sum_k ... + sum_c tables[c][a_codes[m,c], b_codes[n,c]]))``.

    Raises ValueError for a combination that has no meaning, TypeError for parts of another kind.
    The four stages and their combinations are those of the kermac project.

    ``kernlib.run_kernel(descriptor, a, b, out=None, accumulate=False, row_offset=0, col_offset=0,
    feature_map=None, lengthscale=None, **hyperparameters)``:

    - ``a`` (M, K) or (L, M, K), ``b`` (N, K) or (L, N, K), any strides; float32, float64, float16
      or bfloat16, computed in float64 for float64 and in float32 for the others. ``symmetric``
      leaves b out. The result is (M, N), or (L, M, N) where an argument has a batch of L.
    - One argument for each parameter of the epilogue, such as ``bandwidth``, and for stages Power
      ``p``, or ``inner_p`` and ``outer_p``; ``inner_scale`` for ExpPower. Each is a real number, or
      a tensor of shape (), or (L,) or (L, 1, 1) with a value for each entry of the batch: never one
      for each feature or point. (L,) is refused where L is the number of points without a batch.
    - ``feature_map``: weights (K,) or a matrix (K, K2), by which the points are multiplied first;
      ``lengthscale``: a value for each feature, (K,), by which they are divided, with which
      ``bandwidth`` is 1 unless it is given too.
    - ``a_codes`` (M, C), ``b_codes`` (N, C) and ``tables`` (C, S, S), or a list of C tables, with C
      ``categories``: see :func:`kernlib.families.pairwise.categories.operation.run`.
    - ``epsilon`` and ``regularization``, with an epilogue: values smaller than the one in magnitude
      count as 0; the other is added where ``m + row_offset == n + col_offset``, the diagonal.
    - ``out`` (M, N) or (L, M, N), any strides, written in place, or with ``accumulate`` added to.

    :func:`kernlib.families.pairwise.operation.run` has the details. A call raises ValueError and
    TypeError that name the argument, RuntimeError for an ``out`` while gradients are recorded.
    :attr:`signature` is the call that this descriptor takes.

    Example:
        >>> kernel = kl.Pairwise(inner=kl.Square(), epilogue=kl.Gaussian())
        >>> kl.run_kernel(kernel, torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), bandwidth=5.0)
        tensor([[0.6065]])
        >>> kernel.parameters, kernel.positive, kernel.signed, kernel.takes_products
        (('bandwidth',), frozenset({'bandwidth'}), False, True)
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
    # NOTE: without a place in repr, as texts and keys without categories are what they always were.
    categories: int = field(default=0, repr=False)
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
        count = _checked_categories(self.categories, self.symmetric)
        object.__setattr__(self, "categories", count)
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
        return hash(self.text)  # a str computes its hash once

    @property
    def takes_products(self) -> bool:
        """Whether a kernel of tensor cores may compute it, for some tensors and exponents."""
        if self.direct or self.categories:
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

    @property
    def operands(self) -> tuple[str, ...]:
        return ("a",) if self.symmetric else ("a", "b")

    @property
    def required(self) -> tuple[str, ...]:
        inner = isinstance(self.inner, norms.EXPONENTS)
        needed = {
            "p": inner,
            "inner_scale": isinstance(self.inner, norms.ExpPower),
            # Which p sets as well behind an inner Power.
            "outer_p": isinstance(self.outer, norms.Power)
            and not isinstance(self.inner, norms.Power),
        }
        codes = CODES if self.categories else ()
        named = (name for name, is_needed in needed.items() if is_needed)
        return (*codes, *named, *self.parameters)

    @property
    def options(self) -> dict[str, object]:
        return {
            **({"epsilon": 0.0, "regularization": 0.0} if self.epilogue else {}),
            **{"row_offset": 0, "col_offset": 0, "feature_map": None, "lengthscale": None},
            **{"out": None, "accumulate": False, "debug": False},
        }

    def describe(self) -> str:
        """By the name that people use, if there is one: ``gaussian``, ``matern52(symmetric)``."""
        name, epilogues = _known(self)
        parts = [str(epilogue) for epilogue in epilogues]
        if not name:
            stages = [f"op={self.operator}", f"inner={self.inner}", f"outer={self.outer}"]
            name, parts = "Pairwise", stages + parts
        elif name == "polynomial":
            parts.insert(0, f"degree={self.epilogue[0].degree}")
        parts += ["symmetric"] if self.symmetric else []
        parts += ["direct"] if self.direct else []
        parts += [f"categories={self.categories}"] if self.categories else []
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


def _known(descriptor: Pairwise) -> tuple[str, tuple[Epilogue, ...]]:
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
        names = ", ".join(f"{cls.__name__}()" for cls in allowed)
        from kernlib.hints.descriptors import instead_of_part

        advice = instead_of_part(stage, allowed)
        raise TypeError(f"{argument} must be one of {names}, got {shown(stage)}{advice}")


def _checked_categories(value: object, symmetric: bool) -> int:
    count = as_int("categories", value)
    if not 0 <= count <= MOST_CATEGORIES:
        raise ValueError(f"categories must be from 0 to {MOST_CATEGORIES}, got {shown(count)}")
    if count and symmetric:
        raise ValueError(
            "symmetric=True takes no categories, whose tables need not be symmetric: for K(a, a) "
            "pass a and its codes twice"
        )
    return count


_named = functools.partial(named, Pairwise)


# What each computes, of points a (M, K) and b (N, K); how a call looks; what its arguments may be.


@_named("epilogue")
def l1_distance(**fields: Unpack[_Stages]) -> Pairwise:
    """``out[m, n] = sum_k |b[n, k] - a[m, k]|``, the L1 distance.

    ``kernlib.run_kernel(kernlib.l1_distance(), a, b)``: ``a`` (M, K) and ``b`` (N, K) give (M, N).
    Fields (``epilogue``, ``precision``, ``symmetric``, ``direct``, ``categories``, ``features``),
    further arguments of the call and what either raises: see :class:`Pairwise`.

    Example:
        >>> kl.run_kernel(kl.l1_distance(), torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
        tensor([[7.]])
    """
    return Pairwise(inner=norms.Abs(), **fields)


@_named("epilogue")
def l2_distance(**fields: Unpack[_Stages]) -> Pairwise:
    """``out[m, n] = sqrt(sum_k (b[n, k] - a[m, k])^2)``, the Euclidean distance.

    ``kernlib.run_kernel(kernlib.l2_distance(), a, b)``: ``a`` (M, K) and ``b`` (N, K) give (M, N).
    Fields (``epilogue``, ``precision``, ``symmetric``, ``direct``, ``categories``, ``features``),
    further arguments of the call and what either raises: see :class:`Pairwise`.

    Example:
        >>> kl.run_kernel(kl.l2_distance(), torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
        tensor([[5.]])
    """
    return Pairwise(inner=norms.Square(), outer=norms.Sqrt(), **fields)


@_named("epilogue")
def squared_distance(**fields: Unpack[_Stages]) -> Pairwise:
    """``out[m, n] = sum_k (b[n, k] - a[m, k])^2``, the squared Euclidean distance.

    ``kernlib.run_kernel(kernlib.squared_distance(), a, b)``: ``a`` (M, K) and ``b`` (N, K) give
    (M, N). Fields (``epilogue``, ``precision``, ``symmetric``, ``direct``, ``categories``,
    ``features``), further arguments of the call and what either raises: see :class:`Pairwise`.

    Example:
        >>> kl.run_kernel(kl.squared_distance(), torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
        tensor([[25.]])
    """
    return Pairwise(inner=norms.Square(), **fields)


@_named("epilogue")
def p_distance(**fields: Unpack[_Stages]) -> Pairwise:
    """``out[m, n] = (sum_k |b[n, k] - a[m, k]|^p)^(1/p)``, the distance of the p-norm.

    ``kernlib.run_kernel(kernlib.p_distance(), a, b, p=1.5)``: ``a`` (M, K) and ``b`` (N, K) give
    (M, N). ``p``, 0 or greater, counts differing features for 0 and takes the largest difference
    for inf. Fields (``epilogue``, ``precision``, ``symmetric``, ``direct``, ``categories``,
    ``features``), further arguments of the call and what either raises: see :class:`Pairwise`.

    Example:
        >>> kl.run_kernel(kl.p_distance(), torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), p=3.0)
        tensor([[4.4979]])
    """
    return Pairwise(inner=norms.Power(), outer=norms.Root(), **fields)


@_named("epilogue")
def power_sum(**fields: Unpack[_Stages]) -> Pairwise:
    """``out[m, n] = sum_k |b[n, k] - a[m, k]|^p``, without the root of :func:`p_distance`.

    ``kernlib.run_kernel(kernlib.power_sum(), a, b, p=1.5)``: ``a`` (M, K) and ``b`` (N, K) give
    (M, N). ``p`` is 0 or greater. Fields (``epilogue``, ``precision``, ``symmetric``, ``direct``,
    ``categories``, ``features``), further arguments of the call and what either raises: see
    :class:`Pairwise`.

    Example:
        >>> kl.run_kernel(kl.power_sum(), torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), p=3.0)
        tensor([[91.]])
    """
    return Pairwise(inner=norms.Power(), **fields)


@_named("epilogue")
def exp_power_sum(**fields: Unpack[_Stages]) -> Pairwise:
    """``out[m, n] = sum_k exp(inner_scale * |b[n, k] - a[m, k]|^p)``, kernels of single features.

    ``kernlib.run_kernel(kernlib.exp_power_sum(), a, b, p=2.0, inner_scale=-0.5)``: ``a`` (M, K) and
    ``b`` (N, K) give (M, N). ``p`` is 0 or greater and finite, ``inner_scale`` any number. Fields
    (``epilogue``, ``precision``, ``symmetric``, ``direct``, ``categories``, ``features``), further
    arguments of the call and what either raises: see :class:`Pairwise`.

    Example:
        >>> a, b = torch.zeros(1, 2), torch.ones(1, 2)
        >>> kl.run_kernel(kl.exp_power_sum(), a, b, p=1.0, inner_scale=-0.1)
        tensor([[1.8097]])
    """
    return Pairwise(inner=norms.ExpPower(), **fields)


@_named("epilogue")
def dot_product(**fields: Unpack[_Stages]) -> Pairwise:
    """``out[m, n] = sum_k b[n, k] * a[m, k]``, the dot product.

    ``kernlib.run_kernel(kernlib.dot_product(), a, b)``: ``a`` (M, K) and ``b`` (N, K) give (M, N).
    Fields (``epilogue``, ``precision``, ``symmetric``, ``direct``, ``categories``, ``features``),
    further arguments of the call and what either raises: see :class:`Pairwise`.

    Example:
        >>> kl.run_kernel(kl.dot_product(), torch.ones(1, 2), torch.tensor([[3.0, 4.0]]))
        tensor([[7.]])
    """
    return Pairwise("dot", inner=norms.Identity(), **fields)


@_named()
def laplace_l1(**fields: Unpack[_Options]) -> Pairwise:
    """``out[m, n] = exp(-|b[n] - a[m]|_1 / bandwidth)``, the Laplace kernel of the L1 distance.

    ``kernlib.run_kernel(kernlib.laplace_l1(), a, b, bandwidth=10.0)``: ``a`` (M, K) and ``b``
    (N, K) give (M, N). ``bandwidth`` is greater than 0, in the units of the distance. Fields
    (``precision``, ``symmetric``, ``direct``, ``categories``, ``features``), further arguments of
    the call and what either raises: see :class:`Pairwise`.

    Example:
        >>> kl.run_kernel(kl.laplace_l1(), torch.zeros(1, 2), torch.ones(1, 2), bandwidth=2.0)
        tensor([[0.3679]])
    """
    return l1_distance(epilogue=Laplace(), **fields)


@_named()
def laplace_l2(**fields: Unpack[_Options]) -> Pairwise:
    """``out[m, n] = exp(-|b[n] - a[m]|_2 / bandwidth)``, the Laplace kernel of the L2 distance.

    ``kernlib.run_kernel(kernlib.laplace_l2(), a, b, bandwidth=10.0)``: ``a`` (M, K) and ``b``
    (N, K) give (M, N). ``bandwidth`` is greater than 0, in the units of the distance. Fields
    (``precision``, ``symmetric``, ``direct``, ``categories``, ``features``), further arguments of
    the call and what either raises: see :class:`Pairwise`.

    Example:
        >>> kl.run_kernel(kl.laplace_l2(), torch.zeros(1, 2), torch.ones(1, 2), bandwidth=1.0)
        tensor([[0.2431]])
    """
    return l2_distance(epilogue=Laplace(), **fields)


@_named()
def laplace_pq(**fields: Unpack[_Options]) -> Pairwise:
    """``out[m, n] = exp(-(|b[n] - a[m]|_p / bandwidth)^q)``, of any norm and power.

    ``kernlib.run_kernel(kernlib.laplace_pq(), a, b, p=1.5, bandwidth=10.0, q=1.0)``: ``a`` (M, K)
    and ``b`` (N, K) give (M, N). ``p`` is 0 or greater; ``bandwidth``, in the units of the
    distance, and ``q`` are greater than 0. Fields (``precision``, ``symmetric``, ``direct``,
    ``categories``, ``features``), further arguments of the call and what either raises: see
    :class:`Pairwise`.

    Example:
        >>> a, b = torch.zeros(1, 2), torch.ones(1, 2)
        >>> kl.run_kernel(kl.laplace_pq(), a, b, p=1.0, bandwidth=2.0, q=2.0)
        tensor([[0.3679]])
    """
    return p_distance(epilogue=PowerExponential(), **fields)


@_named()
def gaussian(**fields: Unpack[_Options]) -> Pairwise:
    """``out[m, n] = exp(-|b[n] - a[m]|_2^2 / (2 bandwidth^2))``, the Gaussian or RBF kernel.

    ``kernlib.run_kernel(kernlib.gaussian(), a, b, bandwidth=8.0)``: ``a`` (M, K) and ``b`` (N, K)
    give (M, N). ``bandwidth`` is greater than 0, in the units of the points. Fields (``precision``,
    ``symmetric``, ``direct``, ``categories``, ``features``), further arguments of the call and what
    either raises: see :class:`Pairwise`.

    Example:
        >>> kl.run_kernel(kl.gaussian(), torch.zeros(1, 2), torch.ones(1, 2), bandwidth=1.0)
        tensor([[0.3679]])
    """
    return squared_distance(epilogue=Gaussian(), **fields)


@_named()
def matern32(**fields: Unpack[_Options]) -> Pairwise:
    """``out[m, n] = (1 + t) exp(-t)`` with ``t = sqrt(3) |b[n] - a[m]|_2 / bandwidth``, the Matérn
    kernel with ``nu = 3/2``.

    ``kernlib.run_kernel(kernlib.matern32(), a, b, bandwidth=8.0)``: ``a`` (M, K) and ``b`` (N, K)
    give (M, N). ``bandwidth`` is greater than 0, in the units of the points. Fields (``precision``,
    ``symmetric``, ``direct``, ``categories``, ``features``), further arguments of the call and what
    either raises: see :class:`Pairwise`.

    Example:
        >>> kl.run_kernel(kl.matern32(), torch.zeros(1, 2), torch.ones(1, 2), bandwidth=1.0)
        tensor([[0.2978]])
    """
    return l2_distance(epilogue=Matern(1.5), **fields)


@_named()
def matern52(**fields: Unpack[_Options]) -> Pairwise:
    """``out[m, n] = (1 + t + t^2 / 3) exp(-t)`` with ``t = sqrt(5) |b[n] - a[m]|_2 / bandwidth``,
    the Matérn kernel with ``nu = 5/2``.

    ``kernlib.run_kernel(kernlib.matern52(), a, b, bandwidth=8.0)``: ``a`` (M, K) and ``b`` (N, K)
    give (M, N). ``bandwidth`` is greater than 0, in the units of the points. Fields (``precision``,
    ``symmetric``, ``direct``, ``categories``, ``features``), further arguments of the call and what
    either raises: see :class:`Pairwise`.

    Example:
        >>> kl.run_kernel(kl.matern52(), torch.zeros(1, 2), torch.ones(1, 2), bandwidth=1.0)
        tensor([[0.3173]])
    """
    return l2_distance(epilogue=Matern(2.5), **fields)


@_named()
def rational_quadratic(**fields: Unpack[_Options]) -> Pairwise:
    """``out[m, n] = (1 + |b[n] - a[m]|_2^2 / (2 alpha bandwidth^2))^-alpha``.

    ``kernlib.run_kernel(kernlib.rational_quadratic(), a, b, bandwidth=8.0, alpha=1.0)``: ``a``
    (M, K) and ``b`` (N, K) give (M, N). ``bandwidth``, in the units of the points, and ``alpha``
    are greater than 0. Fields (``precision``, ``symmetric``, ``direct``, ``categories``,
    ``features``), further arguments of the call and what either raises: see :class:`Pairwise`.

    Example:
        >>> a, b = torch.zeros(1, 2), torch.ones(1, 2)
        >>> kl.run_kernel(kl.rational_quadratic(), a, b, bandwidth=1.0, alpha=1.0)
        tensor([[0.5000]])
    """
    return squared_distance(epilogue=RationalQuadratic(), **fields)


@_named()
def cauchy(**fields: Unpack[_Options]) -> Pairwise:
    """``out[m, n] = 1 / (1 + |b[n] - a[m]|_2^2 / bandwidth^2)``, the Cauchy kernel.

    ``kernlib.run_kernel(kernlib.cauchy(), a, b, bandwidth=8.0)``: ``a`` (M, K) and ``b`` (N, K)
    give (M, N). ``bandwidth`` is greater than 0, in the units of the points. Fields (``precision``,
    ``symmetric``, ``direct``, ``categories``, ``features``), further arguments of the call and what
    either raises: see :class:`Pairwise`.

    Example:
        >>> kl.run_kernel(kl.cauchy(), torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), bandwidth=5.0)
        tensor([[0.5000]])
    """
    return squared_distance(epilogue=Cauchy(), **fields)


@_named()
def polynomial(degree: int = 3, **fields: Unpack[_Options]) -> Pairwise:
    """``out[m, n] = (gamma * <a[m], b[n]> + offset)^degree``, with a ``degree`` from 1 to 16.

    ``kernlib.run_kernel(kernlib.polynomial(), a, b, gamma=0.1, offset=1.0)``: ``a`` (M, K) and
    ``b`` (N, K) give (M, N). ``gamma`` and ``offset`` are any numbers. Fields (``precision``,
    ``symmetric``, ``direct``, ``categories``, ``features``), further arguments of the call and what
    either raises: see :class:`Pairwise`.

    Example:
        >>> a, b = torch.ones(1, 2), torch.ones(1, 2)
        >>> kl.run_kernel(kl.polynomial(), a, b, gamma=1.0, offset=1.0)
        tensor([[27.]])
    """
    return dot_product(epilogue=Polynomial(degree), **fields)
