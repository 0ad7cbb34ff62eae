"""Products of a tensor with ``F1 ⊗ F2 ⊗ ... ⊗ FN``, which is never made."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import ClassVar

from kernlib.descriptors.base import check_precision, explained, render, shown, whole
from kernlib.descriptors.epilogues import Epilogue, Product, as_epilogues

SIDES = ("right", "left")  # of x, where the factors stand
MOST = 2**60  # features, as many as float64 tensors of 2**63 bytes have


@explained
@dataclass(frozen=True, slots=True, repr=False)
class KroneckerProduct(Product):
    """``y = epilogue(x (F1 ⊗ ... ⊗ FN))``, or ``epilogue((F1 ⊗ ... ⊗ FN) x)`` with the factors on
    the left of x.

    The Kronecker product of matrices ``F_i`` of ``rows_i`` rows and ``columns_i`` columns is

        ``(F1 ⊗ F2)[i1 * rows_2 + i2, j1 * columns_2 + j2] = F1[i1, j1] * F2[i2, j2]``,

    of ``prod rows_i`` rows and ``prod columns_i`` columns. A product with it takes
    ``2 * sum_i features_i * columns_i`` operations a row, ``features_i`` being the row's length
    when factor i is applied, where the matrix itself would take
    ``2 * prod rows_i * prod columns_i``.

    ``shapes`` holds ``(rows, columns)`` of each factor as it multiplies, or one int for a square
    one. ``transposed`` says whether the call is given a factor's transpose, of shape
    ``(columns, rows)``: one bool for all of them, or one for each. ``side`` is where the factors
    stand, ``"right"`` or ``"left"`` of x. ``epilogue`` is none, one or several of
    :mod:`kernlib.descriptors.epilogues`, of which :class:`kernlib.Bias` adds one value for each
    output feature. ``precision`` permits less accuracy of float32: ``"tf32"`` and ``"bf16"`` let
    the products be taken in TF32, ``"fp32"`` does not, None does if
    torch's settings permit it to torch's products at the call.

    Raises TypeError for shapes that are no ints and parts of another kind, ValueError for no
    factors, sizes below 1, and for more features than a tensor may hold. The operation is that of
    the FastKron project.

    ``kernlib.run_kernel(descriptor, x, *factors, out=None, **parameters)``:

    - ``x`` (..., M, in_features), or (..., in_features, M) with the factors on the left, of any
      strides; with one dimension it is one row, or column, and the result has one dimension too.
    - ``factors``: a matrix for each of ``shapes``, of any strides, or a batch of them, (..., rows,
      columns). Dimensions in front of the last two of x and of each factor broadcast.
    - float32, float16, bfloat16 or float64, the same for all tensors. Sums of half types are
      float32; on GPUs those of one factor may be rounded before the next. Under autocast tensors
      are cast as those of ``torch.nn.Linear`` are.
    - ``out``: the shape and dtype of the result, any strides, written in place; without it a new
      contiguous tensor.
    - One argument for each parameter of the epilogue: ``bias`` a tensor (out_features,), scalars as
      real numbers or tensors of shape () that stay on the device and are not looked at there.

    Gradients of all tensors are recorded, and those of the gradients.

    A call raises ValueError and TypeError that name the argument, RuntimeError for an ``out`` while
    gradients are recorded.

    Example:
        >>> product = kl.KroneckerProduct(((2, 2), (2, 3)), transposed=(False, True))
        >>> product.in_features, product.out_features, product.axis, product.factor_shapes
        (4, 6, -1, ((2, 2), (3, 2)))
        >>> product.operands, product.describe()
        (('x', 'factor1', 'factor2'), 'KroneckerProduct(2x2, 2x3)')
        >>> kl.run_kernel(product, torch.ones(4), torch.eye(2), torch.ones(3, 2))
        tensor([2., 2., 2., 2., 2., 2.])
    """

    family: ClassVar[str] = "kronecker_product"

    shapes: tuple[tuple[int, int] | int, ...]
    _: KW_ONLY
    side: str = "right"
    transposed: bool | tuple[bool, ...] = False
    epilogue: Epilogue | tuple[Epilogue, ...] = ()
    precision: str | None = None
    text: str = field(init=False, repr=False, compare=False)  # kept for Dynamo, as Pairwise's is
    form: str = field(init=False, repr=False, compare=False)  # the text of shapes (1, 1)

    def __post_init__(self):
        put = partial(object.__setattr__, self)
        put("shapes", _checked_shapes(self.shapes))
        if not isinstance(self.side, str) or self.side not in SIDES:
            raise ValueError(f"side must be one of {SIDES}, got {shown(self.side)}")
        put("transposed", _checked_flags(self.transposed, len(self.shapes)))
        put("epilogue", as_epilogues(self.epilogue, summands=True))
        check_precision(self.precision)
        put("text", render(self))
        head = len(f"KroneckerProduct(shapes={render(self.shapes)}")
        shapes = render(((1, 1),) * len(self.shapes))
        put("form", f"KroneckerProduct(shapes={shapes}{self.text[head:]}")

    def __hash__(self) -> int:
        return hash(self.text)  # a str computes its hash once

    def __reduce__(self):
        names = ("side", "transposed", "epilogue", "precision")
        return partial(type(self), **{name: getattr(self, name) for name in names}), (self.shapes,)

    @property
    def operands(self) -> tuple[str, ...]:
        """x, and a name for each factor."""
        return "x", *(f"factor{index}" for index in range(1, len(self.shapes) + 1))

    @property
    def factor_shapes(self) -> tuple[tuple[int, int], ...]:
        """The shapes of the factors as a call is given them."""
        pairs = zip(self.shapes, self.transposed, strict=True)
        return tuple(shape[::-1] if turned else shape for shape, turned in pairs)

    @property
    def in_features(self) -> int:
        """The product of all rows; with the factors on the left, of all columns."""
        return math.prod([shape[self.side == "left"] for shape in self.shapes])

    @property
    def out_features(self) -> int:
        """The product of all columns; with the factors on the left, of all rows."""
        return math.prod([shape[self.side == "right"] for shape in self.shapes])

    @property
    def axis(self) -> int:
        """The dimension of x and of the result that holds their features."""
        return -1 if self.side == "right" else -2

    def describe(self) -> str:
        """One line for people."""
        parts = ["x".join(map(str, shape)) for shape in self.shapes]
        parts += ["left"] * (self.side == "left")
        parts += [str(epilogue) for epilogue in self.epilogue]
        return f"KroneckerProduct({', '.join(parts)})"


def _checked_shapes(shapes: object) -> tuple[tuple[int, int], ...]:
    if not isinstance(shapes, (tuple, list)):
        raise TypeError(
            f"shapes must be a tuple of (rows, columns), one a factor, got {shown(shapes)}"
        )
    if not shapes:
        raise ValueError("shapes must hold at least one factor's (rows, columns), got none")
    checked = []
    for index, item in enumerate(shapes):
        shape = item if whole(item) is None else (item, item)
        if not isinstance(shape, (tuple, list)) or len(shape) != 2:
            raise TypeError(f"shapes[{index}] must be (rows, columns), got {shown(item)}")
        sizes = tuple(map(whole, shape))
        if None in sizes:
            raise TypeError(f"shapes[{index}] must hold ints, got {shown(item)}")
        if min(sizes) < 1:
            raise ValueError(f"shapes[{index}] must hold sizes above 0, got {shown(item)}")
        checked.append(sizes)
    for name, sizes in (("rows", [s[0] for s in checked]), ("columns", [s[1] for s in checked])):
        if math.prod(sizes) >= MOST:
            raise ValueError(f"the {name} of shapes multiply to 2**60 or more: {shown(sizes)}")
    return tuple(checked)


def _checked_flags(transposed: object, count: int) -> tuple[bool, ...]:
    flags = (transposed,) * count if type(transposed) is bool else transposed
    if not isinstance(flags, (tuple, list)) or any(type(flag) is not bool for flag in flags):
        raise TypeError(f"transposed must be a bool, or one for each factor, got {shown(flags)}")
    if len(flags) != count:
        raise ValueError(f"transposed must hold {count} bools, one a factor, got {shown(flags)}")
    return tuple(flags)
