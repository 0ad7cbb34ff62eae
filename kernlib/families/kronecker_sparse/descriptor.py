"""Products of a tensor with Kronecker-sparse factors, whose support is ``I_a ⊗ 1_{b×c} ⊗ I_d``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import ClassVar

from kernlib.descriptors.base import (
    Descriptor,
    as_int,
    check_flag,
    check_precision,
    explained,
    render,
    require,
    shown,
)
from kernlib.descriptors.epilogues import Epilogue, Product, as_epilogues

MOST = 2**60  # numbers of a weight: an address has 64 bits, and a float64 8 bytes


@explained
@dataclass(frozen=True, slots=True, repr=False)
class KroneckerSparse(Product):
    """``y = epilogue(K x)``, the product with one factor of pattern ``(a, b, c, d)``.

    The factor K has ``a*b*d`` rows, ``a*c*d`` columns and, out of a weight W (a, b, c, d),

        ``K[i*b*d + j*d + l, i*c*d + k*d + l] = W[i, j, k, l]``, everything else 0.

    With ``batch_last=False`` x is (..., in_features) and y (..., out_features), and

        ``y[..., i*b*d + j*d + l] = epilogue(sum_k W[i,j,k,l] * x[..., i*c*d + k*d + l])``;

    with ``batch_last=True`` x is (in_features, ...) and y (out_features, ...). d = 1 is
    block-diagonal, (1, b, c, 1) dense; Monarch and butterfly layers are chains of such factors.

    ``epilogue`` is none, one or several of :mod:`kernlib.descriptors.epilogues`, of which
    :class:`kernlib.Bias` adds one value for each output feature. ``precision`` permits less
    accuracy of float32: ``"tf32"`` and ``"bf16"`` let the products be taken in TF32, ``"fp32"``
    does not, None does if torch's settings permit it to torch's products at the call.

    Raises TypeError for sizes that are no ints and parts of another kind, ValueError for sizes
    below 1 and for more numbers than a tensor may hold. Patterns, names and layouts are those of
    the KSMM project.

    ``kernlib.run_kernel(descriptor, x, weight, out=None, **parameters)``:

    - ``x`` (..., in_features), or (in_features, ...) with ``batch_last``, of any strides and any
      number of further dimensions, none included; ``weight`` (a, b, c, d), of any strides. A chain
      takes a weight for each of its factors, in their order.
    - float32, float16, bfloat16 or float64, the same for all tensors, computed in float32 for half
      types. Under autocast they are cast as those of ``torch.nn.Linear`` are.
    - ``out``: the shape and dtype of the result, any strides, written in place; without it a new
      contiguous tensor.
    - One argument for each parameter of the epilogue: ``bias`` a tensor (out_features,), scalars as
      real numbers or tensors of shape () that stay on the device and are not looked at there.

    Gradients of all tensors are recorded, and those of the gradients; then an activation is not
    fused with the product but applied to its rounded result, so that the gradient is exact.

    A call raises ValueError and TypeError that name the argument, RuntimeError for an ``out`` while
    gradients are recorded.

    Example:
        >>> factor = kl.KroneckerSparse(2, 3, 4, 5)
        >>> factor.pattern == factor.weight_shape, factor.in_features, factor.out_features
        (True, 40, 30)
        >>> factor.density, factor.operands, factor.transposed().pattern, len(factor.factors)
        (0.1, ('x', 'weight'), (2, 4, 3, 5), 1)
        >>> y = kl.run_kernel(factor, torch.ones(40), torch.ones(factor.pattern))
        >>> factor.describe(), y.unique()  # each feature of y is a sum of 4
        ('KroneckerSparse(2, 3, 4, 5)', tensor([4.]))
    """

    family: ClassVar[str] = "kronecker_sparse"

    a: int
    b: int
    c: int
    d: int
    _: KW_ONLY
    batch_last: bool = False
    epilogue: Epilogue | tuple[Epilogue, ...] = ()
    precision: str | None = None
    text: str = field(init=False, repr=False, compare=False)  # kept for Dynamo, as Pairwise's is
    form: str = field(init=False, repr=False, compare=False)  # the text of sizes of 1

    def __post_init__(self):
        for name, size in (("a", self.a), ("b", self.b), ("c", self.c), ("d", self.d)):
            size = as_int(name, size)
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {shown(size)}")
            object.__setattr__(self, name, size)
        numbers = self.a * self.b * self.c * self.d
        if numbers >= MOST:
            raise ValueError(f"a * b * c * d must be below 2**60, got {shown(numbers)}")
        check_flag("batch_last", self.batch_last)
        object.__setattr__(self, "epilogue", as_epilogues(self.epilogue))
        check_precision(self.precision)
        object.__setattr__(self, "text", render(self))
        head = f"KroneckerSparse(a={self.a}, b={self.b}, c={self.c}, d={self.d}"
        form = f"KroneckerSparse(a=1, b=1, c=1, d=1{self.text[len(head) :]}"
        object.__setattr__(self, "form", form)

    def __hash__(self) -> int:
        return hash(self.text)  # a str computes its hash once

    def __reduce__(self):
        keywords = {name: getattr(self, name) for name in ("batch_last", "epilogue", "precision")}
        return partial(type(self), **keywords), self.pattern

    @property
    def pattern(self) -> tuple[int, int, int, int]:
        """``(a, b, c, d)``."""
        return self.a, self.b, self.c, self.d

    @property
    def factors(self) -> tuple[KroneckerSparse]:
        """Itself alone: a chain of one."""
        return (self,)

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """The shape of the weight, which is the pattern."""
        return self.pattern

    @property
    def in_features(self) -> int:
        """``a * c * d``."""
        return self.a * self.c * self.d

    @property
    def out_features(self) -> int:
        """``a * b * d``."""
        return self.a * self.b * self.d

    @property
    def density(self) -> float:
        """The part of K that the weight fills: ``1 / (a * d)``."""
        return 1 / (self.a * self.d)

    @property
    def operands(self) -> tuple[str, ...]:
        """x and the weight."""
        return "x", "weight"

    def transposed(self) -> KroneckerSparse:
        """The product with the transpose of K, without an epilogue: its pattern is (a, c, b, d),
        its weight ``weight.transpose(1, 2)``."""
        return KroneckerSparse(
            self.a, self.c, self.b, self.d, batch_last=self.batch_last, precision=self.precision
        )

    def describe(self) -> str:
        """One line for people."""
        parts = [str(size) for size in self.pattern]
        parts += ["batch_last"] * self.batch_last
        parts += [str(epilogue) for epilogue in self.epilogue]
        return f"KroneckerSparse({', '.join(parts)})"


@explained
@dataclass(frozen=True, slots=True, repr=False)
class KroneckerSparseChain(Descriptor):
    """``y = factor_n(... factor_1(x))``: the right-most factor of the product comes first, and has
    its own weight and epilogue. ``factors`` is a tuple of :class:`kernlib.KroneckerSparse`, or one,
    in the order in which they are applied. A call takes a weight for each, in that order:
    ``kernlib.run_kernel(chain, x, weight1, ..., weightn, out=None, **parameters)``.

    Raises ValueError, naming the factor, where one does not take the features, the layout or the
    parameter names that the others leave to it; TypeError for what is no
    :class:`KroneckerSparse`.

    Example:
        >>> first = kl.KroneckerSparse(1, 2, 2, 2, epilogue=kl.Bias("shift"))
        >>> chain = kl.KroneckerSparseChain((first, kl.KroneckerSparse(2, 2, 2, 1)))
        >>> chain.operands, chain.parameters, chain.vectors, chain.positive
        (('x', 'weight1', 'weight2'), ('shift',), ('shift',), frozenset())
        >>> chain.in_features, chain.out_features, chain.batch_last, chain.describe()
        (4, 4, False, "KroneckerSparseChain(KroneckerSparse(1, 2, 2, 2, Bias(...)), ...")
    """

    family: ClassVar[str] = "kronecker_sparse"
    package: ClassVar[str] = "chain"

    factors: tuple[KroneckerSparse, ...]
    text: str = field(init=False, repr=False, compare=False)
    form: str = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        factors = (self.factors,) if isinstance(self.factors, KroneckerSparse) else self.factors
        if not isinstance(factors, (tuple, list)):
            raise TypeError(f"factors must be a tuple of KroneckerSparse, got {shown(factors)}")
        object.__setattr__(self, "factors", tuple(factors))
        require(len(self.factors) > 0, "factors must hold at least one KroneckerSparse, got none")
        for index, factor in enumerate(self.factors):
            if not isinstance(factor, KroneckerSparse):
                raise TypeError(f"factors[{index}] must be a KroneckerSparse, got {shown(factor)}")
        _check_chain(self.factors)
        object.__setattr__(self, "text", render(self))
        forms = ", ".join([factor.form for factor in self.factors])
        forms += "," * (len(self.factors) == 1)
        object.__setattr__(self, "form", f"KroneckerSparseChain(factors=({forms}))")

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def operands(self) -> tuple[str, ...]:
        """x, and a name for each factor's weight."""
        return "x", *(f"weight{index}" for index in range(1, len(self.factors) + 1))

    @property
    def batch_last(self) -> bool:
        """Whether features are the first dimension of x and of the result, not the last."""
        return self.factors[0].batch_last

    @property
    def in_features(self) -> int:
        """The first factor's ``in_features``."""
        return self.factors[0].in_features

    @property
    def out_features(self) -> int:
        """The last factor's ``out_features``."""
        return self.factors[-1].out_features

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all factors' parameters, in order."""
        return tuple(name for factor in self.factors for name in factor.parameters)

    @property
    def vectors(self) -> tuple[str, ...]:
        """The parameters that hold one value for each output feature of their factor, in order."""
        return tuple(name for factor in self.factors for name in factor.vectors)

    @property
    def positive(self) -> frozenset[str]:
        """The parameters that must be greater than zero."""
        return frozenset(name for factor in self.factors for name in factor.positive)

    def describe(self) -> str:
        """One line for people, of all factors."""
        return f"KroneckerSparseChain({', '.join(f.describe() for f in self.factors)})"


def _check_chain(factors: tuple[KroneckerSparse, ...]) -> None:
    first, names = factors[0], []
    for index, factor in enumerate(factors):
        previous = factors[max(index - 1, 0)]
        repeated = [p for p in factor.parameters if p in names]
        # Texts only where they are needed: Dynamo cannot trace them.
        if index and factor.in_features != previous.out_features:
            raise ValueError(
                f"{_place(index, factor)} takes {factor.in_features} features, and "
                f"{_place(index - 1, previous)} gives {previous.out_features}"
            )
        if factor.batch_last != first.batch_last:
            raise ValueError(
                f"{_place(index, factor)} has batch_last={factor.batch_last}, and factors[0] "
                f"{first.batch_last}: one chain has one layout"
            )
        if repeated:
            raise ValueError(
                f"{_place(index, factor)} repeats the parameter(s) {repeated} of an earlier "
                "factor; rename one, as in Bias('bias2')"
            )
        names += factor.parameters


def _place(index: int, factor: KroneckerSparse) -> str:
    return f"factors[{index}] {factor.describe()}"
