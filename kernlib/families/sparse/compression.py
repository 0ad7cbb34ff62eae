"""Matrices compressed for users: the arguments of :func:`compress`, and its warning."""

from __future__ import annotations

import torch

from kernlib.debug import eager_only
from kernlib.errors import warn
from kernlib.families.sparse.layout import formats
from kernlib.families.sparse.matrix import SparseMatrix, compressed, is_unpruned


@eager_only
def compress(
    dense: torch.Tensor,
    format: str = "auto",
    columns: int = 1,
    values: str | None = None,
    *,
    debug: bool = False,
) -> SparseMatrix:
    """A matrix (R, C) compressed where it lies, on the CPU or by kernels on a GPU.

    - ``dense``: float16, bfloat16 or float32, of any strides, or a matrix of one of torch's sparse
      layouts, which is compressed by its entries. Its gradient is not recorded.
    - ``format``: "bitmap" (the values, and one bit for each position), "u8" (for each value a byte
      that says its column, for densities below 0.1), "u4" (four bits), "u2" (two bits), "macko"
      (MACKO-SpMV's), "dense", or "auto": the format whose product is fastest, by the bytes that it
      takes for this matrix and by measured rates.
    - ``columns``: for "auto", how many vectors products mostly have at a time. "bitmap" multiplies
      several at nearly the price of one, the others do not. More than 64 are fastest with "dense".
    - ``values``: None keeps them as they are. "int8", "fp8" (e4m3) and "int4" store each in 8 or 4
      bits, in the format "bitmap", which is then "bitmap-int8" and so on: its value becomes a code
      times the scale of its row and 256 columns, or 128 for "int4", rounded to the dtype. Kernels
      multiply float16 and bfloat16, up to 16 vectors. docs/concepts/accuracy.md has the errors.
    - ``debug=True`` writes what runs to stderr.

    Warns with a :class:`kernlib.KernlibWarning` where "auto" keeps a matrix dense because it has
    too few zeros. Raises TypeError for what is no tensor; ValueError for another dtype or number of
    dimensions, for a format that is not known or cannot hold the matrix, for ``values`` that are
    not known, do not go with the format or cannot represent NaN and infinities of the matrix, and
    for ``columns`` that are no positive int. Formats and their comparison follow MACKO-SpMV and
    SpInfer.

    Example:
        >>> weight = kl.sparse.magnitude(torch.randn(64, 64), density=0.1)
        >>> w = kl.sparse.compress(weight)
        >>> w.nnz, w.to_dense().equal(weight), w.nbytes < weight.nbytes
        (410, True, True)
        >>> small = kl.sparse.compress(weight, values="int8")
        >>> small.format, small.nbytes < w.nbytes, (small.to_dense() - weight).abs().max() < 0.02
        ('bitmap-int8', ..., tensor(True))
    """
    format = formats().with_values(format, values)
    matrix = compressed(dense, format, columns)
    if format == "auto" and is_unpruned(matrix):
        warn(
            f"compress leaves the matrix {matrix.shape} dense, which has too few zeros to "
            "compress. kernlib.sparse.magnitude(dense, density=0.5) prunes it; format='dense' says "
            "that this is meant"
        )
    return matrix
