"""Scaled block-sparse products as functions, and what makes float8 of other numbers."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.debug import takes_debug
from kernlib.descriptors.base import shown, whole
from kernlib.families.blocksparse.checks import FLOAT8
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.scaled.descriptor import OUT_DTYPES, BlockSparseScaledMatmul
from kernlib.run import run_kernel
from kernlib.runtime.tensors import check_dense

LARGEST = torch.finfo(FLOAT8).max  # 448
SMALLEST = torch.finfo(torch.float32).tiny
_NAMES = {getattr(torch, name): name for name in OUT_DTYPES}


@takes_debug
def quantize(
    x: torch.Tensor, dim: int | tuple[int, ...] = (-2, -1), *, debug: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(q, scale)`` with ``x`` about ``q * scale``: q of ``torch.float8_e4m3fn``, which has 4
    significant bits, and one scale, float32, for all numbers along the dimensions ``dim``, of x's
    other dimensions: the largest magnitude over 448, rounded up where that is subnormal, or 1 where
    all are 0.

    With the default a block has a scale, of values (..., capacity, rows, columns); with ``-1`` each
    row of a dense operand (..., M, C). NaN and infinity make the scale what they are.
    ``debug=True`` writes what runs to stderr.

    Raises TypeError for what is no tensor of float32, float64, float16 or bfloat16, and for what is
    neither an int nor a tuple of ints, ValueError for a dimension that x has not, which is an
    IndexError too, and for one that is there twice.

    Example:
        >>> q, scale = kl.blocksparse.quantize(torch.tensor([[896.0, -2.0], [0.0, 112.0]]), dim=-1)
        >>> scale, q.float()
        (tensor([2.0000, 0.2500]), tensor([[448., -1.], [ 0., 448.]]))
    """
    check_dense(("x",), x=x)
    if not x.dtype.is_floating_point or x.dtype.itemsize == 1:
        raise TypeError(f"x must be float32, float64, float16 or bfloat16, got {x.dtype}")
    dims = _dims(dim, x.dim())
    x = x.detach().float()
    largest = x.new_zeros([1 if i in dims else size for i, size in enumerate(x.shape)])
    if x.numel():
        largest = x.abs().amax(dims, keepdim=True) if dims else x.abs()
    # By a tensor: by a number torch multiplies with a reciprocal on GPUs.
    scale = largest / largest.new_full((), LARGEST)
    # A subnormal scale has few bits: if it were rounded down, or to 0, the largest values would
    # saturate.
    up = torch.nextafter(scale, scale.new_full((), torch.inf))
    scale = torch.where((scale < SMALLEST) & (scale * LARGEST < largest), up, scale)
    scale = torch.where(largest == 0, 1.0, scale)
    q = (x / scale).clamp(-LARGEST, LARGEST).to(FLOAT8)
    return q, scale.reshape([size for i, size in enumerate(x.shape) if i not in dims])


class DimensionError(ValueError, IndexError):
    """A dimension that a tensor has not: an IndexError, as torch's is."""


def _dims(dim, rank: int) -> tuple[int, ...]:
    """Dimensions as they are counted from the first. A number has one, as torch counts."""
    rank = max(rank, 1)
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    dims = tuple(map(whole, dims))
    if None in dims:
        raise TypeError(f"dim must be an int or a tuple of ints, got {shown(dim)}")
    if any(not -rank <= n < rank for n in dims):
        raise DimensionError(f"dim must be of x's {rank} dimensions, got {shown(dim)}")
    places = tuple(n % rank for n in dims)
    if len(set(places)) < len(places):
        raise ValueError(f"dim must name each dimension once, got {shown(dim)}")
    return places


def scaled_dsd(
    values: torch.Tensor,
    b: torch.Tensor,
    layout: Layout,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    debug: bool = False,
) -> torch.Tensor:
    """``op(S) op(b)`` of float8, S with a scale for each stored block, b with one or one for each
    column: :func:`kernlib.blocksparse.dsd` of what :func:`quantize` made.

    ``values`` (..., capacity, block rows, block columns) of a ``layout`` of R rows and C columns
    have scales ``scale_a`` (..., capacity), op(b) (..., C, N) has ``scale_b`` () or (..., N), and
    the result (..., R, N) is of ``out_dtype``, torch.bfloat16 or torch.float16. ``transpose_a``
    transposes S, ``transpose_b`` b. Blocks of 128 are multiplied by tensor cores of sm_90a where S
    is not transposed, fastest with b along the sum: ``transpose_b`` of (..., N, C). ``out`` has the
    result's shape and dtype and is written in place. ``debug=True`` writes what runs to stderr.

    It is :func:`kernlib.run_kernel` of a :class:`kernlib.BlockSparseScaledMatmul`. Raises
    ValueError for shapes, devices and layouts that do not fit each other, TypeError for other
    dtypes and kinds of arguments, RuntimeError for an ``out`` while gradients are recorded.

    Example:
        >>> layout = kl.blocksparse.dense(128, 128, block=128)
        >>> values, scale_a = kl.blocksparse.quantize(torch.ones(1, 128, 128))
        >>> b, scale_b = kl.blocksparse.quantize(torch.ones(4, 128), dim=-1)
        >>> y = kl.blocksparse.scaled_dsd(values, b, layout, scale_a, scale_b, transpose_b=True)
        >>> y.shape, y.dtype, y[0, 0].item()
        (torch.Size([128, 4]), torch.bfloat16, 128.0)
    """
    descriptor = _descriptor("dsd", transpose_a, transpose_b, out_dtype)
    return run_kernel(descriptor, layout, values, b, scale_a, scale_b, out=out, debug=debug)


def scaled_dds(
    a: torch.Tensor,
    values: torch.Tensor,
    layout: Layout,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    debug: bool = False,
) -> torch.Tensor:
    """``op(a) op(S)`` of float8, a with one scale or one for each row, S with one for each stored
    block: :func:`kernlib.blocksparse.dds` of what :func:`quantize` made.

    op(a) (..., M, R) has scales ``scale_a`` () or (..., M), ``values`` (..., capacity, block rows,
    block columns) of a ``layout`` of R rows and C columns have ``scale_b`` (..., capacity), and the
    result (..., M, C) is of ``out_dtype``, torch.bfloat16 or torch.float16. ``transpose_a``
    transposes a, ``transpose_b`` S. A linear layer is ``transpose_b``: x (..., M, C) times the
    transpose of a weight; blocks of 128 are multiplied by tensor cores of sm_90a then. ``out`` has
    the result's shape and dtype and is written in place. ``debug=True`` writes what runs to stderr.

    It is :func:`kernlib.run_kernel` of a :class:`kernlib.BlockSparseScaledMatmul`. Raises
    ValueError for shapes, devices and layouts that do not fit each other, TypeError for other
    dtypes and kinds of arguments, RuntimeError for an ``out`` while gradients are recorded.

    Example:
        >>> layout = kl.blocksparse.block_diagonal(256, block=128)
        >>> weight, scale_b = kl.blocksparse.quantize(torch.ones(2, 128, 128))
        >>> x, scale_a = kl.blocksparse.quantize(torch.ones(4, 256), dim=-1)
        >>> y = kl.blocksparse.scaled_dds(x, weight, layout, scale_a, scale_b, transpose_b=True)
        >>> y.shape, y.dtype, y[0, 0].item()
        (torch.Size([4, 256]), torch.bfloat16, 128.0)
    """
    descriptor = _descriptor("dds", transpose_a, transpose_b, out_dtype)
    return run_kernel(descriptor, layout, a, values, scale_a, scale_b, out=out, debug=debug)


def _descriptor(mode: str, of_a, of_b, out_dtype) -> BlockSparseScaledMatmul:
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in _NAMES:
        names = " or ".join(map(str, _NAMES))
        raise TypeError(f"out_dtype must be {names}, got {shown(out_dtype)}")
    make = _new if is_dynamo_compiling() else _cached
    try:
        return make(mode, of_a, of_b, _NAMES[out_dtype])
    except TypeError:  # unhashable: the cache's message says less
        return _new(mode, of_a, of_b, _NAMES[out_dtype])


def _new(mode: str, of_a, of_b, out_dtype: str) -> BlockSparseScaledMatmul:
    return BlockSparseScaledMatmul(mode, transpose_a=of_a, transpose_b=of_b, out_dtype=out_dtype)


# Dynamo does not look into it; typed, since 1 would find what True made.
_cached = lru_cache(maxsize=64, typed=True)(_new)
