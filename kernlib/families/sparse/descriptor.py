"""Products of tensors with compressed matrices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kernlib.descriptors.base import render
from kernlib.descriptors.epilogues import Epilogue, Product, as_epilogues


@dataclass(frozen=True, slots=True)
class SparseMatmul(Product):
    """``y = epilogue(W x)``, the product with a matrix W (R, C) that
    :func:`kernlib.sparse.compress` made.

    x is (..., C) and y (..., R), as with ``torch.nn.functional.linear``:

        ``y[..., r] = epilogue(sum_c W[r, c] * x[..., c])``, the sums in float32.

    ``epilogue`` is none, one or several of :mod:`kernlib.descriptors.epilogues`, of which
    :class:`kernlib.Bias` adds one value for each row of W. The matrix's size, format and dtype are
    those of the call. Raises TypeError for an epilogue of another kind. The model is MACKO-SpMV.
    """

    family: ClassVar[str] = "sparse"

    epilogue: Epilogue | tuple[Epilogue, ...] = ()
    text: str = field(init=False, repr=False, compare=False)  # kept for Dynamo, as Pairwise's is

    def __post_init__(self):
        object.__setattr__(self, "epilogue", as_epilogues(self.epilogue))
        object.__setattr__(self, "text", render(self))

    def __hash__(self) -> int:
        return hash(self.text)  # which a str computes once

    def describe(self) -> str:
        return f"SparseMatmul({', '.join(str(epilogue) for epilogue in self.epilogue)})"
