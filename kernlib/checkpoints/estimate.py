"""Estimates of compressing layers, from some rows of each."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernlib.checkpoints.options import Options
from kernlib.families.sparse.formats import registry
from kernlib.families.sparse.lowering import rates
from kernlib.families.sparse.prune import magnitude

ROWS = 512  # of a weight that are read, spread over all of them
ARCH = rates.DEFAULT  # whose measured rates times are estimated by
SMALL = {"int8": 8, "fp8": 8, "int4": 4}  # bits of values in fewer bits


class Layer(NamedTuple):
    """A linear layer, converted or to be.

    - ``name`` of the module; ``shape`` (out_features, in_features) and ``dtype`` of its weight.
    - ``density``: the part of its entries that are not 0; ``format``: as of
      :func:`kernlib.sparse.compress`, "dense" for one that stays as it is.
    - ``dense_bytes``, ``nbytes``: of the weight before and after.
    - ``dense_us``, ``us``: microseconds of one product with a single vector on an H200, by measured
      rates.
    """

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    density: float
    format: str
    dense_bytes: int
    nbytes: int
    dense_us: float
    us: float


def layer_of(
    name: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    density: float,
    format: str,
    nbytes: int,
) -> Layer:
    """The facts of a layer whose weight takes ``nbytes``."""
    rows, cols = shape
    dense = rows * cols * dtype.itemsize
    row = cols * dtype.itemsize
    times = [
        rates.microseconds(kind.partition("-")[0], ARCH, density, size, 1, row, dtype.itemsize)
        for kind, size in (("dense", dense), (format, nbytes))
    ]
    return Layer(name, shape, dtype, density, format, dense, nbytes, *times)


def estimated(name: str, weight: torch.Tensor, options: Options) -> Layer:
    """The facts of a layer by some rows of its weight, counts per matrix as of these rows."""
    rows, cols = weight.shape
    some = weight[:: max(1, rows // ROWS)]
    if options.density is not None:
        some = magnitude(some, options.density, options.per)
    sizes, density = registry.measured(some)
    share = rows / max(1, some.shape[0])
    sizes = {kind: round(size * share) for kind, size in sizes.items()}
    shape = rows, cols
    format = options.format
    if format == "auto":
        format = _fastest(sizes, density, shape, weight.dtype, options.columns)
    bits = SMALL.get(options.values or "")
    nbytes = sizes.get(format, sizes["dense"])
    if bits is not None:
        nbytes = round(rows * cols * (density * bits + 1) / 8)
    return layer_of(name, shape, weight.dtype, density, format, nbytes)


def _fastest(sizes: dict[str, int], density: float, shape, dtype: torch.dtype, columns: int) -> str:
    """The format that "auto" takes for a matrix of so many bytes in each."""
    if columns > rates.MOST_COLUMNS:
        return "dense"
    if dtype == torch.float32:  # bitmap's kernels do not take these
        sizes = {name: size for name, size in sizes.items() if name != "bitmap"}
    return registry.fastest(sizes, density, shape, dtype.itemsize, ARCH, columns)
