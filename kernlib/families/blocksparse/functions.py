"""Block-sparse products as functions, as ``torch.matmul`` is called."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.epilogues import Epilogue, as_epilogues
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.layout import Layout
from kernlib.run import run_kernel

Epilogues = Epilogue | tuple[Epilogue, ...]


def sdd(
    a: torch.Tensor,
    b: torch.Tensor,
    layout: Layout,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    epilogue: Epilogues = (),
    precision: str | None = None,
    out: torch.Tensor | None = None,
    **parameters: float | torch.Tensor,
) -> torch.Tensor:
    """The blocks of ``op(a) op(b)`` that the layout stores: sparse = dense x dense.

    op(a) is (..., R, K) and op(b) (..., K, C) for a ``layout`` of R rows and C columns, with a
    dimension of its heads, or of 1, in front of these where it has heads; the result is (...,
    capacity, block rows, block columns), 0 in slots that hold no block. ``op`` is the transpose of
    the last two dimensions where ``transpose_a`` or ``transpose_b`` says so.

    It is :func:`kernlib.run_kernel` of a :class:`kernlib.BlockSparseMatmul`, which has ``epilogue``
    and its ``parameters``, ``precision`` and ``out``. Raises ValueError for shapes, devices and
    layouts that do not fit each other, TypeError for other dtypes and kinds of arguments,
    RuntimeError for an ``out`` while gradients are recorded. The operation is Torch-Blocksparse's
    ``MatMul`` of mode "sdd".

    Example:
        >>> layout = kl.blocksparse.causal(64, block=16)
        >>> a, b = torch.randn(64, 8), torch.randn(64, 8)
        >>> scores = kl.blocksparse.sdd(a, b, layout, transpose_b=True)
        >>> scores.shape, torch.allclose(scores[0], (a @ b.T)[:16, :16], atol=1e-5)
        (torch.Size([10, 16, 16]), True)
    """
    descriptor = _descriptor("sdd", transpose_a, transpose_b, epilogue, precision)
    return run_kernel(descriptor, layout, a, b, out=out, **parameters)


def dsd(
    values: torch.Tensor,
    b: torch.Tensor,
    layout: Layout,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    epilogue: Epilogues = (),
    precision: str | None = None,
    out: torch.Tensor | None = None,
    **parameters: float | torch.Tensor,
) -> torch.Tensor:
    """``op(S) op(b)`` for the block-sparse matrix S of a layout and its values: dense = sparse x
    dense.

    ``values`` are (..., capacity, block rows, block columns), op(b) is (..., C, N) and the result
    (..., R, N) for a ``layout`` of R rows and C columns, with heads in front of the last two
    dimensions where the layout has them. With ``transpose_a`` S is transposed: R and C change
    places, its blocks stay as they are. With ``transpose_b`` op(b) is the transpose of b.

    It is :func:`kernlib.run_kernel` of a :class:`kernlib.BlockSparseMatmul`, which has ``epilogue``
    and its ``parameters``, ``precision`` and ``out``. Raises ValueError for shapes, devices and
    layouts that do not fit each other, TypeError for other dtypes and kinds of arguments,
    RuntimeError for an ``out`` while gradients are recorded. The operation is Torch-Blocksparse's
    ``MatMul`` of mode "dsd".

    Example:
        >>> layout = kl.blocksparse.random(64, 32, block=16, density=0.5)
        >>> values, b = torch.randn(layout.capacity, 16, 16), torch.randn(32, 8)
        >>> y = kl.blocksparse.dsd(values, b, layout)
        >>> torch.allclose(y, layout.to_dense(values) @ b, atol=1e-5)
        True
    """
    descriptor = _descriptor("dsd", transpose_a, transpose_b, epilogue, precision)
    return run_kernel(descriptor, layout, values, b, out=out, **parameters)


def dds(
    a: torch.Tensor,
    values: torch.Tensor,
    layout: Layout,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    epilogue: Epilogues = (),
    precision: str | None = None,
    out: torch.Tensor | None = None,
    **parameters: float | torch.Tensor,
) -> torch.Tensor:
    """``op(a) op(S)`` for the block-sparse matrix S of a layout and its values: dense = dense x
    sparse.

    op(a) is (..., M, R), ``values`` are (..., capacity, block rows, block columns) and the result
    is (..., M, C) for a ``layout`` of R rows and C columns, with heads in front of the last two
    dimensions where the layout has them. With ``transpose_a`` op(a) is the transpose of a. With
    ``transpose_b`` S is transposed, as the weight of ``torch.nn.functional.linear`` is: ``dds(x,
    values, layout, transpose_b=True)`` takes x (..., C) to (..., R).

    It is :func:`kernlib.run_kernel` of a :class:`kernlib.BlockSparseMatmul`, which has ``epilogue``
    and its ``parameters``, ``precision`` and ``out``. Raises ValueError for shapes, devices and
    layouts that do not fit each other, TypeError for other dtypes and kinds of arguments,
    RuntimeError for an ``out`` while gradients are recorded. The operation is Torch-Blocksparse's
    ``MatMul`` of mode "dds".

    Example:
        >>> layout = kl.blocksparse.random(64, 32, block=16, density=0.5)
        >>> x, values = torch.randn(5, 32), torch.randn(layout.capacity, 16, 16)
        >>> y = kl.blocksparse.dds(x, values, layout, transpose_b=True)
        >>> weight = layout.to_dense(values)  # (64, 32)
        >>> torch.allclose(y, torch.nn.functional.linear(x, weight), atol=1e-5)
        True
    """
    descriptor = _descriptor("dds", transpose_a, transpose_b, epilogue, precision)
    return run_kernel(descriptor, layout, a, values, out=out, **parameters)


def _descriptor(mode: str, of_a, of_b, epilogue, precision) -> BlockSparseMatmul:
    epilogue = as_epilogues(epilogue, summands=True)
    if is_dynamo_compiling():
        return _new(mode, of_a, of_b, epilogue, precision)
    try:
        return _cached(mode, of_a, of_b, epilogue, precision)
    except TypeError:  # unhashable: the cache's message says less
        return _new(mode, of_a, of_b, epilogue, precision)


def _new(mode: str, of_a, of_b, epilogue: tuple, precision) -> BlockSparseMatmul:
    return BlockSparseMatmul(
        mode, transpose_a=of_a, transpose_b=of_b, epilogue=epilogue, precision=precision
    )


# Dynamo does not look into it; typed, since 1 would find what True made.
_cached = lru_cache(maxsize=256, typed=True)(_new)
