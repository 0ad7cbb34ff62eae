"""Products with compressed matrices in PyTorch: one product with the matrix laid out densely or,
where that would be too large, as entries with their places.

On a CPU what was laid out is kept, because laying a matrix out takes longer than most products with
it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from contextlib import suppress
from typing import NamedTuple

import torch

from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.layout import untransformed
from kernlib.families.sparse.matrix import SparseMatrix, by_entries
from kernlib.families.sparse.tensors import State, state_of
from kernlib.runtime import expressions
from kernlib.runtime.dtypes import accumulator

# Most bytes that are kept in all. A matrix that is larger, or was dropped because it had not been
# used for longest, is laid out again when it is needed.
MOST_BYTES = 1 << 30
INDEX_BYTES = 16  # of row and column in COO


class _LaidOut(NamedTuple):
    matrix: weakref.ref  # when the matrix dies, the entry is dropped
    state: State  # of the matrix when it was laid out
    dense: torch.Tensor


_cache: OrderedDict[int, _LaidOut] = OrderedDict()  # by the matrix's id


def sparse_matmul(
    descriptor: SparseMatmul, dense: torch.Tensor, x: torch.Tensor, parameters: dict | None = None
) -> torch.Tensor:
    """The product that ``descriptor`` describes, of ``dense`` (R, C), or a matrix in torch's layout
    COO, and ``x`` (..., C): (..., R) in the dtype of ``x``. float16 and bfloat16 are computed in
    float32. ``parameters`` of the epilogue are numbers and tensors, vectors of shape (R,).

    As in every dense product, an infinite or NaN value of x is multiplied by the zeros too, which
    gives NaN. Kernels that skip entries that are not stored do not do so.
    """
    wide = accumulator(x.dtype)
    y = multiply(dense.to(wide), x.to(wide))
    y = finish(descriptor.epilogue, y, parameters or {})
    return y.to(x.dtype).contiguous()


def multiply(dense: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``y[..., r] = sum_c dense[r, c] * x[..., c]``."""
    if dense.layout != torch.strided:
        y = torch.sparse.mm(dense, x.reshape(-1, x.shape[-1]).t()).t()
        return y.reshape(*x.shape[:-1], dense.shape[0])
    return torch.nn.functional.linear(x, dense)


def finish(epilogue: tuple, y: torch.Tensor, parameters: dict) -> torch.Tensor:
    """The epilogues applied to a product, in its dtype."""
    return expressions.apply(epilogue, y, parameters) if epilogue else y


# The matrix.


def laid_out(w: SparseMatrix) -> torch.Tensor:
    """W (R, C) laid out in the dtype of the sums: densely, or in torch's layout COO where that
    takes more than 1 GiB and COO less. On a CPU it is kept, 1 GiB in all, until torch counts a
    write to the matrix. It is not kept for tensors of inference mode, to which torch does not count
    writes."""
    wide = accumulator(w.dtype)
    if w.format == "dense" and w.dtype == wide:
        return w.operands[0]
    state = state_of(w) if w.device.type == "cpu" else None
    if state is None:
        return _laid_out(w, wide)
    cached = _cache.get(id(w))
    if cached is not None and cached.matrix() is w and cached.state == state:
        with suppress(KeyError):  # another thread may have dropped it to make room
            _cache.move_to_end(id(w))
        return cached.dense
    # A plain tensor whatever mode or transform is active, as the next product may record a
    # gradient.
    with untransformed(), torch.inference_mode(False), torch.no_grad():
        dense = _laid_out(w, wide)
    _keep(w, state, dense)
    return dense


def _laid_out(w: SparseMatrix, wide: torch.dtype) -> torch.Tensor:
    size = w.shape[0] * w.shape[1] * wide.itemsize
    if w.format == "dense" or size <= MOST_BYTES or size <= w.nnz * (INDEX_BYTES + wide.itemsize):
        return w.to_dense().to(wide)
    return by_entries(w, False).as_coo(wide)


def _bytes(laid: torch.Tensor) -> int:
    if laid.layout == torch.strided:
        return laid.nbytes
    return laid._nnz() * (INDEX_BYTES + laid.element_size())


def _keep(w: SparseMatrix, state: State, dense: torch.Tensor) -> None:
    number = id(w)
    _cache.pop(number, None)
    if _bytes(dense) > MOST_BYTES:
        return
    _cache[number] = _LaidOut(weakref.ref(w, lambda _: _cache.pop(number, None)), state, dense)
    total = sum(_bytes(entry.dense) for entry in tuple(_cache.values()))
    while total > MOST_BYTES and _cache:
        with suppress(KeyError):
            total -= _bytes(_cache.popitem(last=False)[1].dense)
