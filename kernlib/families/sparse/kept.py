"""Matrices laid out for products on a CPU: densely, or where that would be too large, as entries
with their places. They are kept, because laying one out takes longer than most products with it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from contextlib import suppress
from typing import NamedTuple

import torch

from kernlib.families.sparse.layout import untransformed
from kernlib.families.sparse.matrix import SparseMatrix, by_entries
from kernlib.families.sparse.tensors import State, state_of
from kernlib.runtime.dtypes import accumulator

# Most bytes that are kept in all. A matrix that is larger, or was dropped because it had not been
# used for longest, is laid out again when it is needed.
MOST_BYTES = 1 << 30
INDEX_BYTES = 16  # of row and column in COO


class _Kept(NamedTuple):
    matrix: weakref.ref  # when the matrix dies, the entry is dropped
    state: State  # of the matrix when it was laid out
    dense: torch.Tensor


_kept: OrderedDict[int, _Kept] = OrderedDict()  # by the matrix's id


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
    found = _kept.get(id(w))
    if found is not None and found.matrix() is w and found.state == state:
        with suppress(KeyError):  # another thread may have dropped it to make room
            _kept.move_to_end(id(w))
        return found.dense
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
    own = id(w)
    _kept.pop(own, None)
    if _bytes(dense) > MOST_BYTES:
        return
    _kept[own] = _Kept(weakref.ref(w, lambda _: _kept.pop(own, None)), state, dense)
    total = sum(_bytes(each.dense) for each in tuple(_kept.values()))
    while total > MOST_BYTES and _kept:
        with suppress(KeyError):
            total -= _bytes(_kept.popitem(last=False)[1].dense)
