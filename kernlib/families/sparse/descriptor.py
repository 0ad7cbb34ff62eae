"""Products of tensors with compressed matrices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kernlib.descriptors.base import explained, render
from kernlib.descriptors.epilogues import Epilogue, Product, as_epilogues


@explained
@dataclass(frozen=True, slots=True, repr=False)
class SparseMatmul(Product):
    """``y = epilogue(W x)``, the product with a matrix W (R, C) that
    :func:`kernlib.sparse.compress` made.

    x is (..., C) and y (..., R), as with ``torch.nn.functional.linear``:

        ``y[..., r] = epilogue(sum_c W[r, c] * x[..., c])``, the sums in float32.

    ``epilogue`` is none, one or several of :mod:`kernlib.descriptors.epilogues`, of which
    :class:`kernlib.Bias` adds one value for each row of W. The matrix's size, format and dtype are
    those of the call's ``w``. Raises TypeError for what is no epilogue. The model is MACKO-SpMV.

    ``kernlib.run_kernel(descriptor, w, x, out=None, **parameters)``:

    - ``w``: a :class:`kernlib.sparse.SparseMatrix` (R, C), as :func:`kernlib.sparse.compress`
      makes.
    - ``x`` (..., C) of any strides and any number of leading dimensions, none included, of w's
      dtype and on its device. Autocast casts it, and vectors of the epilogue, to w's dtype.
    - ``out``: (..., R) of any strides, written in place; without it a new contiguous tensor.
    - One argument for each parameter of the epilogue: ``bias`` a tensor (R,), scalars as real
      numbers or tensors of shape () that stay on the device and are not looked at there.

    On a GPU up to 16 vectors are multiplied by the format's own kernels, and of "bitmap" with
    16-bit values up to 32, on Hopper up to 1024. cuBLAS multiplies more vectors, and matrices in
    the dense format; for that the matrix is laid out densely at each call. Epilogues other than a
    bias are then applied to the rounded product.

    Infinite and NaN entries of x: formats "bitmap", of any values, and "dense", and whatever cuBLAS
    or the CPU computes, multiply them by zeros as well, which gives NaN. "u8", "u4", "u2" and
    "macko" skip entries that are not stored. What lies behind x in memory never matters.

    Gradients of x and of the epilogue's parameters are recorded, and those of the gradients. The
    gradient of x uses the matrix's transpose. When a gradient is recorded, an activation is not
    fused with the product but applied to its rounded result, so that the gradient is exact. The
    matrix is a constant.

    A call raises ValueError and TypeError that name the argument, RuntimeError for an ``out`` while
    gradients are recorded.

    Example:
        >>> product = kl.SparseMatmul(kl.Relu())
        >>> product.operands, product.describe()
        (('w', 'x'), 'SparseMatmul(Relu())')
        >>> w = kl.sparse.compress(torch.tensor([[0.0, 2.0], [-3.0, 0.0]]), format="bitmap")
        >>> kl.run_kernel(product, w, torch.ones(2))
        tensor([2., 0.])
    """

    family: ClassVar[str] = "sparse"

    epilogue: Epilogue | tuple[Epilogue, ...] = ()
    text: str = field(init=False, repr=False, compare=False)  # kept for Dynamo, as Pairwise's is

    def __post_init__(self):
        object.__setattr__(self, "epilogue", as_epilogues(self.epilogue))
        object.__setattr__(self, "text", render(self))

    def __hash__(self) -> int:
        return hash(self.text)  # a str computes its hash once

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the matrix and of x."""
        return "w", "x"

    def describe(self) -> str:
        """One line for people."""
        return f"SparseMatmul({', '.join(str(epilogue) for epilogue in self.epilogue)})"
